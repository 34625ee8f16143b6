"""What an assignment is on a parameter server: what it does to the value there, so that concurrent ones add up.

``v.assign_add(x)`` is sent as "add x"; a moving average as "multiply by 0.99 and add x". An assignment of which this cannot
be said replaces the value: the last one stands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from replicax._src import jax_compat
from replicax._src.placement.remote.events import Assigned
from replicax._src.program import flat
from replicax._src.program.flat import Atom, FlatProgram, Operation
from replicax._src.program.rows.rules import ELEMENTWISE

log = logging.getLogger("replicax")
_READ = "replicax_read"


@dataclass(frozen=True)
class AssignmentProgram:
    """What a server does with its value of a variable.

    Attributes:
      operands: Values of the worker's program that it takes: each of the variable's shape, or a scalar.
      apply: From the value there, or of a shard of it, and the operands' same rows, to the new one.
    """

    operands: Sequence[Atom]
    apply: Callable[[Any, Sequence[Any]], Any]


def assignment_program(event: Assigned, value: Atom, program: FlatProgram) -> AssignmentProgram:
    """The program of an assignment of ``value`` in ``program``."""
    if isinstance(value, jax_compat.Literal):
        return AssignmentProgram((), lambda old, _: value.val)
    sources, path = _last_read_of(event, value, program)
    if value in sources:
        return AssignmentProgram((), lambda old, _: old)
    if not path:
        return _replacement(value)
    shape = event.slot.shape
    mixing = next((o for o in path if not _is_elementwise(o, shape)), None)
    if mixing is not None:
        _warn_of_replacement(event, mixing)
        return _replacement(value)
    computed = {number for operation in path for number in operation.results}
    operands = sorted(flat.numbers_in(path) - sources - computed)

    def apply(old: Any, given: Sequence[Any]) -> Any:
        env = dict.fromkeys(sources, old) | dict(zip(operands, given, strict=True))
        flat.run(path, env)
        return env[value]

    return AssignmentProgram(operands, apply)


def _replacement(value: Atom) -> AssignmentProgram:
    return AssignmentProgram((value,), lambda old, given: given[0])


def _last_read_of(event: Assigned, value: Atom, program: FlatProgram) -> tuple[set[int], list[Operation]]:
    """What the last read that leads to the value gave, and the operations that do so; nothing, if none does."""
    for number in event.reads:
        sources = {
            operation.results[0]
            for operation in program.operations
            if operation.eqn.primitive.name == _READ and operation.eqn.params["number"] == number
        }
        path = _path(program, sources, value)
        if path or value in sources:
            return sources, path
    return set(), []


def _path(program: FlatProgram, sources: set[int], value: Atom) -> list[Operation]:
    """The operations by which the value last read leads to the new one."""
    reached = set(sources)
    depending = []
    for operation in program.operations:
        if flat.numbers_in([operation]) & reached and operation.results[0] not in sources:
            depending.append(operation)
            reached.update(operation.results)
    return flat.needed_for(depending, [value], sources) if value in reached else []


def _is_elementwise(operation: Operation, shape: Sequence[int]) -> bool:
    eqn = operation.eqn
    if eqn.primitive.name not in ELEMENTWISE and eqn.primitive.name != _READ:
        return False
    return all(tuple(var.aval.shape) == tuple(shape) for var in eqn.outvars)


def _warn_of_replacement(event: Assigned, mixing: Operation) -> None:
    log.warning(
        "The value assigned to variable %r at %s comes from its own value by %r (%s), which a parameter server does not do: "
        "the worker sends the new value, and of two workers that assign at the same time the last one's stands.",
        event.slot.name,
        event.line,
        mixing.eqn.primitive.name,
        mixing.line,
    )
