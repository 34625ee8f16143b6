"""Decides if an optimizer's update of a table is row-parallel: it may run on some rows, or on one shard, only.

A value of the update either is independent of the rows, or has the table's rows on axis 0 and its row i is computed
from row i of other values. An operation that fits neither mixes rows, and the update is not row-parallel.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax._src.program_kit.traced_programs import FlatProgram, Operation


@dataclass(frozen=True)
class Mixing:
    """The reason why an update is not row-parallel.

    Attributes:
      primitive: The operation that mixes rows.
      line: The line of the user's code.
      why: The reason, for messages.
    """

    primitive: str
    line: str
    why: str

    def __str__(self) -> str:
        return f"{self.primitive} {self.why} ({self.line})"


class _Kind(enum.Enum):
    """ROWS: has rows on axis 0. EVEN: independent of rows and constant along axis 0. FIXED: independent of rows."""

    ROWS = "rows"
    EVEN = "even"
    FIXED = "fixed"


class _MixesRows(Exception):
    def __init__(self, mixing: Mixing):
        super().__init__(str(mixing))
        self.mixing = mixing


def mixed_values(
    operations: Sequence[Operation], with_rows: Collection[int], wanted: Collection[Any] = ()
) -> dict[int, Mixing]:
    """Returns the values where an operation first mixes rows, and the reasons.

    Args:
      with_rows: The numbers of the inputs that have rows.
      wanted: Results that must have rows. One that is independent of the rows and not constant along axis 0 counts too.
    """
    kinds = dict.fromkeys(with_rows, _Kind.ROWS)
    mixed: dict[int, Mixing] = {}
    for operation in operations:
        given = [
            kinds[atom]
            if isinstance(atom, int) and atom in kinds
            else _of_shape(aval.shape)  # an input without rows
            for aval, atom in zip(operation.operand_avals, operation.operands, strict=True)
        ]
        try:
            found = _apply(operation, given)
        except _MixesRows as error:
            found = [_of_shape(aval.shape) for aval in operation.result_avals]
            mixed.update(dict.fromkeys(operation.results, error.mixing))
        kinds.update(zip(operation.results, found, strict=True))
        numbering = Mixing(operation.name, operation.line, "tells rows apart by their number")
        mixed.update((n, numbering) for n in operation.results if n in wanted and kinds[n] is _Kind.FIXED)
    return mixed


def rows_of(value: Any, ids: Any) -> Any:
    """Returns rows of a table or a shard. A number out of range gives an arbitrary row."""
    return jnp.take(value, ids, axis=0, mode="clip")


def with_rows(value: Any, ids: Any, rows: Any) -> Any:
    """Returns a table with some rows replaced. Rows with a number out of range are dropped."""
    ids = jnp.where(ids < 0, value.shape[0], ids)  # NumPy's -1 is the last row
    return value.at[ids].set(rows, mode="drop")


# --- operation by operation ---------------------------------------------------------------------------


def _kinds_of_results(program: FlatProgram, kinds: Sequence[_Kind]) -> list[_Kind]:
    env: dict[int, _Kind] = {number: _of_shape(np.shape(value)) for number, value in program.consts.items()}
    env.update(zip(program.inputs, kinds, strict=True))

    def kind_of(atom: Any) -> _Kind:
        return env[atom] if isinstance(atom, int) else _of_shape(np.shape(atom.val))

    for operation in program.operations:
        found = _apply(operation, [kind_of(a) for a in operation.operands])
        env.update(zip(operation.results, found, strict=True))
    return [kind_of(a) for a in program.outputs]


def _apply(operation: Operation, kinds: Sequence[_Kind]) -> list[_Kind]:
    name, count = operation.name, len(operation.results)
    if name == "optimization_barrier":
        return list(kinds)
    if name == "cond":
        return _cond(operation, kinds)
    if operation.has_effects and _Kind.ROWS in kinds:
        raise _mixes(operation, "calls back into Python, or has another effect")
    if _keeps_rows(operation, kinds):
        return [_Kind.ROWS if _Kind.ROWS in kinds else _Kind.EVEN] * count
    if _Kind.ROWS not in kinds:
        return [_of_shape(aval.shape) for aval in operation.result_avals]
    raise _mixes(operation, "combines rows, or is not known to keep them apart")


def _keeps_rows(operation: Operation, kinds: Sequence[_Kind]) -> bool:
    """Returns True if row i of the results is computed from row i of the operands or from values independent of
    rows.
    """
    name = operation.name
    if name == "iota":
        return operation.params["dimension"] != 0
    if name == "broadcast_in_dim" and _Kind.ROWS not in kinds:
        return 0 not in operation.params["broadcast_dimensions"]
    if not kinds or _Kind.FIXED in kinds:
        return False
    return operation.is_elementwise or (name in _KEEPS_AXIS_0 and _KEEPS_AXIS_0[name](operation))


def _cond(operation: Operation, kinds: Sequence[_Kind]) -> list[_Kind]:
    # Their operands are those after the predicate, a scalar.
    columns = zip(*(_kinds_of_results(branch, kinds[1:]) for branch in operation.branches), strict=True)
    return [_either(operation, set(column)) for column in columns]


def _either(operation: Operation, kinds: set[_Kind]) -> _Kind:
    if kinds == {_Kind.ROWS, _Kind.FIXED} or len(kinds) == len(_Kind):
        raise _mixes(operation, "returns rows in one branch and no rows in another")
    for kind in (_Kind.ROWS, _Kind.FIXED):
        if kind in kinds:
            return kind
    return _Kind.EVEN


def _of_shape(shape: Sequence[int]) -> _Kind:
    """Returns the kind of a value that is independent of rows. Operations broadcast scalars and dims of size 1."""
    return _Kind.FIXED if shape and shape[0] != 1 else _Kind.EVEN


def _mixes(operation: Operation, why: str) -> _MixesRows:
    return _MixesRows(Mixing(operation.name, operation.line, why))


def _is_apart(name: str) -> Callable[[Operation], bool]:
    """Returns a check that axis 0 is not among the dims in the parameter ``name``."""

    def check(operation: Operation) -> bool:
        dims = operation.params[name]
        return 0 not in (dims if isinstance(dims, (tuple, list)) else (dims,))

    return check


def _reshape(operation: Operation) -> bool:
    before, after = tuple(operation.operand_avals[0].shape), tuple(operation.result_avals[0].shape)
    return (
        operation.params.get("dimensions") is None
        and before[:1] == after[:1]
        and bool(before)
        and before[0] > 0
    )


def _broadcast(operation: Operation) -> bool:
    dims = operation.params["broadcast_dimensions"]
    return dims[:1] == (0,) and operation.operand_avals[0].shape[0] == operation.result_avals[0].shape[0]


def _slice(operation: Operation) -> bool:
    strides = operation.params["strides"]
    is_whole = operation.operand_avals[0].shape[0] == operation.result_avals[0].shape[0]
    return is_whole and (strides is None or strides[0] == 1)


_KEEPS_AXIS_0: dict[str, Callable[[Operation], bool]] = {
    "argmax": _is_apart("axes"),
    "argmin": _is_apart("axes"),
    "broadcast_in_dim": _broadcast,
    "concatenate": _is_apart("dimension"),
    "cumsum": _is_apart("axis"),
    "reduce_and": _is_apart("axes"),
    "reduce_max": _is_apart("axes"),
    "reduce_min": _is_apart("axes"),
    "reduce_or": _is_apart("axes"),
    "reduce_prod": _is_apart("axes"),
    "reduce_sum": _is_apart("axes"),
    "reshape": _reshape,
    "rev": _is_apart("dimensions"),
    "slice": _slice,
    "split": _is_apart("axis"),
    "squeeze": _is_apart("dimensions"),
    "stack": _is_apart("axis"),
    "transpose": lambda operation: tuple(operation.params["permutation"])[:1] == (0,),
    "unstack": _is_apart("axis"),
}
