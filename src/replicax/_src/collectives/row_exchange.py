"""Lookups in a table that is sharded over replicas: ids and rows move, never the table.

The functions of ``RowExchange`` run on one replica, inside ``shard_map``. A number is the position of a row in the
table, or -1 for no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ReplicaGroups:
    """The replicas of one collective.

    Attributes:
      axis: The axis, or axes, of the mesh.
      groups: The numbers of the replicas that meet; None if all of the axis do.
    """

    axis: Any
    groups: Sequence[Sequence[int]] | None = None

    def gather(self, value: Any, dim: int = 0) -> Any:
        """Concatenates the replicas' arrays along ``dim``."""
        return jax.lax.all_gather(value, self.axis, axis=dim, tiled=True, axis_index_groups=self.groups)

    def scatter(self, value: Any) -> Any:
        """Sums the replicas' arrays. Each replica gets its part of the first dim."""
        return jax.lax.psum_scatter(
            value, self.axis, scatter_dimension=0, tiled=True, axis_index_groups=self.groups
        )

    def swap(self, value: Any, split: int, join: int) -> Any:
        """Sends part r along ``split`` to replica r, and concatenates the received parts along ``join``."""
        return jax.lax.all_to_all(value, self.axis, split, join, tiled=True, axis_index_groups=self.groups)


@final
@dataclass(frozen=True)
class RowExchange:
    """The exchange of rows between the S replicas of a group that share one table [rows, ...].

    With n ids on each replica, a table that is cut along its rows costs a reduce-scatter of [S·n, ...] in a lookup and
    an all-gather of [R·n, ...] in its gradient, whatever the ids are. A table that is cut along another dim costs an
    all-to-all of [n, ...] in each.

    Attributes:
      dim: The sharded dim of the table.
      num_rows: The number of rows of the table.
      index: This replica's number in its group.
      group: The replicas that share the table.
      across: The replicas with the same shard in all groups; None if there is one group.
    """

    dim: int
    num_rows: int
    index: Any
    group: ReplicaGroups
    across: ReplicaGroups | None

    def look_up(self, shard: Any, numbers: Any, dtype: Any) -> Any:
        """Returns rows [n, ...] in ``dtype``; zeros for -1.

        Args:
          shard: This replica's shard of the table.
          numbers: [n] int32, with the same n on all replicas.
        """
        return self.take(shard, self.group.gather(numbers), dtype)

    def take(self, shard: Any, numbers: Any, dtype: Any) -> Any:
        """Returns this replica's rows [n, ...] for the numbers [S·n] of its group."""
        rows = shard.at[self._local(shard, numbers)].get(mode="fill", fill_value=0).astype(dtype)
        return self.group.scatter(rows) if self.dim == 0 else self.group.swap(rows, 0, self.dim)

    def add(self, shape: Sequence[int], numbers: Any, updates: Any) -> Any:
        """Returns this replica's shard of a table of zeros to which all replicas add their rows.

        Args:
          shape: The shape of a shard.
          numbers: [n] int32.
          updates: [n, ...].
        """
        numbers = self._everywhere(self.group.gather(numbers))
        of_group = self.group.gather(updates) if self.dim == 0 else self.group.swap(updates, self.dim, 0)
        shard = jnp.zeros(shape, updates.dtype)
        return shard.at[self._local(shard, numbers)].add(self._everywhere(of_group), mode="drop")

    def _everywhere(self, value: Any) -> Any:
        return value if self.across is None else self.across.gather(value)

    def _local(self, shard: Any, numbers: Any) -> Any:
        """Returns the positions in this replica's shard; positions out of range for the rows of others."""
        num_here = shard.shape[0]
        local = numbers - self.index * num_here if self.dim == 0 else numbers
        is_here = (numbers >= 0) & (local >= 0) & (local < num_here)
        return jnp.where(is_here, local, num_here)
