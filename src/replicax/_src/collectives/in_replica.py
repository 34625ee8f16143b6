"""Collectives on a replica's own arrays, as JAX primitives over the replica axis.

Code uses the ``Communicator`` interface: ``TracedCommunicator`` runs in programs, ``OneReplica`` for a single
replica.
"""

from __future__ import annotations

import abc
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.devices.topology import REPLICA_AXIS, Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.capture import Capture
from replicax._src.values.distributed import cut, largest_shape, pad
from replicax._src.vocabulary.errors import ReductionError, UnsupportedError
from replicax._src.vocabulary.options import CommunicationOptions, ReduceOp

# On CPUs each array of an all-reduce costs 10 to 20 µs in one process, and 100 µs to 3 ms between processes, whatever
# its size. Larger arrays are reduced on their own: joining or splitting them costs more in copies than it saves.
_ALONE_BYTES, _SHARED_ALONE_BYTES = 256 * 1024, 2 * 1024 * 1024
_DEFAULT_PACK_BYTES = 4 * 1024 * 1024
MANY_ARRAYS = 16
"""With more arrays than this, the compiler must not know where each begins in a buffer; see ``_hidden_starts``."""


class IndexedSlices:
    """Rows of a larger array: ``values[i]`` belongs to row ``indices[i]``, and repeated rows add up.

    Args:
      values: [n, ...].
      indices: [n] int.
      dense_shape: The shape of the larger array, or None.
    """

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None):
        self.values = values
        self.indices = indices
        self.dense_shape = None if dense_shape is None else tuple(int(d) for d in dense_shape)

    def to_dense(self) -> jax.Array:
        """Returns the larger array, which is zero elsewhere.

        Raises:
          ReductionError: ``dense_shape`` is not known.
        """
        if self.dense_shape is None:
            raise ReductionError("IndexedSlices.to_dense needs dense_shape, which was not given.")
        values = jnp.asarray(self.values)
        return jnp.zeros(self.dense_shape, values.dtype).at[jnp.asarray(self.indices)].add(values)

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self.values}, indices={self.indices}, dense_shape={self.dense_shape})"


jax.tree_util.register_pytree_node(
    IndexedSlices,
    lambda s: ((s.values, s.indices), s.dense_shape),
    lambda shape, children: IndexedSlices(*children, shape),
)


class Communicator(abc.ABC):
    """Collectives of a replica: the operations on its own arrays that need the other replicas."""

    @property
    @abc.abstractmethod
    def num_replicas(self) -> int:
        """The number of replicas R."""

    @abc.abstractmethod
    def replica_id(self) -> Any:
        """Returns this replica's index, a scalar int32."""

    @abc.abstractmethod
    def sum(self, values: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        """Returns the sums over replicas of arrays of equal shapes."""

    @abc.abstractmethod
    def components(self, value: Any) -> list[Any]:
        """Returns every replica's array, in replica order; their shapes may differ."""


@dataclass(frozen=True)
class Packing:
    """The choice of arrays that are packed into a common buffer.

    Attributes:
      bytes_per_pack: The most bytes of a buffer.
      alone_bytes: The size from which arrays are sent unpacked; None to do so only for those that do not fit.
      hides_starts: True to hide from the compiler where each array begins in a buffer.
    """

    bytes_per_pack: int
    alone_bytes: int | None = None
    hides_starts: bool = False

    @classmethod
    def on(cls, topology: Topology, options: CommunicationOptions | None = None) -> Packing | None:
        """Returns the packing of the options, the strategy's, or the devices' default. None leaves it to XLA."""
        if topology.num_logical_devices > 1:
            return None  # sharded arrays would have to be gathered first
        if topology.survivors is not None:
            return None  # they pack all sums of a round
        bytes_per_pack = (options.bytes_per_pack if options else 0) or topology.bytes_per_pack
        if bytes_per_pack:
            return cls(bytes_per_pack, hides_starts=topology.is_cpu)
        if not topology.is_cpu:
            return None
        alone_bytes = _ALONE_BYTES if topology.peers is None else _SHARED_ALONE_BYTES
        return cls(_DEFAULT_PACK_BYTES, alone_bytes, hides_starts=True)

    def packs(self, values: Sequence[jax.Array]) -> list[list[int]]:
        """Returns the indices of the values in each buffer. All values in a buffer have one dtype."""
        packs: list[list[int]] = []
        open_packs: dict[Any, tuple[list[int], int]] = {}
        for i, value in enumerate(values):
            size = value.size * value.dtype.itemsize
            if self.alone_bytes is not None and size >= self.alone_bytes:
                packs.append([i])
                continue
            members, total = open_packs.get(value.dtype, ([], 0))
            if not members or total + size > self.bytes_per_pack:
                members, total = [], 0
                packs.append(members)
            members.append(i)
            open_packs[value.dtype] = (members, total + size)
        return packs


@final
class TracedCommunicator(Communicator):
    """Collectives as JAX primitives, in a replica function that is being traced."""

    def __init__(self, capture: Capture, topology: Topology):
        assert capture.num_replicas is not None
        self._capture = capture
        self._topology = topology
        # XLA's partitioner fails for collectives over an axis of size 1 if their operands are sharded (jax 0.10).
        self._is_alone = topology.num_replicas == 1 and topology.num_logical_devices > 1

    @property
    def num_replicas(self) -> int:
        return self._capture.num_replicas or 1

    def replica_id(self) -> Any:
        return jax.lax.axis_index(REPLICA_AXIS)

    def sum(self, values: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        if self._is_alone:
            return [jnp.asarray(value) for value in values]
        return packed_sum(values, Packing.on(self._topology, options))

    def components(self, value: Any) -> list[Any]:
        value = jnp.asarray(value)
        if self._is_alone:
            return [value]
        shapes = self._capture.shapes_of_all_replicas(tuple(value.shape))
        if len({len(shape) for shape in shapes}) > 1:
            raise ReductionError(f"Replicas hold arrays of different ranks: shapes {shapes}.")
        largest = largest_shape(shapes)
        stacked = jax.lax.all_gather(pad(value, largest), REPLICA_AXIS, axis=0)
        return [cut(stacked[r], shape) for r, shape in enumerate(shapes)]


@final
class OneReplica(Communicator):
    """A single replica."""

    @property
    def num_replicas(self) -> int:
        return 1

    def replica_id(self) -> Any:
        return jnp.int32(0)

    def sum(self, values: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        del options
        return list(values)

    def components(self, value: Any) -> list[Any]:
        return [value]


def packed_sum(values: Sequence[Any], packing: Packing | None) -> list[Any]:
    """Sums arrays over the replica axis."""
    values = [jnp.asarray(v) for v in values]
    if not values:
        return []
    if packing is None or len(values) == 1:
        return list(jax.lax.psum(tuple(values), REPLICA_AXIS))
    hides_starts = packing.hides_starts and len(values) > MANY_ARRAYS
    results: list[Any] = list(values)
    for indices in packing.packs(values):
        members = [values[i] for i in indices]
        for i, total in zip(indices, _sum_pack(members, hides_starts=hides_starts), strict=True):
            results[i] = total
    return results


def _sum_pack(members: Sequence[Any], *, hides_starts: bool) -> list[Any]:
    if len(members) == 1:
        return [jax.lax.psum(members[0], REPLICA_AXIS)]
    total = jax.lax.psum(joined(members), REPLICA_AXIS)
    return separated(total, [m.shape for m in members], hides_starts=hides_starts)


def joined(members: Sequence[Any]) -> Any:
    """Returns the entries of arrays of one dtype in one buffer."""
    flat = [member.reshape(-1) for member in members]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def separated(buffer: Any, shapes: Sequence[tuple[int, ...]], *, hides_starts: bool) -> list[Any]:
    """Returns the arrays of a buffer from ``joined``.

    Args:
      hides_starts: See ``Packing``.
    """
    sizes = [math.prod(shape) for shape in shapes]
    starts = [0, *itertools.accumulate(sizes[:-1])]
    if hides_starts and buffer.size:
        hidden = _hidden_starts(starts, buffer)
        pieces = list(map(functools.partial(jax.lax.dynamic_slice_in_dim, buffer), hidden, sizes))
    else:
        pieces = [
            jax.lax.slice(buffer, (start,), (start + size,))
            for start, size in zip(starts, sizes, strict=True)
        ]
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _hidden_starts(starts: Sequence[int], total: Any) -> list[Any]:
    """Returns the same numbers as values that XLA cannot fold into its kernels.

    An update that reads one array of the buffer is one kernel. With the start as a constant no two arrays can share a
    kernel, even if their shapes are equal: a transformer of 24 layers compiled 1,012 kernels instead of 254, which cost
    up to 1.8 times the processor time. The results of a conditional are operands of a kernel. The conditional has three
    branches because XLA turns one of two into a selection and folds it. An ``optimization_barrier`` does not help: XLA
    for CPUs removes it before it makes kernels (jaxlib 0.10).
    """

    def known() -> list[Any]:
        return [jnp.uint32(start) for start in starts]

    def never() -> list[Any]:
        return [jnp.uint32(0) for _ in starts]

    first = jax.lax.index_in_dim(total, 0, keepdims=False)
    return jax.lax.switch((first != 0).astype(jnp.int32), [known, known, never])


def _is_slices(value: Any) -> bool:
    return isinstance(value, IndexedSlices)


def all_reduce(
    communicator: Communicator, op: ReduceOp, value: Any, options: CommunicationOptions | None = None
) -> Any:
    """Combines a pytree of per-replica arrays into one that every replica gets."""
    with jax.named_scope("all_reduce"):
        return _all_reduce(communicator, op, value, options)


def _all_reduce(
    communicator: Communicator, op: ReduceOp, value: Any, options: CommunicationOptions | None
) -> Any:
    leaves, tree = jax.tree_util.tree_flatten(value, is_leaf=_is_slices)
    results = list(leaves)
    dense = [i for i, leaf in enumerate(leaves) if not _is_slices(leaf)]
    arrays = [reducible(leaves[i], op) for i in dense]
    for i, total in zip(dense, communicator.sum(arrays, options), strict=True):
        results[i] = from_sum(op, total, communicator.num_replicas)
    for i, leaf in enumerate(leaves):
        if _is_slices(leaf):
            results[i] = _reduce_slices(communicator, op, leaf)
    return jax.tree_util.tree_unflatten(tree, results)


def _reduce_slices(communicator: Communicator, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
    values = jnp.concatenate(communicator.components(slices.values))  # repeated rows add up
    indices = jnp.concatenate(communicator.components(slices.indices))
    return IndexedSlices(from_sum(op, values, communicator.num_replicas), indices, slices.dense_shape)


def reducible(value: Any, op: ReduceOp = ReduceOp.SUM) -> Any:
    """Returns ``value`` as an array that can be summed; for a mean, in a dtype in which sums of small integers fit.

    Raises:
      ReductionError: It is not numeric, or it is bool.
    """
    try:
        array = jnp.asarray(value)
    except TypeError:
        array = None
    if array is None or not jnp.issubdtype(array.dtype, jnp.number):
        kind = type(value).__name__ if array is None else f"an array of {array.dtype}"
        raise ReductionError(
            f"Cannot reduce {kind}: sums and means need numbers. Convert it first, for example "
            f"value.astype(jnp.int32)."
        )
    is_small = jnp.issubdtype(array.dtype, jnp.integer) and array.dtype.itemsize < 4
    return array.astype(jnp.int32) if op is ReduceOp.MEAN and is_small else array


def from_sum(op: ReduceOp, total: Any, count: Any) -> Any:
    """Returns the result of a reduction, given the sum of the values and their number.

    Raises:
      ReductionError: A sum does not tell the result of this operation.
    """
    if op is ReduceOp.SUM:
        return total
    if op is ReduceOp.MEAN:
        return mean_of_sum(total, count)
    raise ReductionError(
        f"Cannot reduce by {op!r}: here values are added, which gives ReduceOp.SUM and ReduceOp.MEAN. Use one of these."
    )


def mean_of_sum(total: Any, count: Any) -> Any:
    """Divides a sum by a count. Integers become the default floating type."""
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        total = total.astype(jnp.result_type(float))
    if total.dtype.itemsize < 4:  # half precision cannot represent 257 (bfloat16) or 65536 (float16)
        return (total.astype(jnp.float32) / count).astype(total.dtype)
    return total / jnp.asarray(count, total.dtype)


def all_gather(communicator: Communicator, value: Any, axis: int) -> Any:
    """Concatenates a pytree of per-replica arrays along ``axis``, in replica order, on every replica."""

    def gather(leaf: Any) -> Any:
        if _is_slices(leaf):
            raise UnsupportedError("all_gather does not support IndexedSlices; gather .values and .indices.")
        return concatenate(_components(communicator, leaf), axis)

    with jax.named_scope("all_gather"):
        return jax.tree_util.tree_map(gather, value, is_leaf=_is_slices)


def _components(communicator: Communicator, value: Any) -> list[Any]:
    if not jax_compat.is_typed_key(getattr(value, "dtype", None)):
        return communicator.components(value)
    # jax.lax.all_gather of typed keys does not lower (jax 0.10).
    words, kind = communicator.components(jax.random.key_data(value)), jax.random.key_impl(value)
    return [jax.random.wrap_key_data(each, impl=kind) for each in words]


def concatenate(components: Sequence[Any], axis: Any) -> Any:
    """Joins the replicas' arrays along ``axis``.

    Raises:
      ReductionError: The values are scalars, the axis is invalid, or other dims differ.
    """
    rank = components[0].ndim
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ReductionError(f"The axis of gather must be an int, got {axis!r}.")
    if rank == 0:
        raise ReductionError("Cannot gather scalars: give each at least one dim, e.g. value[None].")
    if not -rank <= axis < rank:
        raise ReductionError(f"The axis of gather is {axis}, but the values have {rank} dim(s).")
    axis %= rank
    for dim in range(rank):
        sizes = [c.shape[dim] for c in components]
        if dim != axis and len(set(sizes)) > 1:
            raise ReductionError(
                f"Dimension {dim} in both shapes must be equal: replicas have sizes {sizes} there, and only "
                f"the gathered axis {axis} may differ."
            )
    return jnp.concatenate(components, axis=axis)


@final
class ReplicaSums:
    """Sums over the replicas of a topology, inside of a ``shard_map`` over them.

    Attributes:
      index: This replica's index.
    """

    def __init__(self, topology: Topology):
        self._packing = Packing.on(topology)
        self.index = jax.lax.axis_index(REPLICA_AXIS)

    def sum(self, values: Sequence[Any]) -> list[Any]:
        """Returns the sums of arrays over replicas."""
        return packed_sum(values, self._packing)

    def first(self, values: Sequence[Any]) -> list[Any]:
        """Returns the first replica's arrays, on every replica."""
        return first_of(self.index == 0, values, self.sum)


def first_replicas(communicator: Communicator, values: Sequence[Any]) -> list[Any]:
    """Returns the first replica's arrays, on every replica."""
    return first_of(communicator.replica_id() == 0, values, communicator.sum)


def first_of(
    is_first: Any, values: Sequence[Any], add: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Returns the first replica's arrays, where ``add`` sums arrays over replicas."""
    masked = []
    for value in values:
        value = jnp.asarray(value)
        as_number = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
        masked.append(jnp.where(is_first, as_number, jnp.zeros_like(as_number)))
    return [total.astype(jnp.asarray(value).dtype) for total, value in zip(add(masked), values, strict=True)]
