"""Translates an assignment into what a parameter server does to its value, so that concurrent ones add up.

``v.assign_add(x)`` is sent as "add x"; a moving average as "multiply by 0.99 and add x". An assignment of which this
cannot be said replaces the value: the last one stands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src import jax_compat
from replicax._src.parameter_servers.programs.events import Assigned
from replicax._src.tracing import flat
from replicax._src.tracing.flat import Atom, FlatProgram, Operation
from replicax._src.tracing.markers import read_p, seed_shift_p, seed_unshift_p
from replicax._src.tracing.primitives import ELEMENTWISE

log = logging.getLogger("replicax")
_MARKS = frozenset(mark.name for mark in (read_p, seed_shift_p, seed_unshift_p))
_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


@dataclass(frozen=True)
class AssignmentProgram:
    """The change that a server makes to its value of a variable.

    Attributes:
      operands: Values of the worker's program that it takes.
      have_rows: True for each that has the variable's rows, so that a shard takes its own of them.
      apply: From the value there, of a shard perhaps, the operands and the number of the first row to the new value.
      described: What ``apply`` does, comparable.
      rows: Positions of the operands whose indices name the rows that it changes; None: it may change any.
    """

    operands: Sequence[Atom]
    have_rows: Sequence[bool]
    apply: Callable[[Any, Sequence[Any], int], Any]
    described: Any = None
    rows: Sequence[int] | None = None


def assignment_program(event: Assigned, value: Atom, program: FlatProgram) -> AssignmentProgram:
    """The program of an assignment of ``value`` in ``program``."""
    if isinstance(value, jax_compat.Literal):
        return AssignmentProgram((), (), lambda old, given, start: value.val, str(value.val))
    alone = {number: _found(event, value, (number,), program) for number in event.reads}
    at_server = [number for number in event.reads if alone[number][1] is None]
    mixing: Operation | None = None
    for reads in (event.reads, at_server):  # all, or else those whose own ways to it a server can go
        found, mixing_here = _found(event, value, reads, program)
        if found is not None:
            if mixing is not None and _takes_one_computed(found, set(event.reads) - set(reads), program):
                warn_of_replacement(event, mixing)
            return found
        mixing = mixing or mixing_here
    for number in event.reads:  # or else the last that leads to it
        found, mixing_here = alone[number]
        if found is not None:
            return found
        if mixing_here is not None:
            break
    if mixing is not None:
        warn_of_replacement(event, mixing)
    return _replacement(value)


def reads_of(event: Assigned) -> list[Sequence[int]]:
    """Lists the reads of a variable that its new value may come from: all, or else the last that leads to it."""
    return [event.reads, *((number,) for number in event.reads)]


def _found(
    event: Assigned, value: Atom, reads: Sequence[int], program: FlatProgram
) -> tuple[AssignmentProgram | None, Operation | None]:
    """Finds what a server does to the value that some reads gave, or what prevents that. Neither: they do not lead to
    it.
    """
    sources = given_by(reads, program)
    if value in sources:
        return AssignmentProgram((), (), lambda old, given, start: old, "unchanged"), None
    path = path_to(value, sources, program)
    return _change(event, value, sources, path) if path else (None, None)


def _takes_one_computed(found: AssignmentProgram, reads: Collection[int], program: FlatProgram) -> bool:
    """True if a selection may take a value that the worker computes from these reads: in one branch it replaces."""
    reached = given_by(reads, program)
    for operation in program.operations:
        if flat.numbers_in([operation]) & reached:
            reached.update(operation.results)
    sent = reached & set(found.operands)
    selections = (o for o in program.operations if o.eqn.primitive.name == "select_n")
    return any(flat.numbers_in([], o.operands[1:]) & sent for o in selections)


def _change(
    event: Assigned, value: Atom, sources: set[int], path: Sequence[Operation]
) -> tuple[AssignmentProgram | None, Operation | None]:
    """Returns what operations do to the value read; or None, and the operation that a server cannot do."""
    shape = event.slot.shape
    computed = sources | {number for operation in path for number in operation.results}
    by_row = [o for o in path if _is_elementwise(o, shape)]
    scattering = [o for o in path if _is_scatter(o, shape, computed)]
    mixing = next((o for o in path if o not in by_row and o not in scattering), None)
    if mixing is not None:
        return None, mixing
    with_rows = flat.numbers_in(by_row) - computed
    of_scatters = flat.numbers_in(scattering) - computed
    if with_rows & of_scatters:
        return None, scattering[0]
    operands = sorted(with_rows | of_scatters)

    def apply(old: Any, given: Sequence[Any], start: int) -> Any:
        env = dict.fromkeys(sources, old) | dict(zip(operands, given, strict=True))
        for operation in path:
            if operation in scattering:
                env[operation.results[0]] = _scattered(operation, env, start)
            else:
                flat.run([operation], env)
        return env[value]

    described = _described(path, sources, operands)
    have_rows = [number in with_rows for number in operands]
    rows = None if by_row else _named_by(scattering, operands)
    return AssignmentProgram(operands, have_rows, apply, described, rows), None


def _named_by(scattering: Sequence[Operation], operands: Sequence[int]) -> list[int] | None:
    """Which operands name the rows that operations put values into; None if something else does."""
    indices = [operation.operands[1] for operation in scattering]
    if any(isinstance(atom, jax_compat.Literal) or atom not in operands for atom in indices):
        return None
    return [operands.index(atom) for atom in indices]


def _described(path: Sequence[Operation], sources: set[int], operands: Sequence[int]) -> list[Any]:
    """Describes what operations do, whatever the numbers of their values."""
    names: dict[Atom, Any] = dict.fromkeys(sources, "old") | {number: n for n, number in enumerate(operands)}
    described = []
    for place, operation in enumerate(path):
        names.update((number, (place, n)) for n, number in enumerate(operation.results))
        taken = [
            repr(atom.val) if isinstance(atom, jax_compat.Literal) else names[atom]
            for atom in operation.operands
        ]
        described.append((operation.eqn.primitive.name, taken))
    return described


def _replacement(value: Atom) -> AssignmentProgram:
    return AssignmentProgram((value,), (True,), lambda old, given, start: given[0], "replaced")


def given_by(reads: Collection[int], program: FlatProgram) -> set[int]:
    """The values that some reads gave."""
    return {
        operation.results[0]
        for operation in program.operations
        if operation.eqn.primitive is read_p and operation.eqn.params["number"] in reads
    }


def path_to(value: Atom, sources: set[int], program: FlatProgram) -> list[Operation]:
    """The operations by which the value last read leads to the new one."""
    reached = set(sources)
    path = []
    for operation in program.slice([value], sources):
        if flat.numbers_in([operation]) & reached:
            path.append(operation)
            reached.update(operation.results)
    return path if value in reached else []


def _is_elementwise(operation: Operation, shape: Sequence[int]) -> bool:
    eqn = operation.eqn
    if eqn.primitive.name not in ELEMENTWISE and eqn.primitive.name not in _MARKS:
        return False
    return all(tuple(var.aval.shape) == tuple(shape) for var in eqn.outvars)


def _is_scatter(operation: Operation, shape: Sequence[int], computed: set[int]) -> bool:
    """True if an operation puts values into rows of the variable, and only these come from elsewhere."""
    eqn = operation.eqn
    if eqn.primitive.name not in _SCATTERS or tuple(eqn.outvars[0].aval.shape) != tuple(shape):
        return False
    numbers = eqn.params["dimension_numbers"]
    rows_first = tuple(numbers.scatter_dims_to_operand_dims)[:1] == (0,) and 0 in numbers.inserted_window_dims
    if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:  # in a shard it would be another row
        return False
    return rows_first and not flat.numbers_in([], operation.operands[1:]) & computed


def _scattered(operation: Operation, env: dict[int, Any], start: int) -> Any:
    """The rows of a shard, whose first one has number ``start`` in the whole, with values put into some."""
    old, indices, values = (flat.read(env, atom) for atom in operation.operands)
    params = dict(operation.eqn.params)
    if start or old.shape != operation.eqn.outvars[0].aval.shape:
        row = indices[..., :1] - start
        is_here = (row >= 0) & (row < old.shape[0])
        indices = jnp.concatenate([jnp.where(is_here, row, old.shape[0]), indices[..., 1:]], axis=-1)
        params |= {"mode": jax.lax.GatherScatterMode.FILL_OR_DROP, "unique_indices": False}
        params |= {"indices_are_sorted": False}
    return jax_compat.bind_equation(operation.eqn, [old, indices, values], params)[0]


def warn_of_replacement(event: Assigned, mixing: Operation) -> None:
    log.warning(
        "The value assigned to variable %r at %s comes from its own value by %r (%s), which a parameter server does not do: "
        "the worker sends the new value, and of two workers that assign at the same time the last one's stands.",
        event.slot.name,
        event.line,
        mixing.eqn.primitive.name,
        mixing.line,
    )
