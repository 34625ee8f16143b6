"""Programs of plain functions, as the coordinator makes them, for tests of parameter servers and workers."""

import jax
import numpy as np
from jax import export

from replicax._ps.programs.programs import UpdateProgram, WorkerProgram


def like(value):
    """The description of an array for a program: its shape and dtype."""
    value = np.asarray(value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def blob(fn, *inputs):
    """``fn`` as StableHLO, for arrays like ``inputs``."""
    return bytes(export.export(jax.jit(fn), platforms=["cpu"])(*map(like, inputs)).serialize())


def update_program(fn, state, written, *inputs):
    """A program for a parameter server: ``fn(*state, *operands)`` gives the new values of ``written``."""
    return UpdateProgram(blob(fn, *inputs), tuple(state), tuple(written))


def worker_program(fn, inputs, avals, variables=(), num_results=1, **more):
    """A program for a worker, as it arrives in a message."""
    program = WorkerProgram(
        fn.__name__, blob(fn, *avals), tuple(inputs), tuple(map(tuple, variables)), num_results, **more
    )
    return WorkerProgram.of(program.described(), program.blobs)
