"""Lookups in sharded tables: replaces gathers of rows by exchanges of rows between the replicas.

A program that only looks up rows of a sharded variable never needs the full variable. This pass evaluates the program
with the shards. A lookup becomes an exchange (``collectives/row_exchange.py``). The gradient of a table stays a list of
rows until it is summed over the replicas, and then becomes the shards of the sum. The pass leaves a variable with any
other use alone, and the program gathers it.

It runs after differentiation, on the programs of replicas and on those of the global view.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices.sharding_specs import dim_of
from replicax._src.devices.topology import REPLICA_AXIS, SHARD_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import called, evaluated, has_any
from replicax._src.tracing.gathers import is_large, sharded_read_p
from replicax._src.tracing.markers import rows_p
from replicax._src.tracing.primitives import ELEMENTWISE, REMATERIALISES, SUMS
from replicax._src.tracing.program import ReplicaProgram, Variant
from replicax._src.tracing.replication import collective_axes, is_call
from replicax._src.variables.layouts import VariableLayouts
from replicax._src.variables.row_shards import RowShards, RowsOfReplica

log = logging.getLogger("replicax")
Mode = jax.lax.GatherScatterMode
_LINEAR = frozenset(["convert_element_type", "copy", "name", "neg", "reduce_precision"])


# --- values of the pass -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sharded:
    """A sharded array: a table, or a gradient that is summed over the replicas.

    Attributes:
      shards: This replica's shard; in the global view the array of the full shape.
      place: The exchange of its rows.
      dtype: The dtype of the array, to which rows are converted.
      key: Identifies a table; None for a gradient.
      is_explicit: True if the user asks to exchange its rows, whatever it costs.
    """

    shards: Any
    place: RowShards
    dtype: Any
    key: Any = None
    is_explicit: bool = False


@dataclass(frozen=True)
class _Filled:
    """An array of a table's shape, all of whose elements are the scalar ``value``."""

    value: Any
    shape: tuple[int, ...]

    @property
    def is_zero(self) -> bool:
        return not isinstance(self.value, jax_compat.Tracer) and bool(np.all(np.asarray(self.value) == 0))


@dataclass(frozen=True)
class _Rows:
    """An array of a table's shape: zeros, with rows that are added.

    Attributes:
      parts: Pairs of numbers [n], -1 for no row, and rows [n, ...].
      is_explicit: As for ``_Sharded``.
    """

    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[tuple[Any, Any], ...] = ()
    is_explicit: bool = False

    @property
    def num_ids(self) -> int:
        return sum(len(numbers) for numbers, _ in self.parts)


class _NeedsFull(Exception):
    """A program needs the full table of ``key``."""

    def __init__(self, table: _Sharded, reason: str):
        super().__init__(reason)
        self.key, self.is_explicit, self.reason = table.key, table.is_explicit, reason


@dataclass(frozen=True)
class _Exchanged:
    """One possible exchange.

    Attributes:
      of: The key of the table, or the shape of the gradient. All variants of a program must agree.
      num_ids: The number of ids of each replica.
      is_explicit: True if the user asks for it.
    """

    of: Any
    num_ids: int
    is_explicit: bool

    @classmethod
    def joined(cls, variants: Sequence[_Exchanged]) -> _Exchanged:
        """Returns the exchange for all variants: the number of ids is the largest one."""
        return cls(variants[0].of, max(v.num_ids for v in variants), any(v.is_explicit for v in variants))


# --- one evaluation -----------------------------------------------------------------------------------------


@final
class _Evaluation:
    """Evaluates a program, with ``_Sharded`` tables among its operands.

    Args:
      places: The tables.
      agreed: The exchanges that all variants agree on, in order; None to find those of this program.
      num_askers: The number of replicas with ``num_ids`` ids each: R, or 1 in the global view.
      reads: The results of reads in the global view that are tables.

    Attributes:
      found: The possible exchanges, in order.
    """

    def __init__(
        self,
        places: Sequence[RowShards],
        agreed: Sequence[_Exchanged] | None,
        num_askers: int,
        reads: Collection[Any] = (),
    ):
        self._places, self._agreed, self._num_askers = places, agreed, num_askers
        self._shapes = {place.shape for place in places}
        self._reads = reads
        self.found: list[_Exchanged] = []

    def run(self, jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        """Returns the results, which may be values of this pass."""
        return evaluated(jaxpr, args, self._outputs, consts)

    def full(self, value: Any) -> Any:
        """Returns the array of a value of this pass. Gathers a summed gradient.

        Raises:
          _NeedsFull: The value is a table.
        """
        if isinstance(value, _Filled):
            return jnp.full(value.shape, value.value)
        if isinstance(value, _Rows):
            total = jnp.zeros(value.shape, value.dtype)
            for numbers, rows in value.parts:
                total = total.at[jnp.where(numbers < 0, value.shape[0], numbers)].add(rows, mode="drop")
            return total
        if isinstance(value, _Sharded):
            if value.key is not None:
                raise _NeedsFull(value, "is a result of the function")
            return value.place.gather(value.shards)
        return value

    def _outputs(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        kinds = {type(operand) for operand in operands} & {_Sharded, _Filled, _Rows}
        if eqn.primitive is sharded_read_p and eqn.outvars[0] in self._reads:
            return [_Sharded(operands[0], eqn.params["rows"], operands[0].dtype, eqn.outvars[0])]
        of_tables = [var for var in eqn.outvars if tuple(var.aval.shape) in self._shapes]
        if is_call(eqn) and name not in REMATERIALISES and (kinds or of_tables):
            inner, consts, given = called(eqn, operands)
            count = len(self.found)
            results = self.run(inner, given, consts)
            if count == len(self.found):
                self._look_up_none(eqn, operands)
            return results
        if not kinds:
            if name == "broadcast_in_dim" and of_tables and np.ndim(operands[0]) == 0:
                return [_Filled(operands[0], tuple(eqn.outvars[0].aval.shape))]
            return jax_compat.bind_equation(eqn, operands)
        if any(isinstance(o, _Sharded) and o.key is not None for o in operands):
            return [self._of_table(eqn, operands)]
        if name in SUMS and collective_axes(eqn) == (REPLICA_AXIS,):
            return self._summed(eqn, operands)
        made = None if _Sharded in kinds else self._of_gradient(eqn, operands)
        return jax_compat.bind_equation(eqn, list(map(self.full, operands))) if made is None else [made]

    # --- tables ---

    def _of_table(self, eqn: Any, operands: Sequence[Any]) -> Any:
        table, name = operands[0], eqn.primitive.name
        if isinstance(table, _Sharded) and table.key is not None:
            if eqn.primitive is rows_p:
                return dataclasses.replace(table, is_explicit=True)
            if name in ("copy", "name", "stop_gradient"):
                return table
            if name == "convert_element_type" and jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact):
                return dataclasses.replace(table, dtype=eqn.params["new_dtype"])
            if name == "gather" and len(operands) == 2 and _takes_rows(eqn):
                return self._look_up(eqn, table, operands[1])
        table = next(o for o in operands if isinstance(o, _Sharded) and o.key is not None)
        raise _NeedsFull(table, f"{name} takes the full table at {jax_compat.equation_line(eqn)}")

    def _look_up_none(self, eqn: Any, operands: Sequence[Any]) -> None:
        """Takes part in an exchange if a call looks up no rows, because replicas with ids need this replica's shard.

        (JAX takes no ids from a table without a gather.)
        """
        for table in operands:
            if isinstance(table, _Sharded) and table.key is not None and self._num_askers > 1:
                row = table.place.shape[1:]
                if any(
                    math.prod(v.aval.shape) == 0 and v.aval.shape[-len(row) :] == row for v in eqn.outvars
                ):
                    self._exchanged(table, jnp.zeros(0, jnp.int32))

    def _look_up(self, eqn: Any, table: _Sharded, indices: Any) -> Any:
        shape = table.place.shape
        mode = Mode.from_any(eqn.params["mode"])
        ids = indices[..., 0]
        # XLA clips ids that were promised to be in range, and drops their gradients.
        numbers = _numbers(ids, shape[0], clips=mode is not Mode.FILL_OR_DROP)
        rows = self._exchanged(table, numbers.reshape(-1)).reshape(*ids.shape, *shape[1:])
        if mode is not Mode.FILL_OR_DROP:
            return rows
        fill = eqn.params["fill_value"]
        if fill is None:
            fill = jnp.nan if jnp.issubdtype(table.dtype, jnp.inexact) else jnp.iinfo(table.dtype).min
        is_there = jnp.expand_dims(numbers >= 0, range(ids.ndim, rows.ndim))
        return jnp.where(is_there, rows, jnp.asarray(fill, rows.dtype))

    def _exchanged(self, table: _Sharded, numbers: Any) -> Any:
        """Returns rows [n, ...] for numbers [n]."""
        exchange = self._agree(_Exchanged(table.key, len(numbers), table.is_explicit))
        if not self._is_worth(exchange, table.place.shape, table.shards.dtype):
            raise _NeedsFull(table, "is smaller than the rows that are looked up")
        padded = _padded(numbers, exchange.num_ids, -1)
        return table.place.look_up(table.shards, padded, table.dtype)[: len(numbers)]

    def _agree(self, own: _Exchanged) -> _Exchanged:
        agreed = own if self._agreed is None else self._agreed[len(self.found)]
        self.found.append(own)
        return agreed

    def _is_worth(self, exchange: _Exchanged, shape: Sequence[int], dtype: Any) -> bool:
        """Returns True if an exchange of rows moves less than the full table."""
        if exchange.is_explicit or (self._agreed is None and self._num_askers > 1):
            return True
        size = math.prod(shape) * jnp.dtype(dtype).itemsize
        return is_large(size) and exchange.num_ids * self._num_askers < shape[0]

    # --- gradients ---

    def _of_gradient(self, eqn: Any, operands: Sequence[Any]) -> Any:
        """Returns the result for operands that are ``_Filled``, ``_Rows`` or arrays; None to compute the full array."""
        name, first = eqn.primitive.name, operands[0]
        if name == "scatter-add":
            return _added(eqn, operands)
        if name == "sharding_constraint":
            return self._constrained(eqn, first)
        if eqn.primitive is rows_p:
            rows = _as_rows(first, eqn)
            return None if rows is None else dataclasses.replace(rows, is_explicit=True)
        if not any(isinstance(operand, _Rows) for operand in operands):
            return _of_filled(eqn, operands)
        if name in ("add", "add_any"):
            terms = [rows for rows in (_as_rows(o, eqn) for o in operands) if rows is not None]
            if len(terms) < len(operands):
                return None
            parts = tuple(part for term in terms for part in term.parts)
            is_explicit = any(term.is_explicit for term in terms)
            return dataclasses.replace(terms[0], parts=parts, is_explicit=is_explicit)
        if name in ("mul", "div"):
            return _scaled(name, *operands)
        if name in _LINEAR and isinstance(first, _Rows):
            parts = tuple((n, jax_compat.bind_equation(eqn, [rows])[0]) for n, rows in first.parts)
            return dataclasses.replace(first, parts=parts, dtype=eqn.outvars[0].aval.dtype)
        return None

    def _summed(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Sums over the replicas."""
        results: list[Any] = [None] * len(operands)
        if eqn.params.get("axis_index_groups") is None:
            for i, operand in enumerate(operands):
                rows = _as_rows(operand, eqn, i)
                if rows is not None:
                    results[i] = self._sum_of_rows(rows)
        rest = [i for i, result in enumerate(results) if result is None]
        if rest:
            sums = jax_compat.bind_equation(eqn, [self.full(operands[i]) for i in rest])
            for i, total in zip(rest, sums, strict=True):
                results[i] = total
        return results

    def _constrained(self, eqn: Any, value: Any) -> Any:
        """Lays out a gradient in the global view. It needs no sum there."""
        rows, sharding = _as_rows(value, eqn), eqn.params["sharding"]
        if rows is None or dim_of(sharding.spec, SHARD_AXIS) is None:
            return rows
        total = self._sum_of_rows(rows, sharding)
        return None if total is None else total.shards

    def _sum_of_rows(self, rows: _Rows, layout: Any = None) -> _Sharded | None:
        """Returns the sum over the replicas, in a layout; None if this would move more than the full array."""
        places = (p for p in self._places if p.shape == rows.shape and layout in (None, p.layout))
        place = next(places, None)
        if place is None:
            return None
        exchange = self._agree(_Exchanged(rows.shape, rows.num_ids, rows.is_explicit))
        if not self._is_worth(exchange, rows.shape, rows.dtype):
            return None
        numbers = [jnp.zeros(0, jnp.int32), *(numbers for numbers, _ in rows.parts)]
        values = [jnp.zeros((0, *rows.shape[1:]), rows.dtype), *(values for _, values in rows.parts)]
        total = place.add(
            _padded(jnp.concatenate(numbers), exchange.num_ids, -1),
            _padded(jnp.concatenate(values), exchange.num_ids, 0),
        )
        return _Sharded(total, place, rows.dtype)


def _takes_rows(eqn: Any) -> bool:
    """Returns True if a gather takes full rows, whose dims are the last ones of its result."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    rank = eqn.outvars[0].aval.ndim
    return (
        tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.offset_dims) == tuple(range(rank - len(shape) + 1, rank))
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
    )


def _added(eqn: Any, operands: Sequence[Any]) -> Any:
    """Returns zeros with rows that are added; None if an equation adds something else."""
    total, indices, updates = operands
    numbers = eqn.params["dimension_numbers"]
    rows, shape = _as_rows(total, eqn), eqn.outvars[0].aval.shape
    rank = len(eqn.invars[2].aval.shape)
    adds_rows = (
        tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.update_window_dims) == tuple(range(rank - len(shape) + 1, rank))
        and not numbers.operand_batching_dims
    )
    if rows is None or not adds_rows or any(isinstance(o, (_Filled, _Rows, _Sharded)) for o in operands[1:]):
        return None
    clips = Mode.from_any(eqn.params["mode"]) is Mode.CLIP
    ids = _numbers(indices[..., 0], shape[0], clips=clips)
    part = ids.reshape(-1), updates.reshape(-1, *shape[1:])
    return dataclasses.replace(rows, parts=(*rows.parts, part))


def _as_rows(value: Any, eqn: Any, position: int = 0) -> _Rows | None:
    """Returns an operand as zeros with rows that are added; None if it is anything else."""
    if isinstance(value, _Filled) and value.is_zero:
        return _Rows(value.shape, eqn.outvars[position].aval.dtype)
    return value if isinstance(value, _Rows) else None


def _of_filled(eqn: Any, operands: Sequence[Any]) -> _Filled | None:
    """Applies an elementwise equation to the scalars that fill its operands; None if it is anything else."""
    scalars = [operand.value if isinstance(operand, _Filled) else operand for operand in operands]
    if eqn.primitive.name not in ELEMENTWISE or any(np.ndim(scalar) > 0 for scalar in scalars):
        return None
    is_known = not any(isinstance(scalar, jax_compat.Tracer) for scalar in scalars)
    with jax_compat.outside_traces() if is_known else contextlib.nullcontext():
        (value,) = jax_compat.bind_equation(eqn, scalars)
    return _Filled(value, tuple(eqn.outvars[0].aval.shape))


def _scaled(name: str, first: Any, second: Any) -> Any:
    """Returns rows that are multiplied or divided by a scalar; None for other products."""
    if isinstance(second, _Rows) and name == "mul":
        first, second = second, first
    scale = second.value if isinstance(second, _Filled) else second
    if not isinstance(first, _Rows) or isinstance(scale, _Rows) or np.ndim(scale) > 0:
        return None
    change: Callable[[Any, Any], Any] = jax.lax.mul if name == "mul" else jax.lax.div
    parts = tuple(
        (n, change(rows, jnp.broadcast_to(jnp.asarray(scale, rows.dtype), rows.shape)))
        for n, rows in first.parts
    )
    return dataclasses.replace(first, parts=parts)


def _numbers(ids: Any, num_rows: int, *, clips: bool) -> Any:
    """Returns ids as int32 numbers of rows. Ids out of range are clipped, or -1."""
    if clips:
        ids = jnp.clip(ids, 0, num_rows - 1)
    return jnp.where((ids >= 0) & (ids < num_rows), ids, -1).astype(jnp.int32)


def _padded(value: Any, length: int, fill: int) -> Any:
    widths = [(0, length - value.shape[0]), *[(0, 0)] * (value.ndim - 1)]
    return jnp.pad(value, widths, constant_values=fill)


# --- programs of replicas -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExchangedProgram:
    """A program that takes shards of some tables.

    Attributes:
      program: The program.
      tables: The ids of the bindings of which it takes this replica's shard.
      shards: The table of each array output that is a shard, by position.
    """

    program: ReplicaProgram
    tables: frozenset[int] = frozenset()
    shards: dict[int, RowsOfReplica] = dataclasses.field(default_factory=dict)


def exchange_rows(
    program: ReplicaProgram, layouts: VariableLayouts | None, first_handed: int | None = None
) -> ExchangedProgram:
    """Replaces lookups in sharded tables by exchanges of rows.

    Args:
      layouts: The layouts of the strategy; None without sharded state.
      first_handed: The position of the first array output that may be a shard.
    """
    unchanged = ExchangedProgram(program)
    if (
        layouts is None
        or layouts.shards is None
        or not any(has_any(v.jaxpr, ("gather",)) for v in program.variants)
    ):
        return unchanged
    places = {id(b): layouts.rows_of(b.shape, b.dtype, b.layout) for b in program.bindings}
    places = {key: place for key, place in places.items() if place is not None}
    while places:
        try:
            return _exchanged(program, layouts, places, first_handed) or unchanged
        except _NeedsFull as error:
            del places[error.key]
            if error.is_explicit:
                name = next(b.name for b in program.bindings if id(b) == error.key)
                log.warning("Variable %r is gathered, although its rows are looked up: %s.", name, error)
    return unchanged


def _exchanged(
    program: ReplicaProgram,
    layouts: VariableLayouts,
    places: dict[int, RowsOfReplica],
    first_handed: int | None,
) -> ExchangedProgram | None:
    """Returns the changed program; None if the variants exchange different things."""
    own = [_exchanged_variant(v, layouts, places, first_handed, None) for v in program.variants]
    kinds = [[exchange.of for exchange in found] for _, _, found in own]
    if not kinds[0] or any(other != kinds[0] for other in kinds[1:]):
        return None
    agreed = [_Exchanged.joined(column) for column in zip(*(found for _, _, found in own), strict=True)]
    made = [_exchanged_variant(v, layouts, places, first_handed, agreed) for v in program.variants]
    shards = made[0][1]
    if any(set(other) != set(shards) for _, other, _ in made[1:]):
        return None
    changed = dataclasses.replace(program, variants=[variant for variant, _, _ in made])
    return ExchangedProgram(changed, frozenset(places), shards)


def _exchanged_variant(
    variant: Variant,
    layouts: VariableLayouts,
    places: dict[int, RowsOfReplica],
    first_handed: int | None,
    agreed: Sequence[_Exchanged] | None,
) -> tuple[Variant, dict[int, RowsOfReplica], list[_Exchanged]]:
    """Returns the changed variant, its outputs that are shards, and its possible exchanges."""
    first = len(variant.consts)
    tables = {
        first + i: places[id(entry.binding)]
        for i, entry in enumerate(variant.entries)
        if id(entry.binding) in places
    }
    evaluation = _Evaluation(list(places.values()), agreed, layouts.topology.num_replicas)
    shards: dict[int, RowsOfReplica] = {}

    def evaluate(jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        evaluation.found.clear()
        given = [
            _Sharded(array, tables[i], array.dtype, id(variant.entries[i - first].binding))
            if i in tables
            else array
            for i, array in enumerate(arrays)
        ]
        results = evaluation.run(jaxpr, given)
        may_be_shards = range(variant.num_arrays)[first_handed:] if first_handed is not None else range(0)
        for i in may_be_shards:
            if isinstance(results[i], _Sharded) and results[i].key is None:
                shards[i], results[i] = results[i].place, results[i].shards
        return list(map(evaluation.full, results))

    avals = [
        jax_compat.shaped(tables[i].shard_shape, var.aval.dtype) if i in tables else var.aval
        for i, var in enumerate(variant.jaxpr.invars)
    ]
    changed = variant.retraced(evaluate, [(REPLICA_AXIS, layouts.topology.num_replicas)], avals)
    return changed, shards, evaluation.found


# --- programs of the global view ----------------------------------------------------------------------------


def exchange_rows_globally(jaxpr: Any) -> Any:
    """Replaces lookups in sharded tables by exchanges of rows in a program of the global view.

    Returns:
      The changed program, without constvars, and further constants that come before its operands.
    """
    reads = {
        eqn.outvars[0]: eqn.params["rows"]
        for eqn in jaxpr.eqns
        if eqn.primitive is sharded_read_p and eqn.params["rows"].has_rows
    }
    while reads and has_any(jaxpr, ("gather",)):
        evaluation = _Evaluation(list(reads.values()), None, 1, frozenset(reads))

        def evaluate(*args: Any, evaluation: _Evaluation = evaluation) -> list[Any]:
            return list(map(evaluation.full, evaluation.run(jaxpr, args)))

        try:
            return jax_compat.trace(evaluate, [var.aval for var in jaxpr.invars])
        except _NeedsFull as error:
            del reads[error.key]
            if error.is_explicit:
                log.warning("A variable is gathered, although its rows are looked up: %s.", error)
    return jaxpr, []
