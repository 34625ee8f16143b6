"""Combines the assignments of a worker's replicas into one, which a parameter server can do as its own.

A variable of which replicas keep parts (metrics) gets the sum of what they add, one that they average (moving
statistics) the mean; so that what several workers add still adds up there.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from replicax._src import jax_compat
from replicax._src.errors import StructureError
from replicax._src.parameter_servers.programs.assignments import (
    assignment_program,
    given_by,
    path_to,
    reads_of,
    warn_of_replacement,
)
from replicax._src.parameter_servers.programs.events import Assigned
from replicax._src.tracing import flat
from replicax._src.tracing.flat import Atom, FlatProgram, Operation
from replicax._src.tracing.slots import Sharing

_ALONG = frozenset(["copy", "stop_gradient", "neg", "convert_element_type"])
_SUMS = frozenset(["add", "add_any", "sub"])


class Combining(enum.Enum):
    """A way to combine an operand that each replica has."""

    SAME = "equal on all"
    FIRST = "the first replica's"
    MEAN = "the mean, weighted by rows"
    SUM = "the sum"


_OF_SHARING = {
    Sharing.MIRRORED: Combining.SAME,
    Sharing.FIRST: Combining.FIRST,
    Sharing.SEED: Combining.FIRST,
    Sharing.AVERAGED: Combining.MEAN,
    Sharing.SUMMED: Combining.SUM,
}


@dataclass(frozen=True)
class ReplicaAssignment:
    """An assignment in a replica function.

    Attributes:
      operands: Values of one replica's program: an atom, and the shape that it is broadcast to (None: its own).
      combining: The way to combine each.
      is_change: True if the new value is computed from the old one, and not put in its place.
      described: What ``apply`` does, comparable.
      apply: From the old value and the combined operands to the new one.
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
    """Returns the one assignment that stands for an assignment of ``value`` by all replicas.

    Args:
      is_same: True if ``value`` is the same on all replicas.
      are_same: Tells that of other values of the program.
    """
    sharing = event.slot.sharing
    combining = Combining.SAME if is_same and sharing is not Sharing.SUMMED else _OF_SHARING[sharing]
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
    """One assignment for replicas with batches of different sizes, for each of which it was found.

    Raises:
      StructureError: They do not do the same.
    """
    first = found[0]
    if any(other.described != first.described for other in found[1:]):
        raise StructureError(
            f"What is assigned to variable {event.slot.name!r} at {event.line} is computed from its value in another way for "
            "another local batch size (it uses x.shape[0], perhaps). Compute what depends on the batch first, and let the "
            "assignment be the same: v.assign_add(x), or v * decay + x."
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
    """The old value times what is the same on all replicas, plus what may differ: that may be combined beforehand."""
    nonlinear: Operation | None = None
    for reads in reads_of(event):
        sources = given_by(reads, program)
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
    """Goes through a path.

    Attributes:
      nonlinear: The first operation that is none of sums, products with a factor, and selections.
      factors: The factors of the products, and what selects.
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
        name, operands = operation.eqn.primitive.name, list(operation.operands)
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
        if name == "convert_element_type" and not jnp.issubdtype(
            operation.eqn.params["new_dtype"], jnp.inexact
        ):
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
        if isinstance(atom, jax_compat.Literal):
            self._described.append(repr(atom.val))
            return atom
        self.factors.append(atom)
        return self._operand(atom, operation, Combining.SAME)

    def _operand(self, atom: Atom, operation: Operation, combining: Combining) -> int:
        """A number for an operand in the path: below 0, so that it is none of the program's."""
        self._operands.append((atom, tuple(operation.eqn.outvars[0].aval.shape)))
        self._combining_of.append(combining)
        return -len(self._operands)

    def assignment(self, value: Atom) -> ReplicaAssignment:
        path, sources = list(self._path), self._sources

        def apply(old: Any, given: Sequence[Any]) -> Any:
            env = dict.fromkeys(sources, old)
            env.update((-1 - number, array) for number, array in enumerate(given))
            flat.run(path, env)
            return env[value]

        return ReplicaAssignment(self._operands, self._combining_of, True, self._described, apply)


def _is_in(atom: Atom, known: set[int]) -> bool:
    return not isinstance(atom, jax_compat.Literal) and atom in known
