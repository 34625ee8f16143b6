"""What each operation of a program is where rows of tables stand for the tables: the walk that rewrites lookups.

A table that is converted, copied or read stays one. A gather of whole rows becomes one from the rows that are there.
Gradients of tables have the same rows, and are 0 in all others: what keeps that may be done to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode as Mode

from replicax._src import jax_compat
from replicax._src.program.verdict import is_call
from replicax._src.user_code import UNKNOWN


@dataclass(frozen=True)
class WholeTable:
    """Why a table is needed whole.

    Attributes:
      table: Its position among the program's operands.
      primitive: The operation that needs it; None if there is none.
      line: Of the user's code.
      why: For people.
    """

    table: int
    primitive: str | None
    line: str
    why: str

    def __str__(self) -> str:
        said = self.why if self.primitive is None else f"{self.primitive} {self.why}"
        return f"{said} ({self.line})" if self.line else said


class NeedsWholeTable(Exception):
    """The table of ``why`` cannot be replaced by some of its rows."""

    def __init__(self, why: WholeTable):
        super().__init__(str(why))
        self.why = why


@dataclass(frozen=True)
class ByRows:
    """Stands for an array with all rows of a table.

    Attributes:
      table: Its position among the program's operands.
      rows: What is there of it: the rows that are looked up.
      is_gradient: The other rows are 0; otherwise they are the table's.
    """

    table: int
    rows: Any
    is_gradient: bool


Take = Callable[[int, tuple[int, ...]], Any]


class Positions:
    """The lookups of a program, in order.

    Args:
      take: Gives the positions for a lookup of a table by ids of a shape; None while lookups are counted.

    Attributes:
      found: The table, and the ids' shape, of each lookup.
      ids: Their ids.
      lines: For each table, the user's line of a lookup.
    """

    def __init__(self, take: Take | None):
        self._take = take
        self.found: list[tuple[int, tuple[int, ...]]] = []
        self.ids: list[Any] = []
        self.lines: dict[int, str] = {}

    def look_up(self, table: int, shape: tuple[int, ...], line: str) -> Any:
        """The positions for the next lookup, whose ids have to be added to ``ids``."""
        self.found.append((table, shape))
        self.lines.setdefault(table, line)
        return jnp.zeros(shape, jnp.int32) if self._take is None else self._take(table, shape)


@dataclass(frozen=True)
class _Inner:
    """An inner function, rewritten: it also takes positions, and gives ids.

    Attributes:
      jaxpr: Operands: those of the function, then the positions of each lookup. Results: its, then ids.
      consts: Leading operands.
      found: Its lookups.
    """

    jaxpr: Any
    consts: Sequence[Any]
    found: Sequence[tuple[int, tuple[int, ...]]]

    def __call__(self, *args: Any) -> list[Any]:
        return jax_compat.eval_jaxpr(self.jaxpr, [*self.consts, *args])


class Walk:
    """Evaluates a program in which rows stand for tables.

    Args:
      positions: Its lookups.
      num_rows: Of each table.
    """

    def __init__(self, positions: Positions, num_rows: dict[int, int]):
        self._positions = positions
        self._num_rows = num_rows

    def evaluate(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], called_at: str = UNKNOWN
    ) -> list[Any]:
        """The results for operands that are arrays, or ByRows.

        Raises:
          NeedsWholeTable: An operation needs more than some rows.
        """
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jax_compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            line = jax_compat.equation_line(eqn)
            results = self._apply(eqn, [read(a) for a in eqn.invars], called_at if line == UNKNOWN else line)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _apply(self, eqn: Any, operands: list[Any], line: str) -> list[Any]:
        by_rows = [operand for operand in operands if isinstance(operand, ByRows)]
        if not by_rows:
            return _bound(eqn, operands)
        name = eqn.primitive.name
        rule = _RULES.get(name)
        if rule is None and any(each.is_gradient for each in by_rows):
            rule = _of_gradients
        if rule is None:
            raise _whole(by_rows[0], eqn, line, "takes the whole table")
        return rule(self, eqn, operands, line)

    # --- lookups --------------------------------------------------------------------------------------

    def look_up(self, table: ByRows, ids: Any, mode: Any, line: str) -> tuple[Any, Any]:
        """The positions of rows, [...] as their numbers, and which of these the table has."""
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
        """An inner function for operands like these.

        Args:
          avals: Of those that are no ByRows.
        """
        jaxpr, consts = jax_compat.inner_jaxpr(closed)
        avals = [_aval(o.rows) if isinstance(o, ByRows) else a for o, a in zip(operands, avals, strict=True)]

        def traced(positions: Positions, values: Sequence[Any]) -> list[Any]:
            args = [
                replace(o, rows=v) if isinstance(o, ByRows) else v
                for o, v in zip(operands, values, strict=True)
            ]
            results = Walk(positions, self._num_rows).evaluate(jaxpr, consts, args, line)
            for result in results:
                if isinstance(result, ByRows):
                    raise _whole(result, eqn, line, "gives the table, or its gradient")
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
        """The positions for lookups of an inner function, whose ids have to be given to ``keep``."""
        return [self._positions.look_up(table, shape, line) for table, shape in found]

    def keep(self, ids: Sequence[Any]) -> None:
        self._positions.ids.extend(ids)

    def full(self, table: int, shape: tuple[int, ...]) -> Any:
        """Ids that no row has."""
        return jnp.full(shape, self._num_rows[table], jnp.int32)


Rule = Callable[[Walk, Any, list[Any], str], list[Any]]


def _bound(eqn: Any, operands: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    is_known = all(not isinstance(operand, jax_compat.Tracer) for operand in operands)
    if eqn.primitive.name == "convert_element_type" and is_known:  # so that limits of clipping stay known
        with jax_compat.outside_traces():
            return jax_compat.bind_equation(eqn, operands)
    return jax_compat.bind_equation(eqn, operands, params)


def _whole(table: ByRows, eqn: Any, line: str, why: str) -> NeedsWholeTable:
    return NeedsWholeTable(WholeTable(table.table, eqn.primitive.name, line, why))


def _aval(value: Any) -> Any:
    return jax_compat.abstractify(value)


def _raw(operands: Sequence[Any]) -> list[Any]:
    return [operand.rows if isinstance(operand, ByRows) else operand for operand in operands]


def _first(operands: Sequence[Any]) -> ByRows:
    return next(operand for operand in operands if isinstance(operand, ByRows))


# --- operation by operation ---------------------------------------------------------------------------


def _each_by_itself(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    del walk, line
    results = _bound(eqn, _raw(operands))
    return [
        replace(o, rows=r) if isinstance(o, ByRows) else r for o, r in zip(operands, results, strict=False)
    ]


def _gather(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    table, indices = operands
    numbers, mode = eqn.params["dimension_numbers"], Mode.from_any(eqn.params["mode"])
    if not isinstance(table, ByRows) or table.is_gradient or not _takes_rows(eqn, mode):
        raise _whole(_first(operands), eqn, line, "takes something else than whole rows")
    column = tuple(numbers.start_index_map).index(0)
    positions, is_there = walk.look_up(table, indices[..., column], mode, line)
    is_number = jnp.arange(indices.shape[-1]) == column
    indices = jnp.where(is_number, positions[..., None], 0)
    changed = {"mode": Mode.FILL_OR_DROP if mode is Mode.FILL_OR_DROP else Mode.CLIP}
    changed |= {"indices_are_sorted": False, "unique_indices": False}
    (taken,) = _bound(eqn, [table.rows, indices], {**eqn.params, **changed})
    if mode in (Mode.CLIP, Mode.FILL_OR_DROP) or not jnp.issubdtype(taken.dtype, jnp.inexact):
        return [taken]
    # XLA gives the nearest row for an id that was promised not to be, and drops its gradient.
    dims = [d for d in range(taken.ndim) if d not in numbers.offset_dims]
    is_there = jax.lax.broadcast_in_dim(is_there, taken.shape, dims)
    return [jax.lax.select(is_there, taken, jax.lax.stop_gradient(taken))]


def _takes_rows(eqn: Any, mode: Any) -> bool:
    """Whether whole rows are gathered. Where those are clipped, what else the indices say is clipped to 0."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    is_known = tuple(numbers.start_index_map) == (0,) or (mode is Mode.CLIP and 0 in numbers.start_index_map)
    is_whole = tuple(params["slice_sizes"]) == (1, *eqn.invars[0].aval.shape[1:])
    return is_known and is_whole and not numbers.operand_batching_dims


def _dynamic_slice(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    table, number, *_ = operands
    is_row = tuple(eqn.params["slice_sizes"]) == (1, *eqn.invars[0].aval.shape[1:])
    if table.is_gradient or not is_row:
        raise _whole(table, eqn, line, "takes something else than one row")
    position, _ = walk.look_up(table, jnp.asarray(number), Mode.CLIP, line)
    return [jax.lax.dynamic_slice_in_dim(table.rows, position, 1)]


def _gradient(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    del walk
    start = eqn.params["num_targets"] + eqn.params["num_seeds"]
    sources = operands[start : start + eqn.params["num_sources"]]
    for number, operand in enumerate(operands):
        if isinstance(operand, ByRows) and (operand.is_gradient or number < start):
            raise _whole(operand, eqn, line, "differentiates the table itself, or its gradient")
    results = _bound(eqn, _raw(operands))
    return [
        replace(source, rows=result, is_gradient=True) if isinstance(source, ByRows) else result
        for source, result in zip(sources, results, strict=True)
    ]


def _call(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    if not is_call(eqn):
        raise _whole(_first(operands), eqn, line, "takes the whole table")
    inner, consts = jax_compat.inner_jaxpr(jax_compat.sub_jaxprs(eqn)[0])
    return walk.evaluate(inner, consts, operands[len(operands) - len(inner.invars) :], line)


def _checkpoint(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    inner = walk.inner(jax_compat.sub_jaxprs(eqn)[0], operands, [v.aval for v in eqn.invars], eqn, line)
    positions = walk.look_up_all(inner.found, line)
    results = jax.checkpoint(inner.__call__, policy=eqn.params.get("policy"))(*_raw(operands), *positions)
    walk.keep(results[len(eqn.outvars) :])
    return results[: len(eqn.outvars)]


def _scan(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    num_consts, num_carry = jax_compat.scan_counts(eqn)
    for number, operand in enumerate(operands):
        if isinstance(operand, ByRows) and (operand.is_gradient or number >= num_consts):
            raise _whole(operand, eqn, line, "carries the table, or goes through its rows")
    closed, length = eqn.params["jaxpr"], eqn.params["length"]
    avals = [v.aval for v in jax_compat.inner_jaxpr(closed)[0].invars]
    inner = walk.inner(closed, operands[:num_consts] + [None] * (len(avals) - num_consts), avals, eqn, line)
    found = [(table, (length, *shape)) for table, shape in inner.found]
    positions = walk.look_up_all(found, line)
    held = _raw(operands[:num_consts])
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
    """The branch that is not taken has ids that no row has."""
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
    results = jax.lax.switch(index, functions, *_raw(given), *positions)
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
    raise _whole(_first(operands), eqn, line, "has a derivative of its own, which takes the whole table")


# --- gradients of tables ------------------------------------------------------------------------------


def _of_gradients(walk: Walk, eqn: Any, operands: list[Any], line: str) -> list[Any]:
    """What gives 0 where the gradient is 0; and a sum over all rows, to which those that are 0 add nothing."""
    del walk
    first = _first(operands)
    name = eqn.primitive.name
    is_alike = all(
        o.is_gradient and o.table == first.table if isinstance(o, ByRows) else np.ndim(o) == 0
        for o in operands
    )
    if not is_alike or not (name == "reduce_sum" or _keeps_zero(eqn, operands)):
        raise _whole(first, eqn, line, "takes the gradient of all rows of the table")
    (result,) = _bound(eqn, _raw(operands))
    is_sum = name == "reduce_sum" and 0 in eqn.params["axes"]
    return [result if is_sum else replace(first, rows=result)]


_ODD_OR_SO = frozenset(
    [
        "abs",
        "cbrt",
        "convert_element_type",
        "copy",
        "expm1",
        "imag",
        "log1p",
        "neg",
        "real",
        "reduce_precision",
        "round",
        "sign",
        "sin",
        "square",
        "sqrt",
        "stop_gradient",
        "tan",
        "tanh",
        "replicax_reduced",
    ]
)
_OF_SEVERAL = frozenset(["add", "add_any", "max", "min", "mul", "sub"])


def _keeps_zero(eqn: Any, operands: Sequence[Any]) -> bool:
    name = eqn.primitive.name
    if name in _ODD_OR_SO or (name in _OF_SEVERAL and all(isinstance(o, ByRows) for o in operands)):
        return True
    if name in ("max", "min"):
        return all(isinstance(o, ByRows) or _is_limit(o, is_upper=name == "min") for o in operands)
    if name == "clamp":
        low, gradient, high = operands
        return (
            isinstance(gradient, ByRows) and _is_limit(low, is_upper=False) and _is_limit(high, is_upper=True)
        )
    if name == "integer_pow":
        return eqn.params["y"] > 0
    return name == "mul" or (name == "div" and not isinstance(operands[1], ByRows))


def _is_limit(value: Any, *, is_upper: bool) -> bool:
    """Whether it is known now, and lets 0 be."""
    if isinstance(value, (ByRows, jax_compat.Tracer)):
        return False
    return bool(np.asarray(value) >= 0) if is_upper else bool(np.asarray(value) <= 0)


_RULES: dict[str, Rule] = {
    "closed_call": _call,
    "core_call": _call,
    "jit": _call,
    "pjit": _call,
    "checkpoint": _checkpoint,
    "remat": _checkpoint,
    "remat2": _checkpoint,
    "cond": _cond,
    "scan": _scan,
    "custom_jvp_call": _own_derivative,
    "custom_vjp_call": _own_derivative,
    "custom_vjp_call_jaxpr": _own_derivative,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "replicax_gradient": _gradient,
    **dict.fromkeys(
        [
            "convert_element_type",
            "copy",
            "copy_p",
            "optimization_barrier",
            "replicax_aggregate",
            "replicax_read",
            "replicax_watch",
            "stop_gradient",
        ],
        _each_by_itself,
    ),
}
