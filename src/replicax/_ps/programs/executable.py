"""Prepares a computation that arrives as StableHLO to run on this task's devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, final

import jax
import jax.numpy as jnp
from jax import export

from replicax._ps.programs.programs import WorkerProgram
from replicax._ps.store.held_values import is_wide
from replicax._src.program_kit.errors import InvalidArgumentError
from replicax._src.program_kit.traced_programs import Topology

_MIN_REUSED_BYTES: Final = 8 << 20  # larger memory goes back to the system when freed, and is slow to get


@final
class Executable:
    """A computation on flat arrays. The first call compiles it.

    Args:
      blob: The serialized computation.
      num_replicas: The number of devices that it runs on.
      num_kept: The number of leading results that the caller may keep. Other large results reuse the memory that the
        last
        ``take_back`` returned, if it runs on one device. None lets the caller keep all.

    Attributes:
      compile_s: The seconds that the first call took; 0 before it.
    """

    def __init__(self, blob: bytes, num_replicas: int = 1, num_kept: int | None = None):
        exported = export.deserialize(bytearray(blob))
        self.compile_s = 0.0
        self._shardings: list[Any] | None = None
        self._lent: dict[int, Any] = {}  # the shape and dtype of a result, by its number
        self._memory: list[jax.Array] = []
        if num_replicas == 1:
            if num_kept is not None and jax.default_backend() == "cpu":
                after = list(enumerate(exported.out_avals))[num_kept:]
                self._lent = {number: aval for number, aval in after if _is_large(aval)}
            if self._lent:
                call = _lent_first(exported.call, self._lent)
                self._call = jax.jit(call, donate_argnums=0, keep_unused=True)
            else:
                self._call = jax.jit(exported.call)
        else:
            topology = _topology(num_replicas)
            whole = topology.replicated
            self._shardings = [sharding or whole for sharding in exported.in_shardings_jax(topology.mesh)]
            # (``out_shardings`` also says where it runs if there are no operands.)
            self._call = jax.jit(exported.call, out_shardings=whole)

    def __call__(self, inputs: Sequence[Any]) -> list[jax.Array]:
        """Returns the results. XLA may still be computing them."""
        if self._shardings is not None:
            inputs = jax.device_put(list(inputs), self._shardings)
        start = time.perf_counter()
        results = self._results(inputs)
        self.compile_s = self.compile_s or time.perf_counter() - start
        return results

    def _results(self, inputs: Sequence[Any]) -> list[jax.Array]:
        if not self._lent:
            return jax.tree.leaves(self._call(*inputs))
        memory, self._memory = self._memory, []
        memory = memory or [jnp.zeros(aval.shape, aval.dtype) for aval in self._lent.values()]
        lent, others = self._call(memory, *inputs)
        return [
            lent[number] if number in lent else others[number] for number in range(len(lent) + len(others))
        ]

    def take_back(self, results: Sequence[jax.Array]) -> None:
        """Takes back results of the last call that the caller may not keep. The next call overwrites them.

        (If a view of a result still exists, XLA uses other memory.)
        """
        self._memory = [results[number] for number in self._lent]

    def free(self) -> None:
        """Frees the memory of the results that were taken back."""
        self._memory = []


def _is_large(aval: Any) -> bool:
    return aval.size * aval.dtype.itemsize >= _MIN_REUSED_BYTES and not is_wide(aval.dtype)


def _lent_first(call: Callable[..., Any], lent: Collection[int]) -> Callable[..., Any]:
    """Returns ``call`` with results by number, and with memory for the ``lent`` ones, which XLA reuses by size."""

    def run(memory: Any, *inputs: Any) -> tuple[dict[int, Any], dict[int, Any]]:
        del memory
        results = dict(enumerate(jax.tree.leaves(call(*inputs))))
        return {number: results.pop(number) for number in lent}, results

    return run


def _topology(num_replicas: int) -> Topology:
    devices = jax.local_devices()
    if len(devices) < num_replicas:
        raise InvalidArgumentError(
            f"The program is for {num_replicas} replicas, but this task has {len(devices)} devices. Start its "
            "server with as many devices as the other workers have."
        )
    return Topology.of(devices[:num_replicas])


@final
class LoadedProgram:
    """A WorkerProgram with its computations, ready to run.

    Attributes:
      program: The program that arrived.
      whole: The shards of all variables that the computation reads in full.
      whole_first: The shards of variables that the lookups' ids are computed from.
      looks_up_elements: True if it pushes, and has lookups whose ids depend only on elements and constants.
    """

    def __init__(self, program: WorkerProgram):
        self.program = program
        self.main = Executable(program.blob, program.num_replicas, program.num_results)
        self.ids = [Executable(lookup.blob, program.num_replicas) for lookup in program.lookups]
        self.whole = _shards(program, program.inputs)
        of_lookups = [each for lookup in program.lookups for each in lookup.inputs]
        self.whole_first = _shards(program, of_lookups)
        self.looks_up_elements = bool(program.pushes and program.lookups) and all(
            each.kind in ("element", "constant") for each in of_lookups
        )

    @property
    def compile_s(self) -> float:
        return self.main.compile_s + sum(ids.compile_s for ids in self.ids)


def _shards(program: WorkerProgram, inputs: Sequence[Any]) -> list[Any]:
    numbers = dict.fromkeys(each.index for each in inputs if each.kind == "variable")
    return [shard for number in numbers for shard in program.variables[number]]
