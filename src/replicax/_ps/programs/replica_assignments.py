"""Combines the assignments of a worker's replicas into one assignment, which a parameter server can apply.

A variable whose replicas keep parts (metrics) gets the sum of their additions. A variable that they average (moving
statistics) gets the mean. So the changes of several workers still add up on the server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from replicax._ps.programs.assignments import (
    assignment_program,
    path_to,
    reads_of,
    values_of_reads,
    warn_of_replacement,
)
from replicax._ps.programs.variable_changes import Assigned
from replicax._src.program_kit.errors import StructureError
from replicax._src.program_kit.traced_programs import Atom, Combining, FlatProgram, NumberedValues, Operation

_ALONG = frozenset(["copy", "stop_gradient", "neg", "convert_element_type"])
_SUMS = frozenset(["add", "add_any", "sub"])


@dataclass(frozen=True)
class ReplicaAssignment:
    """An assignment in a replica function.

    Attributes:
      operands: Values of one replica's program: an atom, and the shape that it is broadcast to (None for its own).
      combining: The way to combine each operand.
      is_change: True if the new value is computed from the old one; False if it replaces it.
      described: A comparable description of ``apply``.
      apply: Computes the new value from the old value and the combined operands.
    """

    operands: Sequence[tuple[Atom, tuple[int, ...] | None]]
    combining: Sequence[Combining]
    is_change: bool
    described: Any
    apply: Callable[[Any, Sequence[Any]], Any]


def replica_assignment(
    event: Assigned,
    value: Atom,
    program: FlatProgram,
    *,
    is_same: bool,
    are_same: Callable[[Sequence[Atom]], bool],
) -> ReplicaAssignment:
    """Returns the one assignment that is equivalent to an assignment of ``value`` by all replicas.

    Args:
      event: The assignment.
      value: The assigned value.
      program: The program of one replica.
      is_same: True if ``value`` is the same on all replicas.
      are_same: Returns True if other values of the program are the same on all replicas.
    """
    combining = Combining.of(event.binding.sync_policy, is_same=is_same)
    if combining in (Combining.MEAN, Combining.SUM):
        return _linear(event, value, program, combining, are_same) or _replaced(event, value, combining)
    found = assignment_program(event, value, program)
    return ReplicaAssignment(
        [(atom, None) for atom in found.operands],
        [combining] * len(found.operands),
        list(found.operands) != [value],
        found.described,
        lambda old, given: found.apply(old, given, 0),
    )


def same_in_all(event: Assigned, found: Sequence[ReplicaAssignment]) -> ReplicaAssignment:
    """Returns the common assignment of replicas whose batches have different sizes, given one for each size.

    Raises:
      StructureError: They are not equivalent.
    """
    first = found[0]
    if any(other.described != first.described for other in found[1:]):
        raise StructureError(
            f"The value assigned to variable {event.binding.name!r} at {event.line} is computed from its old value "
            "differently for another local batch size, for example with x.shape[0]. First compute the part that "
            "depends on the batch size, and keep the assignment the same: v.assign_add(x), or v * decay + x."
        )
    return first


def _replaced(event: Assigned, value: Atom, combining: Combining) -> ReplicaAssignment:
    return ReplicaAssignment([(value, None)], [combining], False, (), lambda old, given: given[0])


def _linear(
    event: Assigned,
    value: Atom,
    program: FlatProgram,
    combining: Combining,
    are_same: Callable[[Sequence[Atom]], bool],
) -> ReplicaAssignment | None:
    """Returns the old value times replicated factors plus terms that may vary, which can be combined before they are
    sent.
    """
    nonlinear: Operation | None = None
    for reads in reads_of(event):
        sources = values_of_reads(reads, program)
        path = path_to(value, sources, program)
        if not path:
            continue
        found = _Walk(sources, path, combining)
        if found.nonlinear is None and are_same(found.factors):
            return found.assignment(value)
        nonlinear = nonlinear or found.nonlinear or path[-1]
    if nonlinear is not None:
        warn_of_replacement(event, nonlinear)
    return None


class _Walk:
    """Analyses the operations of a path.

    Attributes:
      nonlinear: The first operation that is not a sum, a product with a factor, or a selection.
      factors: The factors of the products, and the conditions of the selections.
    """

    def __init__(self, sources: set[int], path: Sequence[Operation], combining: Combining):
        self.nonlinear: Operation | None = None
        self.factors: list[Atom] = []
        self._sources = sources
        self._known = set(sources)
        self._operands: list[tuple[Atom, tuple[int, ...] | None]] = []
        self._combining, self._combining_of = combining, list[Combining]()
        self._path: list[Operation] = []
        self._described: list[Any] = []
        for operation in path:
            if not self._take(operation):
                self.nonlinear = operation
                return
            self._known.update(operation.results)

    def _take(self, operation: Operation) -> bool:
        name, operands = operation.name, list(operation.operands)
        own = [_is_in(atom, self._known) for atom in operands]
        if name in _ALONG:
            given = operands
        elif name in _SUMS and len(operands) == 2:
            given = self._terms(operands, own, operation)
        elif name == "select_n" and not own[0]:
            given = [self._factor(operands[0], operation), *self._terms(operands[1:], own[1:], operation)]
        elif own == [True, False] and name in ("mul", "div"):
            given = [operands[0], self._factor(operands[1], operation)]
        elif own == [False, True] and name == "mul":
            given = [self._factor(operands[0], operation), operands[1]]
        else:
            return False
        if name == "convert_element_type" and not jnp.issubdtype(operation.params["new_dtype"], jnp.inexact):
            return False
        self._path.append(dataclasses.replace(operation, operands=given))
        self._described.append((name, own))
        return True

    def _terms(self, atoms: Sequence[Atom], own: Sequence[bool], operation: Operation) -> list[Atom]:
        return [
            atom if is_own else self._operand(atom, operation, self._combining)
            for atom, is_own in zip(atoms, own, strict=True)
        ]

    def _factor(self, atom: Atom, operation: Operation) -> Atom:
        if not isinstance(atom, int):
            self._described.append(repr(atom.val))
            return atom
        self.factors.append(atom)
        return self._operand(atom, operation, Combining.SAME)

    def _operand(self, atom: Atom, operation: Operation, combining: Combining) -> int:
        """Returns a new number for an operand of the path. It is negative, so that it differs from the program's
        numbers.
        """
        self._operands.append((atom, tuple(operation.result_avals[0].shape)))
        self._combining_of.append(combining)
        return -len(self._operands)

    def assignment(self, value: Atom) -> ReplicaAssignment:
        path, sources = list(self._path), self._sources

        def apply(old: Any, given: Sequence[Any]) -> Any:
            values = NumberedValues(dict.fromkeys(sources, old))
            values.update((-1 - number, array) for number, array in enumerate(given))
            return values.run(path)[value]

        return ReplicaAssignment(self._operands, self._combining_of, True, self._described, apply)


def _is_in(atom: Atom, known: set[int]) -> bool:
    return isinstance(atom, int) and atom in known
