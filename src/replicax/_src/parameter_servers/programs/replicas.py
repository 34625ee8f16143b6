"""Lowers a replica function to the devices of a worker, inside the function for workers that is being traced.

The replicas run as one ``shard_map``. Their changes to variables leave it combined, and are recorded outside like the
changes of one replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicax._src import jax_compat
from replicax._src.collectives.in_replica import Packing, first_of, packed_sum
from replicax._src.devices.topology import REPLICA_AXIS, Topology
from replicax._src.errors import StructureError
from replicax._src.lowering.spmd import replica_body
from replicax._src.parameter_servers.programs.events import Applied, Assigned, Event, Events, assigning
from replicax._src.parameter_servers.programs.replica_assignments import (
    Combining,
    ReplicaAssignment,
    replica_assignment,
    same_in_all,
)
from replicax._src.parameter_servers.programs.worker import check_callbacks
from replicax._src.tracing import flat
from replicax._src.tracing.bindings import SyncPolicy
from replicax._src.tracing.capture import Capture, current_capture
from replicax._src.tracing.flat import Atom, FlatProgram
from replicax._src.tracing.program import Output, ReplicaProgram, Variant
from replicax._src.tracing.replication import Replication, analyse

_WHOLE, _ROW = PartitionSpec(), PartitionSpec(REPLICA_AXIS)


@final
class Observers:
    """Observes the traces of a replica function's variants, and records what each does to variables."""

    def __init__(self) -> None:
        self._of_variant: dict[int, list[tuple[Event, int]]] = {}

    def observe(self, number: int, call: Callable[[], Any]) -> Any:
        """Calls a variant. Returns its result, then the values of its events."""
        capture = current_capture()
        assert capture is not None
        events = capture.observer = Events()
        result = call()
        self._of_variant[number] = [(event, len(values)) for event, values in events.noted]
        return result, [value for _, values in events.noted for value in values]

    def events(self, number: int) -> Sequence[tuple[Event, int]]:
        """Returns the events of a variant in order, each with its number of values."""
        return self._of_variant[number]


@dataclass(frozen=True)
class _Step:
    """An event of all replicas.

    Attributes:
      assignment: The assignment; None for an optimizer call, whose gradients have been summed.
      num_operands: The number of values that leave the replicas.
    """

    event: Event
    assignment: ReplicaAssignment | None
    num_operands: int


@final
class PlacedReplicas:
    """A replica function, lowered for several replicas.

    Args:
      program: The program, traced with ``observers``.
      name: The name of the function, for messages.
      observers: The observers of its variants.
      topology: The devices of the replicas.
      rows_of_replica: The numbers of rows, if replicas have different ones.
      is_row: True for each argument that is [R, ...], with one row for each replica.

    Attributes:
      program: The program without the observed values: it returns the function's result.
    """

    def __init__(
        self,
        program: ReplicaProgram,
        name: str,
        observers: Observers,
        topology: Topology,
        rows_of_replica: Sequence[int] | None,
        is_row: Sequence[bool],
    ):
        self._name = name
        self._topology, self._rows, self._is_row = topology, rows_of_replica, list(is_row)
        self._steps: list[_Step] = []
        self._combining: list[Combining] = []
        self._is_same = list(program.same_outputs)
        self._inner = self._with_operands(program, observers)
        self.program = _with_outputs(program, self._num_results)

    def __call__(self, capture: Capture, events: Events, args: Sequence[Any]) -> list[Any]:
        """Adds it to the function that is being traced. Returns the results, as rows [R, ...] if they may vary."""
        events.num_replicas = self._topology.num_replicas
        bindings = self._inner.bindings
        before = [capture.read(binding.variable) for binding in bindings]
        consts = [variant.consts for variant in self._inner.variants]
        results, operands, finals = self._on_replicas()(before, consts, list(args))
        self._note(capture, events, operands)
        # This process also computes the servers' updates, for code that reads the variables afterwards.
        with events.unnoted():
            for index, value in zip(self._inner.written, finals, strict=True):
                capture.write(bindings[index].variable, value)
        return results

    # --- values that leave the replicas ------------------------------------------------------------------

    def _with_operands(self, program: ReplicaProgram, observers: Observers) -> ReplicaProgram:
        """Returns the program with the operands of the events, after the results, in place of the events' values."""
        noted = [observers.events(number) for number in range(len(program.variants))]
        flats = [
            FlatProgram(variant.jaxpr, is_selected=assigning(event for event, _ in events))
            for variant, events in zip(program.variants, noted, strict=True)
        ]
        counts = [len(events) for events in noted]
        if len(set(counts)) > 1:
            raise StructureError(
                f"The replica function assigns variables {' or '.join(map(str, sorted(set(counts))))} times, "
                "depending on the replica's local batch size. Assign the same variables on all replicas."
            )
        num_arrays = program.variants[0].num_arrays
        self._num_results = num_arrays - sum(count for _, count in noted[0])
        taken: list[list[Any]] = [[] for _ in flats]
        at = self._num_results
        for column in zip(*noted, strict=True):
            event, count = column[0]
            values = [each.outputs[at : at + count] for each in flats]
            if isinstance(event, Applied):
                self._steps.append(_Step(event, None, count))
                self._combining += [Combining.SAME] * count
                for mine, atoms in zip(taken, values, strict=True):
                    mine += [(atom, None) for atom in atoms]
            else:
                found = [
                    self._assignment(each, of_variant, program_of, atoms[0], at)
                    for (each, _), of_variant, program_of, atoms in zip(
                        column, program.variants, flats, values, strict=True
                    )
                ]
                whole = same_in_all(event, found)
                self._steps.append(_Step(event, whole, len(whole.operands)))
                self._combining += whole.combining
                for mine, each in zip(taken, found, strict=True):
                    mine += each.operands
            at += count
        for each in flats:
            check_callbacks(each.operations, each.slice(each.outputs), self._name)
        variants = [
            _giving(variant, each, self._num_results, wanted, self._topology.num_replicas)
            for variant, each, wanted in zip(program.variants, flats, taken, strict=True)
        ]
        return ReplicaProgram(variants, program.variant_of_replica)

    def _assignment(
        self, event: Event, variant: Variant, program: FlatProgram, value: Atom, position: int
    ) -> ReplicaAssignment:
        assert isinstance(event, Assigned)

        def are_same(atoms: Sequence[Atom]) -> bool:
            if not atoms:
                return True
            if self._rows is not None:  # it may differ for another batch size
                return False
            jaxpr, consts = _evaluating(
                variant, program, [(atom, None) for atom in atoms], self._topology.num_replicas
            )
            replications, _ = analyse(
                jaxpr, [Replication.INVARIANT] * len(consts) + list(variant.input_replications)
            )
            return all(replication.is_same for replication in replications)

        return replica_assignment(event, value, program, is_same=self._is_same[position], are_same=are_same)

    # --- the replicas -------------------------------------------------------------------------------------

    def _on_replicas(self) -> Callable[..., Any]:
        inner, num_results = self._inner, self._num_results
        body = replica_body(inner, self._topology, self._rows)
        is_same = self._is_same[:num_results]

        def on_device(before: Sequence[Any], consts: Any, args: Sequence[Any]) -> Any:
            is_first = jax.lax.axis_index(REPLICA_AXIS) == 0
            state = [
                jnp.where(is_first, value, jnp.zeros_like(value))
                if binding.sync_policy is SyncPolicy.SUMMED
                else value
                for binding, value in zip(inner.bindings, before, strict=True)
            ]
            args = [arg[0] if row else arg for arg, row in zip(args, self._is_row, strict=True)]
            outs, writes, sums = body(consts, state, args)
            totals = iter(sums)
            sync_policies = [inner.bindings[index].sync_policy for index in inner.written]
            finals = [
                next(totals) if sync_policy is SyncPolicy.SUMMED else value
                for sync_policy, value in zip(sync_policies, writes, strict=True)
            ]
            results = [o if same else o[None] for o, same in zip(outs[:num_results], is_same, strict=True)]
            return results, self._combined(outs[num_results:], is_first), finals

        rows = [_ROW if row else _WHOLE for row in self._is_row]
        return jax_compat.shard_map(
            on_device,
            mesh=self._topology.mesh,
            in_specs=(_WHOLE, _WHOLE, rows),
            out_specs=([_WHOLE if same else _ROW for same in is_same], _WHOLE, _WHOLE),
            check_vma=False,
        )

    def _combined(self, operands: Sequence[Any], is_first: Any) -> list[Any]:
        sums = list(operands)
        weight, total = self._weights()
        for i, combining in enumerate(self._combining):
            if combining is Combining.MEAN:
                # The statistics of a replica without rows may be nan, so never compute 0 * nan.
                sums[i] = jnp.where(weight > 0, operands[i] * weight.astype(operands[i].dtype), 0)
        combined = list(operands)
        summed = [
            i for i, combining in enumerate(self._combining) if combining in (Combining.SUM, Combining.MEAN)
        ]
        packing = Packing.on(self._topology)
        for i, value in zip(summed, packed_sum([sums[i] for i in summed], packing), strict=True):
            is_mean = self._combining[i] is Combining.MEAN
            combined[i] = (value / total if is_mean else value).astype(operands[i].dtype)
        of_first = [i for i, combining in enumerate(self._combining) if combining is Combining.FIRST]
        firsts = first_of(
            is_first, [operands[i] for i in of_first], lambda values: packed_sum(values, packing)
        )
        for i, value in zip(of_first, firsts, strict=True):
            combined[i] = value
        return combined

    def _weights(self) -> tuple[Any, float]:
        if self._rows is None:
            return jnp.float32(1), float(self._topology.num_replicas)
        weights = jnp.asarray(self._rows, jnp.float32)
        return weights[jax.lax.axis_index(REPLICA_AXIS)], float(sum(self._rows) or 1)

    # --- outside of the replicas --------------------------------------------------------------------------

    def _note(self, capture: Capture, events: Events, operands: Sequence[Any]) -> None:
        remaining = iter(operands)
        for step in self._steps:
            given = [next(remaining) for _ in range(step.num_operands)]
            if step.assignment is None:
                events.noted.append((step.event, given))
                continue
            assert isinstance(step.event, Assigned)
            variable, apply = step.event.binding.variable, step.assignment.apply
            if step.assignment.is_change:
                new = apply(capture.read(variable), given)
            else:
                events.forget_reads(capture.entries[id(variable)])
                new = apply(None, given)
            capture.write(variable, new, step.event.line)


def _evaluating(
    variant: Variant,
    program: FlatProgram,
    wanted: Sequence[tuple[Atom, tuple[int, ...] | None]],
    num_replicas: int,
) -> tuple[Any, list[Any]]:
    """Traces the computation of some values of a variant."""
    operations = program.slice([atom for atom, _ in wanted])

    def evaluate(*args: Any) -> list[Any]:
        env: dict[int, Any] = dict(program.consts) | dict(zip(program.inputs, args, strict=True))
        flat.run(operations, env)
        return [_broadcast(flat.read(env, atom), atom, shape) for atom, shape in wanted]

    return jax_compat.trace(evaluate, [v.aval for v in variant.jaxpr.invars], [(REPLICA_AXIS, num_replicas)])


def _broadcast(value: Any, atom: Atom, shape: tuple[int, ...] | None) -> Any:
    if isinstance(atom, jax_compat.Literal):
        value = jnp.asarray(value, atom.aval.dtype)  # type: ignore[attr-defined]
    return value if shape is None else jnp.broadcast_to(value, shape)


def _giving(
    variant: Variant, program: FlatProgram, num_results: int, operands: Sequence[Any], num_replicas: int
) -> Variant:
    """Returns a variant whose outputs are its results, then ``operands``, then the variables' new values as before."""
    outputs = program.outputs
    wanted = [
        *((atom, None) for atom in outputs[:num_results]),
        *operands,
        *((atom, None) for atom in outputs[variant.num_arrays :]),
    ]
    jaxpr, consts = _evaluating(variant, program, wanted, num_replicas)
    kept = _leaves_of_result(variant)
    return dataclasses.replace(
        variant,
        jaxpr=jaxpr,
        consts=consts + variant.consts,
        outputs=[*kept, *(Output(True) for _ in operands)],
        out_replications=[*variant.out_replications[:num_results], *(Replication.VARYING for _ in operands)],
        input_replications=[Replication.INVARIANT] * len(consts) + list(variant.input_replications),
    )


def _leaves_of_result(variant: Variant) -> list[Any]:
    of_result = variant.tree.children()[0]
    return list(variant.outputs[: of_result.num_leaves])


def _with_outputs(program: ReplicaProgram, num_results: int) -> ReplicaProgram:
    """Returns the program with the function's results as its only outputs, for the code that uses them."""
    variants = [
        dataclasses.replace(
            variant,
            jaxpr=jax_compat.rebuild(variant.jaxpr, outvars=variant.jaxpr.outvars[:num_results]),
            tree=variant.tree.children()[0],
            outputs=_leaves_of_result(variant),
            out_replications=variant.out_replications[:num_results],
            entries=[],
            write_replications=[],
        )
        for variant in program.variants
    ]
    return ReplicaProgram(variants, program.variant_of_replica)
