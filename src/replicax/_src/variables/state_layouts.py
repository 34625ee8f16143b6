"""The shardings of sharded variables over the replicas' devices, by the rule of ``state_shards``."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from replicax._src import jax_compat
from replicax._src.devices.topology import REPLICA_AXIS, Topology
from replicax._src.tracing.gathers import Sharded, is_large, sharded_read_p
from replicax._src.variables.row_shards import RowsInGlobalView, RowsOfReplica
from replicax._src.variables.state_shards import StateShards

# TPUs lay arrays out in tiles of 8 rows, and would pad thinner shards.
_LEAST_ROWS_ON_TPU = 8

# The ids of variables that optimizers keep. An entry is removed with its variable.
_of_optimizers: set[int] = set()


def note_of_optimizer(variable: Any) -> None:
    """Remembers that an optimizer keeps a variable."""
    _of_optimizers.add(id(variable))
    weakref.finalize(variable, _of_optimizers.discard, id(variable))


def is_of_optimizer(variable: Any) -> bool:
    """Returns True if an optimizer keeps a variable."""
    return id(variable) in _of_optimizers


@final
class StateLayouts:
    """The layouts of one strategy's variables.

    Attributes:
      shards: The kinds of sharded variables, and the number of shards.
      topology: The devices of the strategy.
    """

    def __init__(self, shards: StateShards, topology: Topology):
        self.shards, self.topology = shards, topology
        self._least_rows = _LEAST_ROWS_ON_TPU if topology.devices[0].platform == "tpu" else 1
        self._of_shapes: dict[tuple[int, ...], NamedSharding | None] = {}

    def of(self, variable: Any) -> NamedSharding | None:
        """Returns the sharding of a variable; None if it is replicated."""
        is_trainable = bool(variable.trainable)
        if not self.shards.divides(is_trainable=is_trainable, is_of_optimizer=is_of_optimizer(variable)):
            return None
        return self.of_shape(variable.shape)

    def of_shape(self, shape: Sequence[int]) -> NamedSharding | None:
        """Returns the sharding of an array, such as a gradient; None if it stays replicated."""
        shape = tuple(shape)
        if shape not in self._of_shapes:
            dim = self.shards.dim_of(shape, least_rows=self._least_rows)
            count = self.shards.num_shards
            self._of_shapes[shape] = None if dim is None else self.topology.in_shards(dim, count)
        return self._of_shapes[shape]

    def whole(self, value: jax.Array) -> jax.Array:
        """Replicates a sharded array. All processes must call it, in the same order relative to programs."""
        return self._gathering(value)

    @functools.cached_property
    def _gathering(self) -> Any:
        return self.topology.compile(
            lambda value: value, "reading a divided variable", out_shardings=self.topology.replicated
        )

    def gathered(self, value: Any) -> Any:
        """Gathers a traced sharded array. A large one gets a mark instead: programs in the global view gather it again
        where it is needed.
        """
        layout = self.of_shape(value.shape)
        if layout is None:
            return value
        whole = self.topology.replicated
        size = math.prod(value.shape) * value.dtype.itemsize
        if not is_large(size) or not isinstance(value, jax_compat.Tracer):
            return jax.lax.with_sharding_constraint(value, whole)
        rows = RowsInGlobalView(value.shape, layout, self.topology)
        return sharded_read_p.bind(value, dim=_cut_dim(layout), whole=whole, rows=rows)

    def is_gathered_late(self, shape: Sequence[int], dtype: Any, layout: Any) -> bool:
        """Returns True if a variable with this layout is gathered where a replica needs it, not at the start of a
        program.
        """
        size = math.prod(shape) * dtype.itemsize
        return layout is not None and layout == self.of_shape(shape) and is_large(size)

    def rows_of(self, shape: Sequence[int], dtype: Any, layout: Any) -> RowsOfReplica | None:
        """Returns the rows of a variable with this layout, for lookups in replica programs; None if it has none."""
        is_number = jnp.issubdtype(dtype, jnp.number)
        if layout is None or layout != self.of_shape(shape) or not is_number:
            return None
        return RowsOfReplica(shape, layout, self.topology)

    def in_rows(self, value: Any) -> Any:
        """Returns a traced sharded array as [R, ...], whose row r is the shard of replica r. No data moves."""
        dim, count, groups = _cut_dim(self.of_shape(value.shape)), self.shards.num_shards, self._num_groups
        parts = value.reshape(*value.shape[:dim], count, value.shape[dim] // count, *value.shape[dim + 1 :])
        rows = jnp.moveaxis(parts, dim, 0)
        rows = jnp.broadcast_to(rows, (groups, *rows.shape)).reshape(groups * count, *rows.shape[1:])
        return jax.lax.with_sharding_constraint(rows, self.topology.per_replica)

    def of_row(self, shard: Any, shape: Sequence[int]) -> Sharded:
        """Returns the ``Sharded`` variable for this replica's shard, in a replica program."""
        groups = None
        if self._num_groups > 1:
            numbers = range(self.topology.num_replicas)
            groups = [
                list(numbers[i : i + self.shards.num_shards]) for i in numbers[:: self.shards.num_shards]
            ]

        def gather(shard: Any, dim: int) -> Any:
            return jax.lax.all_gather(shard, REPLICA_AXIS, axis=dim, tiled=True, axis_index_groups=groups)

        size = math.prod(shape) * shard.dtype.itemsize
        return Sharded(shard, _cut_dim(self.of_shape(shape)), size, gather)

    @property
    def _num_groups(self) -> int:
        return self.topology.num_replicas // self.shards.num_shards

    def sharded(self, value: Any) -> Any:
        """Returns a traced array with the sharding of a sharded variable of its shape."""
        layout = self.of_shape(value.shape)
        return value if layout is None else jax.lax.with_sharding_constraint(value, layout)


def _cut_dim(layout: Any) -> int:
    return next(dim for dim, axis in enumerate(layout.spec) if axis is not None)
