"""Programs as the coordinator makes them, of plain functions, for tests of parameter servers and workers."""

import jax
import numpy as np
from jax import export

from replicax._src.parameter_servers.programs.programs import UpdateProgram, WorkerProgram


def like(value):
    """What a program is told of an array: its shape and dtype."""
    value = np.asarray(value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def blob(fn, *inputs):
    """``fn`` as StableHLO, for arrays like ``inputs``."""
    return bytes(export.export(jax.jit(fn), platforms=["cpu"])(*map(like, inputs)).serialize())


def update_program(fn, state, written, *inputs):
    """What a parameter server computes: ``fn(*state, *operands)`` gives the new values of ``written``."""
    return UpdateProgram(blob(fn, *inputs), tuple(state), tuple(written))


def worker_program(fn, inputs, avals, variables=(), num_results=1, **more):
    """What a worker computes, as it comes out of a message."""
    program = WorkerProgram(
        fn.__name__, blob(fn, *avals), tuple(inputs), tuple(map(tuple, variables)), num_results, **more
    )
    return WorkerProgram.of(program.described(), program.blobs)
