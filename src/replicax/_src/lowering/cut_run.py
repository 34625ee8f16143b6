"""A replica function on the devices of all processes, cut at its sums, which the hosts add.

``spmd.Launcher`` compiles a function as one program that contains all collectives. On the CPUs of several processes
sums are faster on the hosts (``devices/sums_of_processes.py``), between programs that do not communicate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicax._src.devices.sums_of_processes import SumsOfProcesses
from replicax._src.devices.topology import REPLICA_AXIS, Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.cut_programs import CutPrograms
from replicax._src.lowering.round_programs import ReplicaOperand, RoundPrograms
from replicax._src.tracing.primitives import CALLBACKS
from replicax._src.tracing.replica_rounds import UncutError, cut_at_sums

log = logging.getLogger("replicax")
_GATHERS: Final = frozenset(["all_gather", "all_gather_invariant"])
"""Collectives that a cut would make sums of R times the bytes."""


@dataclass(frozen=True)
class ReplicaFunction:
    """The computation of one replica, under the axis ``replica``.

    Attributes:
      function: Maps (written state, read state, constants, donated arguments, other arguments) to (written state, sums
        that SUMMED variables show, outputs, tokens).
      in_specs: The specs of its operands.
      out_specs: Those of its results. It computes no tokens.
    """

    function: Callable[..., Any]
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]


@final
class CutRun:
    """A program that is called like that of ``jax.jit``, and compiled when it first runs.

    Args:
      replica: The computation of a replica.
      whole: The same as one program, for functions that cannot be cut.
      name: The name for messages.
      topology: The devices of all processes.
      sums: The sums of the processes.
      donates: True if it overwrites the memory of the written state.
    """

    def __init__(
        self,
        replica: ReplicaFunction,
        whole: Any,
        name: str,
        topology: Topology,
        sums: SumsOfProcesses,
        *,
        donates: bool,
    ):
        self._replica, self._whole, self._name = replica, whole, name
        self._topology, self._sums, self._donates = topology, sums, donates
        self._programs: CutPrograms | None = None
        self._consts: list[jax.Array] = []
        self._is_whole = False

    def lower(self, *args: Any) -> Any:
        """Lowers the whole program."""
        return self._whole.lower(*args)

    def __call__(self, *args: Any) -> Any:
        """Runs the function. The arguments have the same shapes in each call."""
        if self._programs is None and not self._is_whole:
            self._programs = self._cut(args)
            self._is_whole = self._programs is None
        if self._programs is None:
            return self._whole(*args)
        operands = [*self._consts, *jax.tree_util.tree_leaves(args)]
        with self._programs.followed(operands) as (compiled, taken):
            del operands
            return compiled(*taken)

    def _cut(self, args: Sequence[Any]) -> CutPrograms | None:
        leaves, tree = jax.tree_util.tree_flatten(args)
        specs = _specs_of(self._replica.in_specs, args)
        avals = [
            jax_compat.shaped((1, *leaf.shape[1:]) if spec else leaf.shape, leaf.dtype)
            for leaf, spec in zip(leaves, specs, strict=True)
        ]

        def flat(*values: Any) -> list[Any]:
            new, sums, outs, _ = self._replica.function(*tree.unflatten(values))
            counts[:] = [len(new), len(sums)]
            return [*new, *sums, *outs]

        counts: list[int] = []
        jaxpr, consts = jax_compat.trace(flat, avals, self._topology.axes)
        if jax_compat.primitives_of(jaxpr) & (_GATHERS | CALLBACKS):
            return None
        number = ReplicaOperand()
        try:
            rounds = cut_at_sums(jaxpr, number, self._topology.num_replicas, takes_first=False)
        except UncutError as reason:
            log.debug("%s is one program: %s cannot be cut.", self._name, reason)
            return None
        if not rounds.rounds:
            return None
        self._consts = self._topology.put_whole(list(consts))
        num_written, num_sums = counts
        # Neither may an array be of two variables, nor may a result be the memory of an operand.
        is_shared = [
            atom in rounds.inputs or atom in rounds.outputs[:i] for i, atom in enumerate(rounds.outputs)
        ]

        def finish(values: list[Any]) -> Any:
            results = [
                jnp.copy(value) if shared else jnp.asarray(value)
                for value, shared in zip(values, is_shared, strict=True)
            ]
            first_out = num_written + num_sums
            return results[:num_written], results[num_written:first_out], results[first_out:], []

        num_consts = len(self._consts)
        programs = RoundPrograms(
            rounds,
            [*self._consts, *leaves],
            self._name,
            self._topology,
            self._topology.num_replicas,
            number,
            donated=range(num_consts, num_consts + len(args[0])),
            donates=self._donates,
            finish=finish,
            split=[num_consts + i for i, spec in enumerate(specs) if spec],
            out_specs=(*self._replica.out_specs[:3], []),
        )
        return CutPrograms(programs, self._name, self._sums)


def _specs_of(in_specs: Sequence[Any], args: Sequence[Any]) -> list[PartitionSpec]:
    """Returns the spec of each array, given those of ``in_specs``, of which one may stand for several arrays."""
    specs: list[PartitionSpec] = []
    for spec, arg in zip(in_specs, args, strict=True):
        if isinstance(spec, PartitionSpec):
            specs += [spec] * len(jax.tree_util.tree_leaves(arg))
        else:
            specs += spec
    assert all(spec in (PartitionSpec(), PartitionSpec(REPLICA_AXIS)) for spec in specs)
    return specs
