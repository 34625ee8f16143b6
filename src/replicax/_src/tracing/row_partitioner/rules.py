"""Rules that rewrite each operation of a program over a global batch for a replica that has some of the rows.

A rule takes the layouts of the operands. It returns the layouts of the results and the replica's computation. It raises
``Incomplete`` if some operands must be completed first, and ``NotByRowsError`` if the operation mixes rows in an
unsupported way. An operation without a rule takes replicated operands only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.markers import NUM_SCALARS, accumulated
from replicax._src.tracing.primitives import ELEMENTWISE
from replicax._src.tracing.row_partitioner.row_layouts import Layout, Rows, RowSplit, Shared

Evaluate = Callable[[Sequence[Any]], list[Any]]
WHOLE, SUM = Shared.WHOLE, Shared.SUM


class NotByRowsError(Exception):
    """A program cannot be split by rows. The text names the operation that prevents it.

    Attributes:
      line: The line of the user's code; None if the reason is not about one.
    """

    def __init__(self, why: str):
        super().__init__(why)
        self.line: str | None = None

    def __str__(self) -> str:
        why = super().__str__()
        return why if self.line is None else f"{why} ({self.line})"


class Incomplete(Exception):
    """The operands at these positions must be completed first."""

    def __init__(self, numbers: Sequence[int]):
        super().__init__(numbers)
        self.numbers = tuple(numbers)


@dataclass(frozen=True)
class AppliedOperation:
    """One operation on a replica.

    Attributes:
      layouts: The layouts of the results.
      evaluate: Maps the replica's parts of the operands to its parts of the results.
    """

    layouts: Sequence[Layout]
    evaluate: Evaluate


Rule = Callable[[Any, Sequence[Layout], RowSplit], AppliedOperation]


def apply(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    """Returns the operation of an equation for operands with these layouts.

    Raises:
      Incomplete: Some operands must be completed first.
      NotByRowsError: The operation cannot be split by rows.
    """
    if eqn.effects:
        raise refused(eqn, "calls back into Python, or has another effect")
    if all(layout is WHOLE for layout in layouts):
        return _bound(eqn, [WHOLE] * len(eqn.outvars))
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        rule = _elementwise if eqn.primitive.name in ELEMENTWISE else _whole_only
    return rule(eqn, layouts, split)


def refused(eqn: Any, why: str) -> NotByRowsError:
    """Returns the error for an equation."""
    return NotByRowsError(f"{eqn.primitive.name} {why}")


# --- parts of rules -----------------------------------------------------------------------------------


def _bound(
    eqn: Any,
    layouts: Sequence[Layout],
    prepare: Callable[[list[Any]], list[Any]] = list,
    **params: Any,
) -> AppliedOperation:
    changed = {**eqn.params, **params}
    return AppliedOperation(layouts, lambda args: jax_compat.bind_equation(eqn, prepare(list(args)), changed))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _rows_of(layouts: Sequence[Layout]) -> dict[int, Rows]:
    return {i: layout for i, layout in enumerate(layouts) if isinstance(layout, Rows)}


def _complete(layouts: Sequence[Layout], numbers: Sequence[int] | None = None) -> None:
    """Raises ``Incomplete`` if operands (at these positions) are parts of sums, maxima or minima."""
    numbers = range(len(layouts)) if numbers is None else numbers
    parts = [i for i in numbers if not isinstance(layouts[i], Rows) and layouts[i] is not WHOLE]
    if parts:
        raise Incomplete(parts)


def _mixed(eqn: Any) -> NotByRowsError:
    return refused(eqn, "mixes rows of the batch")


def _only_rows(eqn: Any, layouts: Sequence[Layout]) -> Rows:
    """Returns the one layout of all operands that have rows."""
    _complete(layouts)
    found = set(_rows_of(layouts).values())
    if len(found) > 1:
        raise _mixed(eqn)
    return found.pop()


def _moved(rows: Rows, dim: int) -> Rows:
    return Rows(dim, rows.unit)


def _full(eqn: Any, split: RowSplit, size: int, rows: Rows) -> None:
    if size != split.num_rows * rows.unit:
        raise _mixed(eqn)


def _is_linear_type(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.number)


# --- operation by operation ---------------------------------------------------------------------------


def _whole_only(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    del split
    _complete(layouts)
    raise refused(eqn, "takes rows of the batch, in a way that is not known to keep them apart")


def _elementwise(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    if not _rows_of(layouts):
        return _of_parts(eqn, layouts)
    rows = _only_rows(eqn, layouts)
    size = _shape(eqn.outvars[0])[rows.dim]
    _full(eqn, split, size, rows)

    def rows_of(arg: Any, layout: Layout) -> Any:
        is_broadcast = np.ndim(arg) <= rows.dim or (np.shape(arg)[rows.dim] == 1 != size)
        return arg if layout is not WHOLE or is_broadcast else split.take(arg, rows)

    def prepare(args: list[Any]) -> list[Any]:
        return list(map(rows_of, args, layouts))

    return _bound(eqn, [rows] * len(eqn.outvars), prepare)


def _bitcast(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    if _shape(eqn.invars[0]) != _shape(eqn.outvars[0]):
        raise refused(eqn, "cuts numbers into pieces, or joins them")
    return _elementwise(eqn, layouts, split)


def _each_by_itself(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    del split
    return _bound(eqn, layouts)


def _of_parts(eqn: Any, layouts: Sequence[Layout]) -> AppliedOperation:
    """Applies an operation to replicated operands or parts of sums. Only linear operations may come before the sum."""
    name = eqn.primitive.name
    parts = [i for i, layout in enumerate(layouts) if layout is not WHOLE]
    is_sum = all(layouts[i] is SUM for i in parts) and all(_is_linear_type(eqn.invars[i]) for i in parts)
    all_parts = len(parts) == len(layouts)
    is_linear = is_sum and (
        (name in _LINEAR and all_parts)
        or (name == "mul" and len(parts) == 1 and _is_plain(eqn.invars[1 - parts[0]]))
        or (name == "div" and parts == [0] and _is_plain(eqn.invars[1]))
        or (name == "pad" and parts == [0] and _is_zero(eqn.invars[1]))
        or (name == "select_n" and parts == list(range(1, len(layouts))))
        or (name == "convert_element_type" and _keeps_sums(eqn.invars[0].aval.dtype, eqn.params["new_dtype"]))
    )
    if not is_linear:
        raise Incomplete(parts)
    return _bound(eqn, [SUM] * len(eqn.outvars))


def _is_plain(atom: Any) -> bool:
    """Returns True for a constant that parts of a sum may be multiplied by. Others, such as 0 and inf, could give
    NaN.
    """
    if not isinstance(atom, jax_compat.Literal) or not jnp.issubdtype(np.result_type(atom.val), jnp.inexact):
        return False
    return bool(np.isfinite(atom.val)) and atom.val != 0


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jax_compat.Literal) and atom.val == 0


def _keeps_sums(old: Any, new: Any) -> bool:
    """Returns True if the sum of converted numbers equals the converted sum."""
    old_size, new_size = np.dtype(old).itemsize, np.dtype(new).itemsize
    if jnp.issubdtype(old, jnp.inexact):
        return jnp.issubdtype(new, jnp.inexact) and new_size >= old_size
    if jnp.issubdtype(new, jnp.integer):
        return new_size <= old_size  # both wrap around
    return (
        jnp.issubdtype(old, jnp.signedinteger)
        and jnp.issubdtype(new, jnp.inexact)
        and min(old_size, new_size) >= 4
    )


def _movement(where: Callable[[Any, Rows, RowSplit], tuple[Rows, dict[str, Any]]]) -> Rule:
    """Returns a rule that moves one operand's data. ``where`` gives the new layout of the rows and changed
    parameters.
    """

    def rule(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
        is_larger = (
            eqn.outvars[0].aval.size > eqn.invars[0].aval.size
        )  # summing the smaller operand is cheaper
        if layouts[0] is SUM and not is_larger and all(layout is WHOLE for layout in layouts[1:]):
            return _bound(eqn, [SUM] * len(eqn.outvars))
        _complete(layouts)
        if not isinstance(layouts[0], Rows):
            raise _mixed(eqn)
        rows, params = where(eqn, layouts[0], split)
        if any(layout is not WHOLE for layout in layouts[1:]):
            raise _mixed(eqn)
        return _bound(eqn, [rows] * len(eqn.outvars), **params)

    return rule


def _reshape(eqn: Any, rows: Rows, split: RowSplit) -> tuple[Rows, dict[str, Any]]:
    shape, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if eqn.params.get("dimensions") is not None or 0 in shape:
        raise _mixed(eqn)
    before = int(np.prod(shape[: rows.dim]))
    for dim, size in enumerate(new):
        is_there = int(np.prod(new[:dim])) == before
        if is_there and split.num_rows and size and size % split.num_rows == 0:
            moved = Rows(dim, size // split.num_rows)
            return moved, {"new_sizes": split.local_shape(new, moved)}
    raise _mixed(eqn)


def _broadcast_in_dim(eqn: Any, rows: Rows, split: RowSplit) -> tuple[Rows, dict[str, Any]]:
    new = _shape(eqn.outvars[0])
    moved = _moved(rows, eqn.params["broadcast_dimensions"][rows.dim])
    _full(eqn, split, new[moved.dim], rows)
    return moved, {"shape": split.local_shape(new, moved)}


def _transpose(eqn: Any, rows: Rows, split: RowSplit) -> tuple[Rows, dict[str, Any]]:
    del split
    return _moved(rows, tuple(eqn.params["permutation"]).index(rows.dim)), {}


def _squeeze(eqn: Any, rows: Rows, split: RowSplit) -> tuple[Rows, dict[str, Any]]:
    """``squeeze`` or ``unstack``."""
    del split
    gone = eqn.params["dimensions"] if "dimensions" in eqn.params else (eqn.params["axis"],)
    if rows.dim in gone:
        raise _mixed(eqn)
    return _moved(rows, rows.dim - sum(dim < rows.dim for dim in gone)), {}


def _slice(eqn: Any, rows: Rows, split: RowSplit) -> tuple[Rows, dict[str, Any]]:
    start, limit = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    strides = eqn.params["strides"]
    _full(eqn, split, limit[rows.dim] - start[rows.dim], rows)
    if strides is not None and strides[rows.dim] != 1:
        raise _mixed(eqn)
    limit[rows.dim] = split.largest * rows.unit
    return rows, {"limit_indices": tuple(limit)}


def _dynamic_slice(eqn: Any, rows: Rows, split: RowSplit) -> tuple[Rows, dict[str, Any]]:
    sizes = eqn.params["slice_sizes"]
    _full(eqn, split, sizes[rows.dim], rows)
    return rows, {"slice_sizes": split.local_shape(sizes, rows)}


def _pad(eqn: Any, rows: Rows, split: RowSplit) -> tuple[Rows, dict[str, Any]]:
    del split
    if tuple(eqn.params["padding_config"][rows.dim]) != (0, 0, 0):
        raise _mixed(eqn)
    return rows, {}


def _tile(eqn: Any, rows: Rows, split: RowSplit) -> tuple[Rows, dict[str, Any]]:
    del split
    if eqn.params["reps"][rows.dim] != 1:
        raise _mixed(eqn)
    return rows, {}


def _along(name: str) -> Callable[[Any, Rows, RowSplit], tuple[Rows, dict[str, Any]]]:
    """Returns a check for operations along the dims in parameter ``name``, or the last dim if there is no such
    parameter.
    """

    def where(eqn: Any, rows: Rows, split: RowSplit) -> tuple[Rows, dict[str, Any]]:
        del split
        value = eqn.params.get(name, len(_shape(eqn.invars[0])) - 1)
        if rows.dim in (value if isinstance(value, (tuple, list)) else (value,)):
            raise _mixed(eqn)
        return rows, {}

    return where


def _windows(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    """Applies pooling or its gradient if each window is within one row."""
    rows = _only_rows(eqn, layouts)
    params = eqn.params
    rank = len(params["window_dimensions"])
    ones = [
        params.get(name) or (1,) * rank for name in ("window_strides", "base_dilation", "window_dilation")
    ]
    is_one = all(value[rows.dim] == 1 for value in [params["window_dimensions"], *ones])
    if not is_one or tuple(params["padding"][rows.dim]) != (0, 0):
        raise _mixed(eqn)
    return _elementwise(eqn, layouts, split)


def _same_rows(along: Callable[[Any, Rows, RowSplit], tuple[Rows, dict[str, Any]]]) -> Rule:
    """Returns a rule for operands with the same rows or replicated. ``along`` raises if rows would be mixed."""

    def rule(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
        if not _rows_of(layouts):
            return _of_parts(eqn, layouts)
        along(eqn, _only_rows(eqn, layouts), split)
        return _elementwise(eqn, layouts, split)

    return rule


def _stack(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    if not _rows_of(layouts):
        return _of_parts(eqn, layouts)
    rows = _only_rows(eqn, layouts)

    def prepare(args: list[Any]) -> list[Any]:
        return [split.converted(arg, layout, rows) for arg, layout in zip(args, layouts, strict=True)]

    return _bound(eqn, [_moved(rows, rows.dim + (eqn.params["axis"] <= rows.dim))], prepare)


def _dynamic_update_slice(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    _complete(layouts)
    rows = _only_rows(eqn, layouts[:2])
    _full(eqn, split, _shape(eqn.invars[1])[rows.dim], rows)
    return _elementwise(eqn, layouts, split)


def _reduction(kind: Shared, neutral: Callable[[Any], Any], *, is_logical: bool = False) -> Rule:
    def rule(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
        if is_logical and not jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.bool_):
            return _reduction_of_others(eqn, layouts, split)  # bit by bit
        rows, axes = layouts[0], eqn.params["axes"]
        if rows is SUM and kind is SUM:
            return _bound(eqn, [SUM])
        _complete(layouts)
        assert isinstance(rows, Rows)
        if rows.dim not in axes:
            return _bound(eqn, [_moved(rows, rows.dim - sum(axis < rows.dim for axis in axes))])
        value = neutral(eqn.invars[0].aval.dtype)
        return _bound(eqn, [kind], lambda args: [split.cleared(args[0], rows, value)])

    return rule


def _reduction_of_others(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    """Applies a reduction that is supported within rows only."""
    del split
    _complete(layouts)
    rows, axes = layouts[0], eqn.params["axes"]
    assert isinstance(rows, Rows)
    if rows.dim in axes:
        raise _mixed(eqn)
    return _bound(eqn, [_moved(rows, rows.dim - sum(axis < rows.dim for axis in axes))])


def _largest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max
    has_infinity = np.isinf(np.asarray(np.inf).astype(dtype))  # some 8-bit dtypes have none
    return np.inf if has_infinity else jnp.finfo(dtype).max


def _smallest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else -_largest(dtype)


def _dot_general(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    _complete(layouts)
    (contracted, batch) = eqn.params["dimension_numbers"]
    found = _rows_of(layouts)
    side, rows = next(iter(found.items()))
    partner = _partner(rows.dim, contracted, batch, side)
    if partner is None:  # a free dim
        if len(found) > 1:
            raise _mixed(eqn)
        free = [d for d in range(len(_shape(eqn.invars[side]))) if d not in (*contracted[side], *batch[side])]
        position = len(batch[0]) + free.index(rows.dim)
        if side == 1:
            position += len(_shape(eqn.invars[0])) - len(contracted[0]) - len(batch[0])
        return _bound(eqn, [_moved(rows, position)])
    other = _moved(rows, partner)
    if len(found) > 1 and found[1 - side] != other:
        raise _mixed(eqn)
    lies = {side: rows, 1 - side: other}
    is_sum = rows.dim in contracted[side]

    def prepare(args: list[Any]) -> list[Any]:
        if 1 - side not in found:
            args[1 - side] = split.take(args[1 - side], other)
        return [split.cleared(args[i], lies[i]) for i in (0, 1)] if is_sum else args

    return _bound(eqn, [SUM if is_sum else _moved(rows, batch[side].index(rows.dim))], prepare)


def _partner(dim: int, contracted: Any, batch: Any, side: int) -> int | None:
    """Returns the dim of the other operand that corresponds to this one."""
    for dims in (contracted, batch):
        if dim in dims[side]:
            return dims[1 - side][dims[side].index(dim)]
    return None


def _convolution(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    _complete(layouts)
    params, found = eqn.params, _rows_of(layouts)
    lhs, rhs, out = params["dimension_numbers"]
    lhs_batch, lhs_features, kernel_features = lhs[0], lhs[1], rhs[1]
    if found.keys() == {0} and found[0].dim == lhs_batch and params["batch_group_count"] == 1:
        return _bound(eqn, [_moved(found[0], out[0])])
    # The gradient of the kernel sums over the rows.
    rows = next(iter(found.values()))
    lies = [_moved(rows, lhs_features), _moved(rows, kernel_features)]
    if params["feature_group_count"] != 1 or any(found.get(i, lies[i]) != lies[i] for i in (0, 1)):
        raise _mixed(eqn)

    def prepare(args: list[Any]) -> list[Any]:
        args = [arg if i in found else split.take(arg, lies[i]) for i, arg in enumerate(args)]
        return [split.cleared(arg, lies[i]) for i, arg in enumerate(args)]

    return _bound(eqn, [SUM], prepare)


def _gather(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    _complete(layouts)
    numbers, found = eqn.params["dimension_numbers"], _rows_of(layouts)
    of_operand, of_indices = found.get(0), found.get(1)
    batched = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if of_indices is None and of_operand is not None:
        partner = dict(batched).get(of_operand.dim)
        if partner is None:
            return _gather_within_rows(eqn, of_operand, split)
        of_indices = _moved(of_operand, partner)
    assert of_indices is not None
    _not_within_an_index(eqn, of_indices)
    wanted = {j: i for i, j in batched}.get(of_indices.dim)
    if of_operand is not None and (wanted is None or of_operand != _moved(of_indices, wanted)):
        raise _mixed(eqn)
    rank = len(_shape(eqn.outvars[0]))
    position = [d for d in range(rank) if d not in numbers.offset_dims][of_indices.dim]

    def prepare(args: list[Any]) -> list[Any]:
        if wanted is not None and of_operand is None:
            args[0] = split.take(args[0], _moved(of_indices, wanted))
        if 1 not in found:
            args[1] = split.take(args[1], of_indices)
        return args

    return _bound(eqn, [_moved(of_indices, position)], prepare)


def _not_within_an_index(eqn: Any, of_indices: Rows) -> None:
    if of_indices.dim == len(_shape(eqn.invars[1])) - 1:
        raise _mixed(eqn)


def _gather_within_rows(eqn: Any, rows: Rows, split: RowSplit) -> AppliedOperation:
    """Applies a gather of the same entries from every row."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if rows.dim in (*numbers.collapsed_slice_dims, *numbers.start_index_map):
        raise _mixed(eqn)
    _full(eqn, split, sizes[rows.dim], rows)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(sizes)) if d not in gone]
    moved = _moved(rows, numbers.offset_dims[kept.index(rows.dim)])
    return _bound(eqn, [moved], slice_sizes=split.local_shape(sizes, rows))


def _scatter_add(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    _complete(layouts, [1, 2])
    numbers, found = eqn.params["dimension_numbers"], _rows_of(layouts)
    rank = len(_shape(eqn.invars[2]))
    scattered = [d for d in range(rank) if d not in numbers.update_window_dims]
    if 1 in found:
        of_indices = found[1]
    elif 2 in found and found[2].dim in scattered:
        of_indices = _moved(found[2], scattered.index(found[2].dim))
    else:
        return _scatter_add_within_rows(eqn, layouts, split)
    _not_within_an_index(eqn, of_indices)
    of_updates = _moved(of_indices, scattered[of_indices.dim])
    pairs = zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    of_operand = dict(pairs).get(of_indices.dim)
    if found.get(2, of_updates) != of_updates:
        raise _mixed(eqn)
    kind: Layout = SUM if of_operand is None else _moved(of_indices, of_operand)
    if layouts[0] is not SUM or kind is not SUM:
        _complete(layouts)
    if found.get(0, kind) != kind:
        raise _mixed(eqn)

    def prepare(args: list[Any]) -> list[Any]:
        operand, indices, updates = args
        operand = split.converted(operand, layouts[0], kind)
        indices = split.converted(indices, layouts[1], of_indices)
        updates = split.cleared(split.converted(updates, layouts[2], of_updates), of_updates)
        return [operand, indices, updates]

    # Promises about the indices need not hold for garbage rows.
    promises = {} if split.is_even else {"indices_are_sorted": False, "unique_indices": False}
    return _bound(eqn, [kind], prepare, **promises)


def _scatter_add_within_rows(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    """Applies a scatter-add to the same entries of every row."""
    numbers, found = eqn.params["dimension_numbers"], _rows_of(layouts)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(_shape(eqn.invars[0]))) if d not in gone]
    if 2 in found:
        of_operand = _moved(found[2], kept[numbers.update_window_dims.index(found[2].dim)])
    elif 0 in found and found[0].dim in kept:
        of_operand = found[0]
    else:
        raise _mixed(eqn)
    of_updates = _moved(of_operand, numbers.update_window_dims[kept.index(of_operand.dim)])
    _full(eqn, split, _shape(eqn.invars[2])[of_updates.dim], of_updates)
    _full(eqn, split, _shape(eqn.invars[0])[of_operand.dim], of_operand)
    _complete(layouts)
    lies = [of_operand, WHOLE, of_updates]
    if of_operand.dim in numbers.scatter_dims_to_operand_dims or any(
        found.get(i, lies[i]) != lies[i] for i in (0, 2)
    ):
        raise _mixed(eqn)

    def prepare(args: list[Any]) -> list[Any]:
        return [split.converted(arg, layouts[i], lies[i]) for i, arg in enumerate(args)]

    return _bound(eqn, [of_operand], prepare)


def _accumulate(eqn: Any, layouts: Sequence[Layout], split: RowSplit) -> AppliedOperation:
    if _rows_of(layouts):
        raise _mixed(eqn)
    numbers = range(len(layouts))
    _complete(layouts, [i for i in numbers if i < NUM_SCALARS or layouts[i] is not SUM])

    def evaluate(args: Sequence[Any]) -> list[Any]:
        parts = [split.converted(arg, layouts[i], SUM) for i, arg in enumerate(args) if i >= NUM_SCALARS]
        return accumulated(*args[:NUM_SCALARS], *parts, total=eqn.params["total"])

    half = len(eqn.outvars) // 2
    return AppliedOperation([SUM] * half + [WHOLE] * half, evaluate)


_LINEAR = frozenset("add add_any sub neg copy real imag concatenate stack name stop_gradient".split())  # noqa: SIM905
RULES: dict[str, Rule] = {
    "replicax_accumulate": _accumulate,
    "optimization_barrier": _each_by_itself,
    "bitcast_convert_type": _bitcast,
    "reshape": _movement(_reshape),
    "broadcast_in_dim": _movement(_broadcast_in_dim),
    "transpose": _movement(_transpose),
    "squeeze": _movement(_squeeze),
    "slice": _movement(_slice),
    "dynamic_slice": _movement(_dynamic_slice),
    "tile": _movement(_tile),
    "rev": _movement(_along("dimensions")),
    "split": _movement(_along("axis")),
    "unstack": _movement(_squeeze),
    "cumsum": _movement(_along("axis")),
    "stack": _stack,
    "concatenate": _same_rows(_along("dimension")),
    "pad": _same_rows(_pad),
    "sort": _same_rows(_along("dimension")),
    "top_k": _same_rows(_along("axis")),
    "cummax": _same_rows(_along("axis")),
    "cummin": _same_rows(_along("axis")),
    "cumprod": _same_rows(_along("axis")),
    "cumlogsumexp": _same_rows(_along("axis")),
    "dynamic_update_slice": _dynamic_update_slice,
    "reduce_sum": _reduction(SUM, lambda dtype: 0),
    "reduce_max": _reduction(Shared.MAX, _smallest),
    "reduce_min": _reduction(Shared.MIN, _largest),
    "reduce_or": _reduction(Shared.MAX, lambda dtype: False, is_logical=True),
    "reduce_and": _reduction(Shared.MIN, lambda dtype: True, is_logical=True),
    "reduce_prod": _reduction_of_others,
    "reduce_xor": _reduction_of_others,
    "argmax": _reduction_of_others,
    "argmin": _reduction_of_others,
    "reduce_window_sum": _windows,
    "reduce_window_max": _windows,
    "reduce_window_min": _windows,
    "reduce_window": _windows,
    "select_and_scatter_add": _windows,
    "select_and_gather_add": _windows,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "scatter-add": _scatter_add,
}
