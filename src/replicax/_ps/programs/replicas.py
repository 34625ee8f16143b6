"""Lowers a replica function to the devices of a worker, inside the function for workers that is being traced.

The replicas run as one ``shard_map``. Their changes to variables leave it combined, and are recorded outside like the
changes of one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax.numpy as jnp

from replicax._ps.programs.replica_assignments import (
    ReplicaAssignment,
    replica_assignment,
    same_in_all,
)
from replicax._ps.programs.variable_changes import Applied, Assigned, Event, Events, assigning
from replicax._ps.programs.worker_side import check_callbacks
from replicax._src.program_kit.captures import current_capture, name_of
from replicax._src.program_kit.errors import StructureError
from replicax._src.program_kit.strategy_parts import ReplicaCall
from replicax._src.program_kit.traced_programs import (
    Atom,
    Combining,
    FlatProgram,
    NumberedValues,
    ReplicaProgram,
    Topology,
    Variant,
    combined_replicas,
    trace,
)


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
      call: The call, traced with ``observers``.
      observers: The observers of its variants.

    Attributes:
      program: The program without the observed values: it returns the function's result.
    """

    def __init__(self, call: ReplicaCall, observers: Observers):
        self._call, program = call, call.program
        self._topology, self._rows = call.topology, call.rows
        self._steps: list[_Step] = []
        self._combining: list[Combining] = []
        self._is_same = list(program.same_outputs)
        self._inner = self._with_operands(program, observers)
        self.program = _with_outputs(program, self._num_results)

    def __call__(self) -> list[Any]:
        """Adds it to the function that is being traced. Returns the results, as rows [R, ...] if they may vary."""
        capture = current_capture()
        assert capture is not None
        events = capture.observer
        assert isinstance(events, Events)
        events.num_replicas = self._topology.num_replicas
        bindings = self._inner.bindings
        before = [capture.read(binding.variable) for binding in bindings]
        consts = [variant.consts for variant in self._inner.variants]
        run = combined_replicas(
            self._inner,
            self._topology,
            self._rows,
            self._call.is_row,
            self._is_same[: self._num_results],
            self._combining,
        )
        results, operands, finals = run(before, consts, list(self._call.call.arrays))
        self._note(events, operands)
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
            check_callbacks(each.operations, each.slice(each.outputs), name_of(self._call.call.fn))
        variants = [
            _giving(variant, each, self._num_results, wanted, self._topology)
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
            jaxpr, consts = _evaluating(variant, program, [(atom, None) for atom in atoms], self._topology)
            return variant.proves_same(jaxpr, consts)

        return replica_assignment(event, value, program, is_same=self._is_same[position], are_same=are_same)

    # --- outside of the replicas --------------------------------------------------------------------------

    def _note(self, events: Events, operands: Sequence[Any]) -> None:
        capture = current_capture()
        assert capture is not None
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
                events.forget_reads(variable)
                new = apply(None, given)
            capture.write(variable, new, step.event.line)


def _evaluating(
    variant: Variant,
    program: FlatProgram,
    wanted: Sequence[tuple[Atom, tuple[int, ...] | None]],
    topology: Topology,
) -> tuple[Any, list[Any]]:
    """Traces the computation of some values of a variant."""
    operations = program.slice([atom for atom, _ in wanted])

    def evaluate(*args: Any) -> list[Any]:
        values = NumberedValues(program.consts | dict(zip(program.inputs, args, strict=True))).run(operations)
        results = values.of(atom for atom, _ in wanted)
        return [_broadcast(value, *each) for value, each in zip(results, wanted, strict=True)]

    return trace(evaluate, program.input_avals, topology.axes)


def _broadcast(value: Any, atom: Atom, shape: tuple[int, ...] | None) -> Any:
    if not isinstance(atom, int):
        value = jnp.asarray(value, atom.aval.dtype)
    return value if shape is None else jnp.broadcast_to(value, shape)


def _giving(
    variant: Variant, program: FlatProgram, num_results: int, operands: Sequence[Any], topology: Topology
) -> Variant:
    """Returns a variant whose outputs are its results, then ``operands``, then the variables' new values as before."""
    outputs = program.outputs
    wanted = [
        *((atom, None) for atom in outputs[:num_results]),
        *operands,
        *((atom, None) for atom in outputs[variant.num_arrays :]),
    ]
    jaxpr, consts = _evaluating(variant, program, wanted, topology)
    num_leaves = variant.tree.children()[0].num_leaves
    return variant.with_more_results(jaxpr, consts, num_leaves, len(operands))


def _with_outputs(program: ReplicaProgram, num_results: int) -> ReplicaProgram:
    """Returns the program with the function's results as its only outputs, for the code that uses them."""
    variants = [variant.with_result_alone(num_results) for variant in program.variants]
    return ReplicaProgram(variants, program.variant_of_replica)
