"""Rewrites lookups: evaluates each operation of a program on rows of tables instead of the full tables.

A converted, copied or read table remains a table. A gather of full rows becomes a gather from the available rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode as Mode

from replicax._ps.programs.table_rows import ByRows, apply_to_gradient_rows, bound, first_of, raw, whole_table
from replicax._src.program_kit.traced_programs import (
    FlatProgram,
    NumberedValues,
    Operation,
    trace,
)

Take = Callable[[int, tuple[int, ...]], Any]


class Positions:
    """The lookups of a program, in order.

    Args:
      take: Returns the positions for a lookup, given its table and the shape of its ids; None while lookups are
        counted.

    Attributes:
      found: The table and the shape of the ids of each lookup.
      ids: The ids of each lookup.
      lines: The user's line of a lookup, by table.
    """

    def __init__(self, take: Take | None):
        self._take = take
        self.found: list[tuple[int, tuple[int, ...]]] = []
        self.ids: list[Any] = []
        self.lines: dict[int, str] = {}

    def look_up(self, table: int, shape: tuple[int, ...], line: str) -> Any:
        """Returns the positions for the next lookup. The caller adds its ids to ``ids``."""
        self.found.append((table, shape))
        self.lines.setdefault(table, line)
        return jnp.zeros(shape, jnp.int32) if self._take is None else self._take(table, shape)


@dataclass(frozen=True)
class _Inner:
    """A rewritten inner function, which also takes positions and returns ids.

    Attributes:
      program: Its operands are those of the function, then the positions of each lookup. Its results are those of the
        function, then ids.
      consts: The leading operands.
      found: The table and the shape of the ids of each lookup.
    """

    program: FlatProgram
    consts: Sequence[Any]
    found: Sequence[tuple[int, tuple[int, ...]]]

    def __call__(self, *args: Any) -> list[Any]:
        return self.program.evaluate([*self.consts, *args])


@dataclass(frozen=True)
class _Gathered:
    """One lookup.

    Attributes:
      indices: The indices in the program. They are kept because they are identified by ``id``.
      numbers: The indices into the available rows; out of range for ids whose gradient is dropped.
    """

    operation: Operation
    indices: Any
    table: ByRows
    numbers: Any

    def is_of(self, scatter: Operation) -> bool:
        """Returns True for the gradient of this lookup: it adds rows to an array of the table's shape."""
        gathered, added = self.operation.params["dimension_numbers"], scatter.params["dimension_numbers"]
        return (
            scatter.operand_avals[0].shape == self.operation.operand_avals[0].shape
            and added.update_window_dims == gathered.offset_dims
            and added.inserted_window_dims == gathered.collapsed_slice_dims
            and added.scatter_dims_to_operand_dims == gathered.start_index_map
            and not added.operand_batching_dims
        )

    def gradient(self, scatter: Operation, updates: Any) -> ByRows:
        rows = jnp.zeros(self.table.rows.shape, updates.dtype)
        changed = {"mode": Mode.FILL_OR_DROP, "indices_are_sorted": False, "unique_indices": False}
        (added,) = bound(scatter, [rows, self.numbers, updates], {**scatter.params, **changed})
        return replace(self.table, rows=added, is_gradient=True)


class Walk:
    """Evaluates a program with rows instead of tables.

    Args:
      positions: The lookups of the program.
      num_rows: The number of rows of each table.
    """

    def __init__(self, positions: Positions, num_rows: dict[int, int]):
        self._positions = positions
        self._num_rows = num_rows
        self._zeros: dict[int, Any] = {}
        self._gathers: dict[int, _Gathered] = {}

    def evaluate(self, program: FlatProgram, args: Sequence[Any]) -> list[Any]:
        """Returns the results for operands that are arrays or ``ByRows``.

        Raises:
          NeedsWholeTable: An operation needs the full table.
        """

        values = NumberedValues(program.consts | dict(zip(program.inputs, args, strict=True)))
        for operation in program.operations:
            results = self._apply(operation, values.of(operation.operands), operation.line)
            values.update(zip(operation.results, results, strict=True))
        return values.of(program.outputs)

    def _apply(self, operation: Operation, operands: list[Any], line: str) -> list[Any]:
        by_rows = [operand for operand in operands if isinstance(operand, ByRows)]
        if not by_rows:
            return self._without_tables(operation, operands, line)
        rule = _rule_of(operation)
        if rule is not None:
            return rule(self, operation, operands, line)
        if any(each.is_gradient for each in by_rows):
            return apply_to_gradient_rows(operation, operands, line)
        raise whole_table(by_rows[0], operation, line, "takes the whole table")

    # --- gradients of lookups from jax.grad -----------------------------------------------------------------

    def _without_tables(self, operation: Operation, operands: list[Any], line: str) -> list[Any]:
        """Finds gradients of tables: values that are added to zeros at the indices of a lookup."""
        name = operation.name
        if name == "scatter-add":
            gathered = self._gathers.get(id(operands[1]))
            if id(operands[0]) in self._zeros and gathered is not None and gathered.is_of(operation):
                return [gathered.gradient(operation, operands[2])]
        if operation.is_jit and self._gathers and "scatter-add" in operation.inner_names:
            return _call(self, operation, operands, line)
        results = bound(operation, operands)
        if name == "broadcast_in_dim" and _is_zero(operation.operands[0]):
            self._zeros[id(results[0])] = results[0]
        return results

    def remember(self, operation: Operation, indices: Any, table: ByRows, numbers: Any) -> None:
        """Records a gather of rows at ``indices``; ``numbers`` are the indices into the available rows."""
        self._gathers[id(indices)] = _Gathered(operation, indices, table, numbers)

    # --- lookups --------------------------------------------------------------------------------------

    def look_up(self, table: ByRows, ids: Any, mode: Any, line: str) -> tuple[Any, Any]:
        """Returns the positions of rows, [...], and a mask of the ids that the table has."""
        num_rows = self._num_rows[table.table]
        positions = self._positions.look_up(table.table, tuple(ids.shape), line)
        ids = ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids
        is_there = (ids >= 0) & (ids < num_rows)
        known = (
            jnp.where(is_there, ids, num_rows)
            if mode is Mode.FILL_OR_DROP
            else jnp.clip(ids, 0, num_rows - 1)
        )
        self._positions.ids.append(known.astype(jnp.int32))
        return positions, is_there

    # --- inner functions ------------------------------------------------------------------------------

    def inner(
        self,
        program: FlatProgram,
        operands: Sequence[Any],
        avals: Sequence[Any],
        operation: Operation,
        line: str,
    ) -> _Inner:
        """Rewrites an inner function for operands like these.

        Args:
          avals: The avals of operands that are not ``ByRows``.
        """
        avals = [
            jax.typeof(o.rows) if isinstance(o, ByRows) else a for o, a in zip(operands, avals, strict=True)
        ]

        def traced(positions: Positions, values: Sequence[Any]) -> list[Any]:
            args = [
                replace(o, rows=v) if isinstance(o, ByRows) else v
                for o, v in zip(operands, values, strict=True)
            ]
            results = Walk(positions, self._num_rows).evaluate(program, args)
            for result in results:
                if isinstance(result, ByRows):
                    raise whole_table(result, operation, line, "gives the table, or its gradient")
            return [*results, *positions.ids]

        counted = Positions(None)
        trace(lambda *values: traced(counted, values), avals)

        def run(*values: Any) -> list[Any]:
            given = iter(values[len(avals) :])
            return traced(Positions(lambda table, shape: next(given)), values[: len(avals)])

        shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for _, shape in counted.found]
        rewritten, held = trace(run, [*avals, *shapes])
        return _Inner(FlatProgram.unresolved(rewritten), held, counted.found)

    def look_up_all(self, found: Sequence[tuple[int, tuple[int, ...]]], line: str) -> list[Any]:
        """Returns the positions for the lookups of an inner function. The caller passes their ids to ``keep``."""
        return [self._positions.look_up(table, shape, line) for table, shape in found]

    def keep(self, ids: Sequence[Any]) -> None:
        self._positions.ids.extend(ids)

    def full(self, table: int, shape: tuple[int, ...]) -> Any:
        """Returns ids that match no row."""
        return jnp.full(shape, self._num_rows[table], jnp.int32)


Rule = Callable[[Walk, Operation, list[Any], str], list[Any]]


# --- operation by operation ---------------------------------------------------------------------------


def _each_by_itself(walk: Walk, operation: Operation, operands: list[Any], line: str) -> list[Any]:
    del walk, line
    results = bound(operation, raw(operands))
    return [
        replace(o, rows=r) if isinstance(o, ByRows) else r for o, r in zip(operands, results, strict=False)
    ]


def _gather(walk: Walk, operation: Operation, operands: list[Any], line: str) -> list[Any]:
    table, indices = operands
    numbers, mode = operation.params["dimension_numbers"], Mode.from_any(operation.params["mode"])
    if not isinstance(table, ByRows) or table.is_gradient or not _takes_rows(operation, mode):
        raise whole_table(first_of(operands), operation, line, "takes something else than whole rows")
    column = tuple(numbers.start_index_map).index(0)
    positions, is_there = walk.look_up(table, indices[..., column], mode, line)
    is_number = jnp.arange(indices.shape[-1]) == column
    at_rows = jnp.where(is_number, positions[..., None], 0)
    changed = {"mode": Mode.FILL_OR_DROP if mode is Mode.FILL_OR_DROP else Mode.CLIP}
    changed |= {"indices_are_sorted": False, "unique_indices": False}
    (taken,) = bound(operation, [table.rows, at_rows], {**operation.params, **changed})
    if mode in (Mode.CLIP, Mode.FILL_OR_DROP):
        walk.remember(operation, indices, table, at_rows)
        return [taken]
    # For an out-of-range id that was promised to be in range, XLA gives the nearest row and drops the gradient.
    walk.remember(operation, indices, table, jnp.where(is_there[..., None], at_rows, table.rows.shape[0]))
    if not jnp.issubdtype(taken.dtype, jnp.inexact):
        return [taken]
    dims = [d for d in range(taken.ndim) if d not in numbers.offset_dims]
    is_there = jax.lax.broadcast_in_dim(is_there, taken.shape, dims)
    return [jax.lax.select(is_there, taken, jax.lax.stop_gradient(taken))]


def _takes_rows(operation: Operation, mode: Any) -> bool:
    """Returns True if full rows are gathered. In clip mode, the other index components are clipped to 0."""
    numbers, params = operation.params["dimension_numbers"], operation.params
    is_known = tuple(numbers.start_index_map) == (0,) or (mode is Mode.CLIP and 0 in numbers.start_index_map)
    is_whole = tuple(params["slice_sizes"]) == (1, *operation.operand_avals[0].shape[1:])
    return is_known and is_whole and not numbers.operand_batching_dims


def _is_zero(atom: Any) -> bool:
    return not isinstance(atom, int) and bool(atom.val == 0)


def _dynamic_slice(walk: Walk, operation: Operation, operands: list[Any], line: str) -> list[Any]:
    table, number, *_ = operands
    is_row = tuple(operation.params["slice_sizes"]) == (1, *operation.operand_avals[0].shape[1:])
    if table.is_gradient or not is_row:
        raise whole_table(table, operation, line, "takes something else than one row")
    position, _ = walk.look_up(table, jnp.asarray(number), Mode.CLIP, line)
    return [jax.lax.dynamic_slice_in_dim(table.rows, position, 1)]


def _gradient(walk: Walk, operation: Operation, operands: list[Any], line: str) -> list[Any]:
    del walk
    num_targets, num_seeds, num_sources = operation.params["lengths"]
    start = num_targets + num_seeds
    sources = operands[start : start + num_sources]
    for number, operand in enumerate(operands):
        if isinstance(operand, ByRows) and (operand.is_gradient or number < start):
            raise whole_table(operand, operation, line, "differentiates the table itself, or its gradient")
    results = bound(operation, raw(operands))
    return [
        replace(source, rows=result, is_gradient=True) if isinstance(source, ByRows) else result
        for source, result in zip(sources, results, strict=True)
    ]


def _call(walk: Walk, operation: Operation, operands: list[Any], line: str) -> list[Any]:
    (program,) = operation.inner
    return walk.evaluate(program, operands)


def _checkpoint(walk: Walk, operation: Operation, operands: list[Any], line: str) -> list[Any]:
    inner = walk.inner(operation.inner[0], operands, operation.operand_avals, operation, line)
    positions = walk.look_up_all(inner.found, line)
    results = jax.checkpoint(inner.__call__, policy=operation.params.get("policy"))(
        *raw(operands), *positions
    )
    walk.keep(results[len(operation.results) :])
    return results[: len(operation.results)]


def _scan(walk: Walk, operation: Operation, operands: list[Any], line: str) -> list[Any]:
    num_consts, num_carry = operation.num_scanned
    for number, operand in enumerate(operands):
        if isinstance(operand, ByRows) and (operand.is_gradient or number >= num_consts):
            raise whole_table(operand, operation, line, "carries the table, or goes through its rows")
    (program,), length = operation.inner, operation.params["length"]
    avals = program.input_avals
    inner = walk.inner(
        program, operands[:num_consts] + [None] * (len(avals) - num_consts), avals, operation, line
    )
    found = [(table, (length, *shape)) for table, shape in inner.found]
    positions = walk.look_up_all(found, line)
    held = raw(operands[:num_consts])
    carry, xs = operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]

    def step(state: Any, x: Any) -> Any:
        results = inner(*held, *state, *x)
        return results[:num_carry], results[num_carry:]

    options = {name: operation.params[name] for name in ("length", "reverse", "unroll")}
    last, ys = jax.lax.scan(step, carry, [*xs, *positions], **options)
    num_ys = len(operation.results) - num_carry
    walk.keep(ys[num_ys:])
    return [*last, *ys[:num_ys]]


def _cond(walk: Walk, operation: Operation, operands: list[Any], line: str) -> list[Any]:
    """Rewrites a condition. The branch that is not taken has ids that match no row."""
    index, *given = operands
    avals = operation.operand_avals[1:]
    branches = [walk.inner(program, given, avals, operation, line) for program in operation.inner]
    found = [each for branch in branches for each in branch.found]
    positions = walk.look_up_all(found, line)
    num_results, start = len(operation.results), 0
    functions = []
    for branch in branches:
        functions.append(_branch(walk, branch, found, start, len(given), num_results))
        start += len(branch.found)
    results = jax.lax.switch(index, functions, *raw(given), *positions)
    walk.keep(results[num_results:])
    return results[:num_results]


def _branch(
    walk: Walk, inner: _Inner, found: Sequence[Any], start: int, num_operands: int, num_results: int
) -> Callable[..., list[Any]]:
    stop = start + len(inner.found)

    def run(*args: Any) -> list[Any]:
        positions = args[num_operands:]
        results = inner(*args[:num_operands], *positions[start:stop])
        before, after = ([walk.full(*each) for each in part] for part in (found[:start], found[stop:]))
        return [*results[:num_results], *before, *results[num_results:], *after]

    return run


def _own_derivative(walk: Walk, operation: Operation, operands: list[Any], line: str) -> list[Any]:
    del walk
    raise whole_table(
        first_of(operands), operation, line, "has a derivative of its own, which takes the whole table"
    )


def _rule_of(operation: Operation) -> Rule | None:
    if operation.is_jit:
        return _call
    return _checkpoint if operation.rematerialises else _RULES.get(operation.name)


_RULES: dict[str, Rule] = {
    "cond": _cond,
    "scan": _scan,
    "custom_jvp_call": _own_derivative,
    "custom_vjp_call": _own_derivative,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "replicax_gradient": _gradient,
    **dict.fromkeys(
        [
            "convert_element_type",
            "copy",
            "optimization_barrier",
            "replicax_aggregate",
            "replicax_read",
            "replicax_watch",
            "stop_gradient",
        ],
        _each_by_itself,
    ),
}
