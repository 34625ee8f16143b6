"""Reducing and gathering values in cross-replica context: ``Strategy.reduce`` and ``gather``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.collectives import in_replica
from replicax._src.collectives.cross_device import CrossDeviceOps, Gathered
from replicax._src.collectives.in_replica import Communicator, IndexedSlices
from replicax._src.devices.sums_of_processes import SumsOfProcesses
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.spmd import in_flight
from replicax._src.scope.context import LocalPerReplica
from replicax._src.user.user_code import user_line
from replicax._src.values.array_types import ConvertibleToArray
from replicax._src.values.distributed import DistributedValues, Mirrored, PerReplica, cut, is_value
from replicax._src.values.framework import is_variable
from replicax._src.variables.variable import Variable
from replicax._src.vocabulary.errors import ReductionError, UnsupportedError
from replicax._src.vocabulary.options import ReduceOp

_MAX_ON_HOST = 64  # numbers
_ON_HOST = {ReduceOp.SUM: ("float32", "int32"), ReduceOp.MEAN: ("float32",)}
_TINY = 1e-30

Axis = int | tuple[int, ...] | list[int] | None
"""None: over replicas only; otherwise over axes of the values too."""
_MOST_GATHERED_BYTES = 256 * 1024
"""The most bytes of all components that are gathered on the hosts, as a sum of as many bytes."""
Computation = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""Returns the result, and a token that is ready after the program."""


def _is_leaf(value: Any) -> bool:
    return isinstance(value, IndexedSlices) or is_value(value)


def reduce(topology: Topology, ops: CrossDeviceOps | None, op: ReduceOp, value: Any, axis: Axis) -> Any:
    """``Strategy.reduce`` over a pytree.

    Args:
      ops: A user's cross-device operations; None for the built-in sum.
    """
    _check_not_none(value, "reduce")
    axes = _axes(axis)
    if isinstance(value, PerReplica):  # nearly all calls
        return _reduce_per_replica(topology, ops, op, value, axes)
    return jax.tree_util.tree_map(
        lambda leaf: _reduce_leaf(topology, ops, op, leaf, axes), value, is_leaf=_is_leaf
    )


def _check_not_none(value: Any, method: str) -> None:
    if value is None:
        raise ReductionError(
            f"strategy.{method} at {user_line()} got None: the function given to strategy.run returns nothing. End it with "
            "`return value`."
        )


def _axes(axis: Axis) -> tuple[int, ...] | None:
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    for entry in axes:
        if isinstance(entry, bool) or not isinstance(entry, (int, np.integer)):
            raise TypeError(
                f"reduce's axis must be None, an int or a tuple of ints, got {axis!r}. Use axis=None to reduce over "
                f"replicas only, axis=0 to reduce over the batch too."
            )
    return tuple(int(entry) for entry in axes)


def _reduce_leaf(
    topology: Topology, ops: CrossDeviceOps | None, op: ReduceOp, value: Any, axes: tuple[int, ...] | None
) -> Any:
    if isinstance(value, LocalPerReplica):
        return _reduce_local(value.communicator, ops, op, value.local, axes)
    if isinstance(value, PerReplica):
        return _reduce_per_replica(topology, ops, op, value, axes)
    if is_variable(value):
        return _reduce_variable(topology, op, value, axes)
    if isinstance(value, Mirrored):
        if op is not ReduceOp.MEAN and topology.num_replicas > 1:
            raise ReductionError(_plain_text("A Mirrored value, which is one value,", value, op))
        value = value.as_array()
    if topology.num_replicas > 1 and op is not ReduceOp.MEAN:
        raise ReductionError(_plain_text("A non-DistributedValues value", value, op))
    if axes is None:
        return value
    return _reduce_array(op, value, axes)


def _reduce_array(op: ReduceOp, value: ConvertibleToArray, axes: tuple[int, ...]) -> jax.Array:
    array = in_replica.reducible(value, op)
    return in_replica.from_sum(op, _sum(array, _checked(axes, array.ndim)), _count(array.shape, axes))


def _sum(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sum(array, axis=axes, dtype=array.dtype)


def _plain_text(what: str, value: Any, op: ReduceOp) -> str:
    hint = ""
    if isinstance(value, int | float | complex):
        hint = (
            "If a function that strategy.run runs returns it, return an array, such as jnp.asarray(x.shape[0]): Python numbers "
            "are returned as they are where they are equal on all replicas. "
        )
    return (
        f"{what} {value!r} cannot be reduced with the given reduce op {op}: it has no component per replica. {hint}"
        f"Reduce what strategy.run returned, or make per-replica values with "
        f"strategy.experimental_distribute_values_from_function."
    )


def _reduce_variable(
    topology: Topology, op: ReduceOp, variable: Any, axes: tuple[int, ...] | None
) -> jax.Array:
    if isinstance(variable, Variable) and variable.has_components:
        stored = variable.components_array
        if topology.peers is None or isinstance(stored, jax_compat.Tracer):
            stored = jnp.stack(_on_one_device(variable.values))
        value = PerReplica(stored, topology.num_replicas)
        return _reduce_per_replica(topology, None, op, value, axes)
    if op is not ReduceOp.MEAN and topology.num_replicas > 1:
        raise ReductionError(
            f"Variable {variable.name!r} is mirrored: all replicas hold the same value, and its sum over replicas "
            f"has no meaning. Use the variable itself, or ReduceOp.MEAN."
        )
    array = jnp.asarray(variable.value)
    if axes is None:
        return array
    return _reduce_array(op, array, axes)


def _on_one_device(values: Sequence[jax.Array]) -> list[jax.Array | np.ndarray]:
    return [v if isinstance(v, jax_compat.Tracer) else np.asarray(v) for v in values]


def _reduce_local(
    communicator: Communicator,
    ops: CrossDeviceOps | None,
    op: ReduceOp,
    local: ConvertibleToArray,
    axes: tuple[int, ...] | None,
) -> jax.Array:
    """Reduces over replicas by a collective, in ``merge_call``."""
    array = in_replica.reducible(local, op)

    def total(values: list[jax.Array]) -> list[jax.Array]:
        return communicator.sum(values) if ops is None else ops.sum_in_replica(communicator, values, None)

    if axes is None:
        return in_replica.from_sum(op, total([array])[0], communicator.num_replicas)
    summed = _sum(array, _checked(axes, array.ndim))
    if op is ReduceOp.SUM:
        return total([summed])[0]
    count = jnp.full((), _count(array.shape, axes), jnp.float32)
    result, rows = total([summed])[0], communicator.sum([count])[0]
    return in_replica.from_sum(op, result, rows)


def _reduce_per_replica(
    topology: Topology,
    ops: CrossDeviceOps | None,
    op: ReduceOp,
    value: PerReplica,
    axes: tuple[int, ...] | None,
) -> Any:
    if topology.host_sums is not None and axes is None and ops is None:
        added = _added_on_hosts(topology, topology.host_sums, op, value)
        if added is not None:
            return added
    dtype = value.stored.dtype
    if not jnp.issubdtype(dtype, jnp.number):
        raise ReductionError(
            f"Cannot reduce an array of {dtype}: sums and means need numbers; convert it first."
        )
    if axes is None and value.shapes is not None:
        raise ReductionError(
            f"The components have different shapes {list(value.shapes)} and cannot be added as they are. Give the "
            f"batch's axis, usually strategy.reduce({op.name!r}, value, axis=0), or reduce in the replica function."
        )
    checked = None if axes is None else _checked(axes, len(value.component_shape(0)))
    if ops is not None:
        return _reduce_through(ops, op, value, checked)
    if isinstance(value.stored, jax_compat.Tracer):
        return _compute(op, value.num_replicas, value.is_equal, value.shapes, checked, value.stored)
    if checked is None and _is_quick_on_host(topology, op, value):
        result = _reduced_on_host(op, value)
        if result is not None:
            return topology.put_parts(result.shape, [result] * value.num_replicas, topology.replicated)
    compute = _compiled(topology, op, value.num_replicas, value.is_equal, value.shapes, checked)
    return _launch(topology, compute, value)


def _added_on_hosts(
    topology: Topology, sums: SumsOfProcesses, op: ReduceOp, value: PerReplica
) -> jax.Array | None:
    """Reduces a value of several processes over the replicas without a program. Returns None for one that only programs
    add.
    """
    stored = value.stored
    if value.is_equal or value.shapes is not None or isinstance(stored, jax_compat.Tracer):
        return None
    form = _form_on_hosts(sums, op, stored.dtype, stored.shape[1:])
    if form is None:
        return None
    parts = topology.rows_here(stored)
    if form.wide is not None:
        parts = [part.astype(form.wide) for part in parts]
    with sums.program(form.name, form.text):
        total = sums.all_reduce("sum", parts)
    return topology.put_same(
        total if op is ReduceOp.SUM else _mean(total, topology.num_replicas, stored.dtype)
    )


@dataclass(frozen=True)
class _FormOnHosts:
    """A reduction on the hosts.

    Attributes:
      name: The name for messages.
      text: What all processes do alike.
      wide: The dtype in which arrays are added; None for their own.
    """

    name: str
    text: str
    wide: np.dtype | None


@functools.lru_cache(maxsize=512)
def _form_on_hosts(
    sums: SumsOfProcesses, op: ReduceOp, dtype: np.dtype, shape: tuple[int, ...]
) -> _FormOnHosts | None:
    is_mean, dtype = op is ReduceOp.MEAN, np.dtype(dtype)
    if not sums.can_add(dtype) or not (is_mean or op is ReduceOp.SUM):
        return None
    wide = None
    if is_mean and dtype.itemsize < 4:  # a mean fits even if the sum does not
        wide = np.dtype(np.int32 if jnp.issubdtype(dtype, jnp.integer) else np.float32)
    return _FormOnHosts(f"strategy.reduce({op.name})", f"{op.name} of {dtype.name}{list(shape)}", wide)


def _mean(total: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    if not is_inexact:
        total = total.astype(jnp.result_type(float))
    mean = total / total.dtype.type(count)
    return mean.astype(dtype) if is_inexact else mean


def _is_quick_on_host(topology: Topology, op: ReduceOp, value: PerReplica) -> bool:
    """Returns True for a few numbers that the CPU devices of this process have computed already."""
    array = value.stored
    return (
        topology.needs_token
        and topology.num_logical_devices == 1
        and array.size <= _MAX_ON_HOST
        and array.dtype.name in _ON_HOST.get(op, ())
        and array.sharding == (topology.replicated if value.is_equal else topology.per_replica)
        and array.is_ready()
    )


def _reduced_on_host(op: ReduceOp, value: PerReplica) -> np.ndarray | None:
    """Returns the bits that the program returns. It takes less time than a program, whose devices wait for each other.

    Returns None for numbers that XLA may round to zero. NumPy does not do so.
    """
    array, count = value.stored, value.num_replicas
    with np.errstate(all="ignore"):
        if value.is_equal:
            terms = np.asarray(array.addressable_data(0))
            total = terms if op is ReduceOp.MEAN else terms * terms.dtype.type(count)
        else:
            terms = np.concatenate([np.asarray(array.addressable_data(r)) for r in range(count)])
            total = functools.reduce(np.add, terms, np.zeros_like(terms[0]))
            if op is ReduceOp.MEAN:
                total = total * (1 / total.dtype.type(count))  # XLA divides so by a constant
    is_tiny = terms.dtype.kind == "f" and (_has_tiny(terms) or _has_tiny(total))
    return None if is_tiny else np.asarray(total)


def _has_tiny(numbers: np.ndarray) -> bool:
    # For one or two numbers NumPy takes three times as long.
    return any(-_TINY < number < _TINY and number for number in numbers.ravel().tolist())


def _launch(topology: Topology, compute: Computation, value: PerReplica) -> jax.Array:
    """Computes on the devices. If they must meet, it respects the limit of programs in flight."""
    result, token = compute(value.stored)
    if topology.needs_token and not value.is_equal:
        in_flight.add(token)
    return result


def _compiled_on(topology: Topology, compute: Callable[[jax.Array], jax.Array], name: str) -> Computation:
    """Returns a function that computes on the stored array and also returns a token that is ready after the program."""
    return topology.compile(
        lambda array: (compute(array), jnp.int8(0)), name, out_shardings=topology.replicated
    )


@functools.lru_cache(maxsize=512)
def _compiled(
    topology: Topology,
    op: ReduceOp,
    num_replicas: int,
    is_equal: bool,
    shapes: tuple[tuple[int, ...], ...] | None,
    axes: tuple[int, ...] | None,
):
    compute = functools.partial(_compute, op, num_replicas, is_equal, shapes, axes)
    return _compiled_on(topology, compute, f"strategy.reduce({op.name}, axis={axes})")


def _compute(
    op: ReduceOp,
    num_replicas: int,
    is_equal: bool,
    shapes: tuple[tuple[int, ...], ...] | None,
    axes: tuple[int, ...] | None,
    array: jax.Array,
) -> jax.Array:
    """Reduces the stored form of a PerReplica: [R, ...], or [...] if all components are equal."""
    if op is ReduceOp.MEAN and jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4:
        wide = _compute(op, num_replicas, is_equal, shapes, axes, array.astype(jnp.float32))
        return wide.astype(array.dtype)  # a mean in half precision fits even if the sum does not
    array = in_replica.reducible(array, op)
    if axes is None:
        if is_equal:
            return in_replica.from_sum(op, array * jnp.asarray(num_replicas, array.dtype), num_replicas)
        return in_replica.from_sum(op, _sum(array, (0,)), num_replicas)
    if shapes is not None:
        parts = [cut(array[r], shape) for r, shape in enumerate(shapes)]
        sums = [_sum(part, axes) for part in parts]
        if len({s.shape for s in sums}) > 1:
            raise ReductionError(
                f"The components have different shapes {list(shapes)} in other dims than axis {axes}: their sums "
                f"cannot be added."
            )
        return in_replica.from_sum(op, functools.reduce(jnp.add, sums), sum(_count(s, axes) for s in shapes))
    if is_equal:
        local = _sum(array, axes) * jnp.asarray(num_replicas, array.dtype)
        return in_replica.from_sum(op, local, num_replicas * _count(array.shape, axes))
    total = _sum(array, (0, *(a + 1 for a in axes)))
    return in_replica.from_sum(op, total, num_replicas * _count(array.shape[1:], axes))


def _reduce_through(
    ops: CrossDeviceOps, op: ReduceOp, value: PerReplica, axes: tuple[int, ...] | None
) -> Any:
    """Reduces through a user's cross-device operations, which get the components."""
    if axes is None:
        return ops.reduce(op, value)
    components = [in_replica.reducible(component, op) for component in Gathered.of(value).values]
    total = ops.reduce(ReduceOp.SUM, Gathered([_sum(component, axes) for component in components]))
    return in_replica.from_sum(op, total, sum(_count(component.shape, axes) for component in components))


def _checked(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    for axis in axes:
        if not -rank <= axis < rank:
            raise ReductionError(
                f"Invalid reduction dimension {axis}: each replica's value has {rank} dim(s). Use axis=None to "
                f"reduce over replicas only."
            )
    return tuple(axis % rank for axis in axes)


def _count(shape: Sequence[int], axes: tuple[int, ...]) -> int:
    count = 1
    for axis in axes:
        count *= shape[axis]
    return count


def gather(topology: Topology, value: Any, axis: int) -> Any:
    """``Strategy.gather`` over a pytree."""
    _check_not_none(value, "gather")

    def gather_leaf(leaf: Any) -> Any:
        if isinstance(leaf, IndexedSlices):
            raise UnsupportedError("gather does not support IndexedSlices: gather .values and .indices.")
        if isinstance(leaf, LocalPerReplica):
            return in_replica.concatenate(leaf.communicator.components(leaf.local), axis)
        if isinstance(leaf, PerReplica):
            return _gather_per_replica(topology, leaf, axis)
        return leaf.as_array() if isinstance(leaf, Mirrored) else leaf

    return jax.tree_util.tree_map(gather_leaf, value, is_leaf=_is_leaf)


def _gather_per_replica(topology: Topology, value: PerReplica, axis: int) -> jax.Array:
    shapes = tuple(value.component_shape(r) for r in range(value.num_replicas))
    if isinstance(value.stored, jax_compat.Tracer):
        return _join(shapes, value.is_equal, axis, value.stored)
    if topology.host_sums is not None and not value.is_equal:
        gathered = _gathered_on_hosts(topology, topology.host_sums, shapes, axis, value.stored)
        if gathered is not None:
            return gathered
    return _launch(topology, _compiled_join(topology, shapes, value.is_equal, axis), value)


def _gathered_on_hosts(
    topology: Topology,
    sums: SumsOfProcesses,
    shapes: tuple[tuple[int, ...], ...],
    axis: int,
    stored: jax.Array,
) -> jax.Array | None:
    """Concatenates small components of several processes without a program: the sum of the bytes of all, of which each
    replica fills its own row. Returns None for larger ones.
    """
    dtype = stored.dtype
    if not isinstance(dtype, np.dtype) or stored.size * dtype.itemsize > _MOST_GATHERED_BYTES:
        return None
    text = _text_of_gather(shapes, axis, stored.shape, dtype)
    parts = topology.rows_here(stored)
    rows = [np.zeros((len(shapes), part.nbytes), np.uint8) for part in parts]
    for replica, row, part in zip(topology.local_replicas, rows, parts, strict=True):
        row[replica] = np.frombuffer(part.tobytes(), np.uint8)
    with sums.program("strategy.gather", text):
        total = sums.all_reduce("sum", rows)
    components = [
        cut(row.view(dtype).reshape(stored.shape[1:]), shape)
        for row, shape in zip(total, shapes, strict=True)
    ]
    return topology.put_same(np.concatenate(components, axis))


@functools.lru_cache(maxsize=512)
def _text_of_gather(
    shapes: tuple[tuple[int, ...], ...], axis: int, stored: tuple[int, ...], dtype: np.dtype
) -> str:
    """Returns what all processes do alike.

    Raises:
      ReductionError: The components cannot be concatenated.
    """
    jax.eval_shape(functools.partial(_join, shapes, False, axis), jax.ShapeDtypeStruct(stored, dtype))
    return f"{dtype.name} of {shapes} along {axis}"


@functools.lru_cache(maxsize=512)
def _compiled_join(topology: Topology, shapes: tuple[tuple[int, ...], ...], is_equal: bool, axis: int):
    return _compiled_on(topology, functools.partial(_join, shapes, is_equal, axis), "strategy.gather")


def _join(shapes: Sequence[tuple[int, ...]], is_equal: bool, axis: int, array: jax.Array) -> jax.Array:
    """Concatenates the components in the stored form of a PerReplica."""
    return in_replica.concatenate(
        [cut(array if is_equal else array[r], shape) for r, shape in enumerate(shapes)], axis
    )


def local_results(topology: Topology, value: Any) -> tuple[Any, ...]:
    """``Strategy.experimental_local_results``."""
    # Survivors have the values of all replicas.
    count = len(topology.local_replicas) if topology.survivors is None else topology.num_replicas
    if topology.num_replicas == 1:
        return value.values if isinstance(value, DistributedValues) else (value,)
    if is_value(value):
        return _components_of(value, count)
    if not isinstance(value, (tuple, list, dict, IndexedSlices)):
        return (value,)
    leaves, tree = jax.tree_util.tree_flatten(value, is_leaf=is_value)
    per_leaf = [_components_of(leaf, count) for leaf in leaves]
    count = min(map(len, per_leaf), default=count)  # an eager run has one component
    return tuple(jax.tree_util.tree_unflatten(tree, [values[r] for values in per_leaf]) for r in range(count))


def _components_of(leaf: Any, count: int) -> tuple[Any, ...]:
    """Returns a leaf's value for each local replica: components, copies of a variable, or the same value."""
    values = getattr(leaf, "values", None)  # also for an rx.Variable
    if values is not None:
        return values
    if is_variable(leaf):  # of Keras
        held = leaf.value
        shards = [] if isinstance(held, jax_compat.Tracer) else held.addressable_shards
        if len(shards) == count:
            return tuple(jnp.copy(s.data) for s in sorted(shards, key=lambda s: s.replica_id))
        return (held,) * count
    return (leaf,) * count
