"""A computation that came as StableHLO, made ready to run on this task's devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax import export

from replicax._src.errors import InvalidArgumentError
from replicax._src.ps.programs import WorkerProgram
from replicax._src.topology import REPLICA_AXIS


@final
class Executable:
    """A computation of flat arrays. It is compiled when it is called first.

    Attributes:
      compile_s: How long the first call took, seconds; 0 before it.
    """

    def __init__(self, blob: bytes, num_replicas: int = 1):
        exported = export.deserialize(bytearray(blob))
        self.compile_s = 0.0
        self._shardings: list[Any] | None = None
        if num_replicas == 1:
            self._call = jax.jit(exported.call)
        else:
            mesh = _mesh(num_replicas)
            whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            self._shardings = [sharding or whole for sharding in exported.in_shardings_jax(mesh)]
            # (That says where it runs, too, where there are no operands.)
            self._call = jax.jit(exported.call, out_shardings=whole)

    def __call__(self, inputs: Sequence[Any]) -> list[jax.Array]:
        """The results; they may be computed yet, when this returns."""
        if self._shardings is not None:
            inputs = jax.device_put(list(inputs), self._shardings)
        if self.compile_s:
            return jax.tree.leaves(self._call(*inputs))
        start = time.perf_counter()
        results = jax.tree.leaves(self._call(*inputs))
        self.compile_s = time.perf_counter() - start
        return results


def _mesh(num_replicas: int) -> jax.sharding.Mesh:
    devices = jax.local_devices()
    if len(devices) < num_replicas:
        raise InvalidArgumentError(
            f"The program is for {num_replicas} replicas, and this task has {len(devices)} devices. Start its server with "
            "as many devices as the others have."
        )
    return jax.sharding.Mesh(np.array(devices[:num_replicas]), (REPLICA_AXIS,))


@final
class LoadedProgram:
    """A WorkerProgram with its computations ready to run.

    Attributes:
      program: What came.
      whole: The pieces of all variables that the computation takes whole.
      whole_first: Of those that the lookups' ids are computed from.
      looks_up_elements: It pushes, and has lookups whose ids are computed of elements and constants only.
    """

    def __init__(self, program: WorkerProgram):
        self.program = program
        self.main = Executable(program.blob, program.num_replicas)
        self.ids = [Executable(lookup.blob, program.num_replicas) for lookup in program.lookups]
        self.whole = _pieces(program, program.inputs)
        of_lookups = [each for lookup in program.lookups for each in lookup.inputs]
        self.whole_first = _pieces(program, of_lookups)
        self.looks_up_elements = bool(program.pushes and program.lookups) and all(
            each.kind in ("element", "constant") for each in of_lookups
        )

    @property
    def compile_s(self) -> float:
        return self.main.compile_s + sum(ids.compile_s for ids in self.ids)


def _pieces(program: WorkerProgram, inputs: Sequence[Any]) -> list[Any]:
    numbers = dict.fromkeys(each.index for each in inputs if each.kind == "variable")
    return [piece for number in numbers for piece in program.variables[number]]
