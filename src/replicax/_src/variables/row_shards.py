"""Tables that are sharded over replicas: lookups and sums of rows, in programs of replicas and in the global view."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from replicax._src.collectives.row_exchange import ReplicaGroups, RowExchange
from replicax._src.devices.sharding_specs import dim_of, without
from replicax._src.devices.topology import GROUP_AXIS, REPLICA_AXIS, SHARD_AXIS, Topology
from replicax._src.jax_internals import jax_compat

_EACH_REPLICA = PartitionSpec((GROUP_AXIS, SHARD_AXIS))
Specs = PartitionSpec | tuple[PartitionSpec, ...]


class RowShards(abc.ABC):
    """The shards of one table.

    Args:
      shape: The shape [rows, ...] of the full table.
      layout: The sharding of the full table, over the mesh of groups and shards.
      topology: The devices of the strategy.

    Attributes:
      dim: The dim that is sharded over the replicas.
      shard_shape: The shape of the shard of a device.
    """

    def __init__(self, shape: Sequence[int], layout: NamedSharding, topology: Topology):
        self.shape, self.layout, self.topology = tuple(shape), layout, topology
        dim = dim_of(layout.spec, SHARD_AXIS)
        assert dim is not None
        self.dim = dim
        self.shard_shape = layout.shard_shape(self.shape)

    @abc.abstractmethod
    def look_up(self, shards: jax.Array, numbers: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns rows [n, ...] in ``dtype`` for numbers [n] int32; zeros for -1."""

    @abc.abstractmethod
    def add(self, numbers: jax.Array, rows: jax.Array) -> jax.Array:
        """Returns the shards of a table of zeros to which rows [n, ...] of all replicas are added."""

    @abc.abstractmethod
    def gather(self, shards: jax.Array) -> jax.Array:
        """Returns the full array."""

    @property
    def has_rows(self) -> bool:
        """True if each device has full rows, or the same columns of all rows, as the replicas exchange them."""
        return all(axis in (None, SHARD_AXIS) for axis in self.layout.spec[:1])

    @property
    def _num_groups(self) -> int:
        return self.layout.mesh.shape[GROUP_AXIS]

    @property
    def _num_shards(self) -> int:
        return self.layout.mesh.shape[SHARD_AXIS]

    def _on_shards(
        self, function: Callable[..., jax.Array], in_specs: Specs, out_specs: Specs
    ) -> Callable[..., jax.Array]:
        """Returns ``jax.shard_map`` of a function over the mesh of groups and shards."""
        return jax_compat.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.layout.mesh.axis_names),
            check_vma=False,
        )


@final
class RowsOfReplica(RowShards):
    """A table in a program of one replica, which has its shard."""

    def look_up(self, shards: jax.Array, numbers: jax.Array, dtype: DTypeLike) -> jax.Array:
        return self._exchange().look_up(shards, numbers, dtype)

    def add(self, numbers: jax.Array, rows: jax.Array) -> jax.Array:
        return self._exchange().add(self.shard_shape, numbers, rows)

    def gather(self, shards: jax.Array) -> jax.Array:
        return self._group.gather(shards, self.dim)

    def joined(self, rows: jax.Array) -> jax.Array:
        """Returns the sharded array of the full shape for [R, ...], the shards of the replicas. No data moves. Call it
        outside of ``shard_map``.
        """
        return self._on_shards(lambda shards: shards[0], _EACH_REPLICA, self.layout.spec)(rows)

    def _exchange(self) -> RowExchange:
        index = jax.lax.axis_index(REPLICA_AXIS) % self._num_shards
        across = None
        if self._num_groups > 1:
            numbers = range(self.topology.num_replicas)
            across = ReplicaGroups(
                REPLICA_AXIS, [list(numbers[i :: self._num_shards]) for i in range(self._num_shards)]
            )
        return RowExchange(self.dim, self.shape[0], index, self._group, across)

    @property
    def _group(self) -> ReplicaGroups:
        if self._num_groups == 1:
            return ReplicaGroups(REPLICA_AXIS)
        numbers, count = range(self.topology.num_replicas), self._num_shards
        return ReplicaGroups(REPLICA_AXIS, [list(numbers[i : i + count]) for i in numbers[::count]])


@final
class RowsInGlobalView(RowShards):
    """A table in a program of the global view, which has an array of the full shape. Numbers and rows are those of the
    global batch. They are padded to a multiple of the number of replicas.
    """

    def look_up(self, shards: jax.Array, numbers: jax.Array, dtype: DTypeLike) -> jax.Array:
        count = numbers.shape[0]
        numbers = self._padded(numbers, -1)
        of_group = len(numbers) // self._num_groups

        def taken(shard: jax.Array, numbers: jax.Array) -> jax.Array:
            start = jax.lax.axis_index(GROUP_AXIS) * of_group
            mine = jax.lax.dynamic_slice_in_dim(numbers, start, of_group)
            return self._exchange().take(shard, mine, dtype)

        specs = self.layout.spec, PartitionSpec()
        return self._on_shards(taken, specs, self._of_rows)(shards, numbers)[:count]

    def add(self, numbers: jax.Array, rows: jax.Array) -> jax.Array:
        def added(numbers: jax.Array, rows: jax.Array) -> jax.Array:
            return self._exchange().add(self.shard_shape, numbers, rows)

        add = self._on_shards(added, (_EACH_REPLICA, self._of_rows), self.layout.spec)
        return add(self._padded(numbers, -1), self._padded(rows, 0))

    def gather(self, shards: jax.Array) -> jax.Array:
        spec = without(self.layout.spec, SHARD_AXIS)
        return jax.lax.with_sharding_constraint(shards, NamedSharding(self.topology.mesh, spec))

    @property
    def _of_rows(self) -> PartitionSpec:
        """The spec of rows [n, ...]: over all replicas, and over the logical devices as in the table."""
        return PartitionSpec((GROUP_AXIS, SHARD_AXIS), *without(self.layout.spec, SHARD_AXIS)[1:])

    def _exchange(self) -> RowExchange:
        across = ReplicaGroups(GROUP_AXIS) if self._num_groups > 1 else None
        index = jax.lax.axis_index(SHARD_AXIS)
        return RowExchange(self.dim, self.shape[0], index, ReplicaGroups(SHARD_AXIS), across)

    def _padded(self, value: jax.Array, fill: int) -> jax.Array:
        missing = -value.shape[0] % self.topology.num_replicas
        return jnp.pad(value, [(0, missing), *[(0, 0)] * (value.ndim - 1)], constant_values=fill)
