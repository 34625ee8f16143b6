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

from replicax._src import jax_compat
from replicax._src.tracing.equations import called, evaluated, has_any, inner_jaxprs
from replicax._src.tracing.markers import Question
from replicax._src.tracing.primitives import JITS, REMATERIALISES
from replicax._src.tracing.replication import is_call
from replicax._src.tracing.table_rows import ByRows, bound, first_of, of_gradients, raw, whole_table
from replicax._src.user_code import UNKNOWN

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
      jaxpr: Its operands are those of the function, then the positions of each lookup. Its results are those of the
        function, then ids.
      consts: The leading operands.
      found: The table and the shape of the ids of each lookup.
    """

    jaxpr: Any
    consts: Sequence[Any]
    found: Sequence[tuple[int, tuple[int, ...]]]

    def __call__(self, *args: Any) -> list[Any]:
        return jax_compat.eval_jaxpr(self.jaxpr, [*self.consts, *args])


@dataclass(frozen=True)
class _Gathered:
    """One lookup.

    Attributes:
      indices: The indices in the program. They are kept because they are identified by ``id``.
      numbers: The indices into the available rows; out of range for ids whose gradient is dropped.
    """

    eqn: Any
    indices: Any
    table: ByRows
    numbers: Any

    def is_of(self, scatter: Any) -> bool:
        """Returns True if an equation is the gradient of this lookup: it adds rows to an array of the table's shape."""
        gathered, added = self.eqn.params["dimension_numbers"], scatter.params["dimension_numbers"]
        return (
            scatter.invars[0].aval.shape == self.eqn.invars[0].aval.shape
            and added.update_window_dims == gathered.offset_dims
            and added.inserted_window_dims == gathered.collapsed_slice_dims
            and added.scatter_dims_to_operand_dims == gathered.start_index_map
            and not added.operand_batching_dims
        )

    def gradient(self, scatter: Any, updates: Any) -> ByRows:
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

    def evaluate(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], called_at: str = UNKNOWN
    ) -> list[Any]:
        """Returns the results for operands that are arrays or ``ByRows``.

        Raises:
          NeedsWholeTable: An operation needs the full table.
        """

        def results(eqn: Any, operands: list[Any]) -> list[Any]:
            line = jax_compat.equation_line(eqn)
            return self._apply(eqn, operands, called_at if line == UNKNOWN else line)

        return evaluated(jaxpr, args, results, consts)

    def _apply(self, eqn: Any, operands: list[Any], line: str) -> list[Any]:
        by_rows = [operand for operand in operands if isinstance(operand, ByRows)]
        if not by_rows:
            return self._without_tables(eqn, operands, line)
        rule = _RULES.get(eqn.primitive.name)
        if rule is not None:
            return rule(self, eqn, operands, line)
        if any(each.is_gradient for each in by_rows):
            return of_gradients(eqn, operands, line)
        raise whole_table(by_rows[0], eqn, line, "takes the whole table")

    # --- gradients of lookups from jax.grad -----------------------------------------------------------------

    def _without_tables(self, eqn: Any, operands: list[Any], line: str) -> list[Any]:
        """Finds gradients of tables: values that are added to zeros at the indices of a lookup."""
        name = eqn.primitive.name
        if name == "scatter-add":
            gathered = self._gathers.get(id(operands[1]))
            if id(operands[0]) in self._zeros and gathered is not None and gathered.is_of(eqn):
                return [gathered.gradient(eqn, operands[2])]
        if name in JITS and self._gathers and is_call(eqn) and _scatters(eqn):
            return _call(self, eqn, operands, line)
        results = bound(eqn, operands)
        if name == "broadcast_in_dim" and _is_zero(eqn.invars[0]):
            self._zeros[id(results[0])] = results[0]
        return results

    def remember(self, eqn: Any, indices: Any, table: ByRows, numbers: Any) -> None:
        """Records an equation that gathers rows at ``indices``; ``numbers`` are the indices into the available rows."""
        self._gathers[id(indices)] = _Gathered(eqn, indices, table, numbers)

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
        self, closed: Any, operands: Sequence[Any], avals: Sequence[Any], eqn: Any, line: str
    ) -> _Inner:
        """Rewrites an inner function for operands like these.

        Args:
          avals: The avals of operands that are not ``ByRows``.
        """
        jaxpr, consts = jax_compat.inner_jaxpr(closed)
        avals = [
            jax_compat.abstractify(o.rows) if isinstance(o, ByRows) else a
            for o, a in zip(operands, avals, strict=True)
        ]

        def traced(positions: Positions, values: Sequence[Any]) -> list[Any]:
            args = [
                replace(o, rows=v) if isinstance(o, ByRows) else v
                for o, v in zip(operands, values, strict=True)
            ]
            results = Walk(positions, self._num_rows).evaluate(jaxpr, consts, args, line)
            for result in results:
                if isinstance(result, ByRows):
                    raise whole_table(result, eqn, line, "gives the table, or its gradient")
            return [*results, *positions.ids]

        counted = Positions(None)
        jax_compat.trace(lambda *values: traced(counted, values), avals)

        def run(*values: Any) -> list[Any]:
            given = iter(values[len(avals) :])
            return traced(Positions(lambda table, shape: next(given)), values[: len(avals)])

        shapes = [jax_compat.shaped(shape, jnp.int32) for _, shape in counted.found]
        rewritten, held = jax_compat.trace(run, [*avals, *shapes])
        return _Inner(rewritten, held, counted.found)

    def look_up_all(self, found: Sequence[tuple[int, tuple[int, ...]]], line: str) -> list[Any]:
        """Returns the positions for the lookups of an inner function. The caller passes their ids to ``keep``."""
        return [self._positions.look_up(table, shape, line) for table, shape in found]

    def keep(self, ids: Sequence[Any]) -> None:
        self._positions.ids.extend(ids)

    def full(self, table: int, shape: tuple[int, ...]) -> Any:
        """Returns ids that match no row."""
        return jnp.full(shape, self._num_rows[table], jnp.int32)


Rule = Callable[[Walk, Any, list[Any], str], list[Any]]


# --- operation by operation ---------------------------------------------------------------------------


def _each_by_itself(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    del walk, line
    results = bound(eqn, raw(operands))
    return [
        replace(o, rows=r) if isinstance(o, ByRows) else r for o, r in zip(operands, results, strict=False)
    ]


def _gather(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    table, indices = operands
    numbers, mode = eqn.params["dimension_numbers"], Mode.from_any(eqn.params["mode"])
    if not isinstance(table, ByRows) or table.is_gradient or not _takes_rows(eqn, mode):
        raise whole_table(first_of(operands), eqn, line, "takes something else than whole rows")
    column = tuple(numbers.start_index_map).index(0)
    positions, is_there = walk.look_up(table, indices[..., column], mode, line)
    is_number = jnp.arange(indices.shape[-1]) == column
    at_rows = jnp.where(is_number, positions[..., None], 0)
    changed = {"mode": Mode.FILL_OR_DROP if mode is Mode.FILL_OR_DROP else Mode.CLIP}
    changed |= {"indices_are_sorted": False, "unique_indices": False}
    (taken,) = bound(eqn, [table.rows, at_rows], {**eqn.params, **changed})
    if mode in (Mode.CLIP, Mode.FILL_OR_DROP):
        walk.remember(eqn, indices, table, at_rows)
        return [taken]
    # For an out-of-range id that was promised to be in range, XLA gives the nearest row and drops the gradient.
    walk.remember(eqn, indices, table, jnp.where(is_there[..., None], at_rows, table.rows.shape[0]))
    if not jnp.issubdtype(taken.dtype, jnp.inexact):
        return [taken]
    dims = [d for d in range(taken.ndim) if d not in numbers.offset_dims]
    is_there = jax.lax.broadcast_in_dim(is_there, taken.shape, dims)
    return [jax.lax.select(is_there, taken, jax.lax.stop_gradient(taken))]


def _takes_rows(eqn: Any, mode: Any) -> bool:
    """Returns True if full rows are gathered. In clip mode, the other index components are clipped to 0."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    is_known = tuple(numbers.start_index_map) == (0,) or (mode is Mode.CLIP and 0 in numbers.start_index_map)
    is_whole = tuple(params["slice_sizes"]) == (1, *eqn.invars[0].aval.shape[1:])
    return is_known and is_whole and not numbers.operand_batching_dims


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jax_compat.Literal) and bool(atom.val == 0)


def _scatters(eqn: Any) -> bool:
    return any(has_any(inner, ("scatter-add",)) for inner in inner_jaxprs(eqn))


def _dynamic_slice(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    table, number, *_ = operands
    is_row = tuple(eqn.params["slice_sizes"]) == (1, *eqn.invars[0].aval.shape[1:])
    if table.is_gradient or not is_row:
        raise whole_table(table, eqn, line, "takes something else than one row")
    position, _ = walk.look_up(table, jnp.asarray(number), Mode.CLIP, line)
    return [jax.lax.dynamic_slice_in_dim(table.rows, position, 1)]


def _gradient(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    del walk
    start = sum(eqn.params["lengths"][:2])
    sources = Question.of(eqn, operands).sources
    for number, operand in enumerate(operands):
        if isinstance(operand, ByRows) and (operand.is_gradient or number < start):
            raise whole_table(operand, eqn, line, "differentiates the table itself, or its gradient")
    results = bound(eqn, raw(operands))
    return [
        replace(source, rows=result, is_gradient=True) if isinstance(source, ByRows) else result
        for source, result in zip(sources, results, strict=True)
    ]


def _call(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    if not is_call(eqn):
        raise whole_table(first_of(operands), eqn, line, "takes the whole table")
    return walk.evaluate(*called(eqn, operands), line)


def _checkpoint(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    inner = walk.inner(jax_compat.sub_jaxprs(eqn)[0], operands, [v.aval for v in eqn.invars], eqn, line)
    positions = walk.look_up_all(inner.found, line)
    results = jax.checkpoint(inner.__call__, policy=eqn.params.get("policy"))(*raw(operands), *positions)
    walk.keep(results[len(eqn.outvars) :])
    return results[: len(eqn.outvars)]


def _scan(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    num_consts, num_carry = jax_compat.scan_counts(eqn)
    for number, operand in enumerate(operands):
        if isinstance(operand, ByRows) and (operand.is_gradient or number >= num_consts):
            raise whole_table(operand, eqn, line, "carries the table, or goes through its rows")
    closed, length = eqn.params["jaxpr"], eqn.params["length"]
    avals = [v.aval for v in jax_compat.inner_jaxpr(closed)[0].invars]
    inner = walk.inner(closed, operands[:num_consts] + [None] * (len(avals) - num_consts), avals, eqn, line)
    found = [(table, (length, *shape)) for table, shape in inner.found]
    positions = walk.look_up_all(found, line)
    held = raw(operands[:num_consts])
    carry, xs = operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]

    def step(state: Any, x: Any) -> Any:
        results = inner(*held, *state, *x)
        return results[:num_carry], results[num_carry:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, ys = jax.lax.scan(step, carry, [*xs, *positions], **options)
    num_ys = len(eqn.outvars) - num_carry
    walk.keep(ys[num_ys:])
    return [*last, *ys[:num_ys]]


def _cond(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    """Rewrites a condition. The branch that is not taken has ids that match no row."""
    index, *given = operands
    avals = [v.aval for v in eqn.invars[1:]]
    branches = [walk.inner(closed, given, avals, eqn, line) for closed in eqn.params["branches"]]
    found = [each for branch in branches for each in branch.found]
    positions = walk.look_up_all(found, line)
    num_results, start = len(eqn.outvars), 0
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


def _own_derivative(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    del walk
    raise whole_table(
        first_of(operands), eqn, line, "has a derivative of its own, which takes the whole table"
    )


_RULES: dict[str, Rule] = {
    **dict.fromkeys(JITS, _call),
    **dict.fromkeys(REMATERIALISES, _checkpoint),
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
