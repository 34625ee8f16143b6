"""Translates an assignment into a change that a parameter server applies to its value, so that concurrent changes add
up.

``v.assign_add(x)`` is sent as "add x"; a moving average as "multiply by 0.99 and add x". Any other assignment
replaces
the value, and the last one wins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from replicax._ps.programs.operations import numbers_in
from replicax._ps.programs.variable_changes import Assigned
from replicax._src.program_kit.traced_programs import Atom, FlatProgram, NumberedValues, Operation

log = logging.getLogger("replicax")
_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


@dataclass(frozen=True)
class AssignmentProgram:
    """The change that a server makes to its value of a variable.

    Attributes:
      operands: The values of the worker's program that it takes.
      have_rows: True for each operand that has the variable's rows, so that a shard takes its own rows of it.
      apply: Computes the new value from the old value (of a shard perhaps), the operands, and the number of the first
        row.
      described: A comparable description of ``apply``.
      rows: The positions of the operands whose indices name the rows that it changes; None if it may change any.
    """

    operands: Sequence[Atom]
    have_rows: Sequence[bool]
    apply: Callable[[Any, Sequence[Any], int], Any]
    described: Any = None
    rows: Sequence[int] | None = None


def assignment_program(event: Assigned, value: Atom, program: FlatProgram) -> AssignmentProgram:
    """Returns the change for an assignment of ``value`` in ``program``."""
    if not isinstance(value, int):
        return AssignmentProgram((), (), lambda old, given, start: value.val, str(value.val))
    alone = {number: _found(event, value, (number,), program) for number in event.reads}
    at_server = [number for number in event.reads if alone[number][1] is None]
    mixing: Operation | None = None
    for reads in (event.reads, at_server):  # all reads, or else those whose paths a server can apply
        found, mixing_here = _found(event, value, reads, program)
        if found is not None:
            if mixing is not None and _takes_one_computed(found, set(event.reads) - set(reads), program):
                warn_of_replacement(event, mixing)
            return found
        mixing = mixing or mixing_here
    for number in event.reads:  # or else the last read that leads to the value
        found, mixing_here = alone[number]
        if found is not None:
            return found
        if mixing_here is not None:
            break
    if mixing is not None:
        warn_of_replacement(event, mixing)
    return _replacement(value)


def reads_of(event: Assigned) -> list[Sequence[int]]:
    """Lists the reads that the new value may be computed from: all together, then each alone, the last read first."""
    return [event.reads, *((number,) for number in event.reads)]


def _found(
    event: Assigned, value: Atom, reads: Sequence[int], program: FlatProgram
) -> tuple[AssignmentProgram | None, Operation | None]:
    """Returns the change from the value of some reads, or the operation that prevents one. Both are None without a
    path.
    """
    sources = values_of_reads(reads, program)
    if value in sources:
        return AssignmentProgram((), (), lambda old, given, start: old, "unchanged"), None
    path = path_to(value, sources, program)
    return _change(event, value, sources, path) if path else (None, None)


def _takes_one_computed(found: AssignmentProgram, reads: Collection[int], program: FlatProgram) -> bool:
    """True if a selection may take a value that the worker computes from these reads, so that a branch replaces it."""
    reached = values_of_reads(reads, program)
    for operation in program.operations:
        if numbers_in([operation]) & reached:
            reached.update(operation.results)
    sent = reached & set(found.operands)
    selections = (o for o in program.operations if o.name == "select_n")
    return any(numbers_in([], o.operands[1:]) & sent for o in selections)


def _change(
    event: Assigned, value: Atom, sources: set[int], path: Sequence[Operation]
) -> tuple[AssignmentProgram | None, Operation | None]:
    """Returns the change that operations make to the value read; or None, and the operation that a server cannot
    apply.
    """
    shape = event.binding.shape
    computed = sources | {number for operation in path for number in operation.results}
    by_row = [o for o in path if _is_elementwise(o, shape)]
    scattering = [o for o in path if _is_scatter(o, shape, computed)]
    mixing = next((o for o in path if o not in by_row and o not in scattering), None)
    if mixing is not None:
        return None, mixing
    with_rows = numbers_in(by_row) - computed
    of_scatters = numbers_in(scattering) - computed
    if with_rows & of_scatters:
        return None, scattering[0]
    operands = sorted(with_rows | of_scatters)

    def apply(old: Any, given: Sequence[Any], start: int) -> Any:
        values = NumberedValues(dict.fromkeys(sources, old) | dict(zip(operands, given, strict=True)))
        for operation in path:
            if operation in scattering:
                values[operation.results[0]] = _scattered(operation, values, start)
            else:
                values.run([operation])
        return values[value]

    described = _described(path, sources, operands)
    have_rows = [number in with_rows for number in operands]
    rows = None if by_row else _named_by(scattering, operands)
    return AssignmentProgram(operands, have_rows, apply, described, rows), None


def _named_by(scattering: Sequence[Operation], operands: Sequence[int]) -> list[int] | None:
    """Returns the operands that name the rows that operations write to; None if another value names them."""
    indices = [operation.operands[1] for operation in scattering]
    if any(atom not in operands for atom in indices):
        return None
    return [operands.index(atom) for atom in indices]


def _described(path: Sequence[Operation], sources: set[int], operands: Sequence[int]) -> list[Any]:
    """Returns a description of operations that does not depend on the numbers of their values."""
    names: dict[Atom, Any] = dict.fromkeys(sources, "old") | {number: n for n, number in enumerate(operands)}
    described = []
    for place, operation in enumerate(path):
        names.update((number, (place, n)) for n, number in enumerate(operation.results))
        taken = [names[atom] if isinstance(atom, int) else repr(atom.val) for atom in operation.operands]
        described.append((operation.name, taken))
    return described


def _replacement(value: Atom) -> AssignmentProgram:
    return AssignmentProgram((value,), (True,), lambda old, given, start: given[0], "replaced")


def values_of_reads(reads: Collection[int], program: FlatProgram) -> set[int]:
    """Returns the values of some reads."""
    return {
        operation.results[0]
        for operation in program.operations
        if operation.read is not None and operation.read in reads
    }


def path_to(value: Atom, sources: set[int], program: FlatProgram) -> list[Operation]:
    """Returns the operations that lead from the read value to the new one."""
    reached = set(sources)
    path = []
    for operation in program.slice([value], sources):
        if numbers_in([operation]) & reached:
            path.append(operation)
            reached.update(operation.results)
    return path if value in reached else []


def _is_elementwise(operation: Operation, shape: Sequence[int]) -> bool:
    return operation.is_elementwise and all(
        tuple(aval.shape) == tuple(shape) for aval in operation.result_avals
    )


def _is_scatter(operation: Operation, shape: Sequence[int], computed: set[int]) -> bool:
    """True if an operation writes to rows of the variable, and only the written values come from elsewhere."""
    if operation.name not in _SCATTERS or tuple(operation.result_avals[0].shape) != tuple(shape):
        return False
    numbers = operation.params["dimension_numbers"]
    rows_first = tuple(numbers.scatter_dims_to_operand_dims)[:1] == (0,) and 0 in numbers.inserted_window_dims
    if operation.params["mode"] == jax.lax.GatherScatterMode.CLIP:  # a shard would clip to another row
        return False
    return rows_first and not numbers_in([], operation.operands[1:]) & computed


def _scattered(operation: Operation, values: NumberedValues, start: int) -> Any:
    """Writes values to some rows of a shard, whose first row has number ``start`` in the full variable."""
    old, indices, updates = values.of(operation.operands)
    params = dict(operation.params)
    if start or old.shape != operation.result_avals[0].shape:
        row = indices[..., :1] - start
        is_here = (row >= 0) & (row < old.shape[0])
        indices = jnp.concatenate([jnp.where(is_here, row, old.shape[0]), indices[..., 1:]], axis=-1)
        params |= {"mode": jax.lax.GatherScatterMode.FILL_OR_DROP, "unique_indices": False}
        params |= {"indices_are_sorted": False}
    return operation.bind([old, indices, updates], params)[0]


def warn_of_replacement(event: Assigned, mixing: Operation) -> None:
    log.warning(
        "The new value of variable %r at %s is computed from its old value by %r (%s), which a parameter server "
        "cannot apply, so the worker sends the new value. If two workers assign at the same time, the last one wins.",
        event.binding.name,
        event.line,
        mixing.name,
        mixing.line,
    )
