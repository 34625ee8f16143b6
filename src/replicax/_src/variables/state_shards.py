"""Which variables are divided over replicas instead of mirrored, and along which dim. Pure: no jax.

Replicas are in groups of ``shard_size``, adjacent ones. Each group has all of the state, each replica in it one shard
of every divided array: shards are equal, so an array without a dim that can be cut into as many equal ones stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replicax._src.errors import InvalidArgumentError
from replicax._src.options import ShardState, whole_number

# With more shards the shards get so thin that TPUs gather them by an all-reduce, at twice the traffic.
MOST_SHARDS = 256
"""Into how many shards state is divided, unless a user says so."""


@dataclass(frozen=True)
class StateShards:
    """How the state is divided over R replicas.

    Attributes:
      state: What is divided: the optimizer's variables, or the trainable ones too.
      num_shards: S: into how many shards, one for each replica of a group.
    """

    state: ShardState
    num_shards: int

    @classmethod
    def of(cls, shard_state: Any, shard_size: Any, num_replicas: int) -> StateShards | None:
        """What a user asks for; None where nothing is divided.

        Args:
          shard_state: A ``ShardState``, its name, or None.
          shard_size: A divisor of R, or None: the largest one up to 256.

        Raises:
          InvalidArgumentError: Neither is one of these, or a size is given and nothing to divide.
        """
        if shard_state is None:
            if shard_size is not None:
                raise InvalidArgumentError(
                    f"shard_size={shard_size!r} says over how many replicas the state is divided, and nothing is divided: give "
                    "shard_state='optimizer' or 'all' too, or leave shard_size out."
                )
            return None
        state = ShardState.parse(shard_state)
        if shard_size is None:
            return cls(state, next(n for n in range(MOST_SHARDS, 0, -1) if num_replicas % n == 0))
        size = whole_number("shard_size", shard_size, least=1)
        if num_replicas % size:
            allowed = ", ".join(str(n) for n in range(1, num_replicas + 1) if num_replicas % n == 0)
            raise InvalidArgumentError(
                f"shard_size={size} does not divide the number of replicas, {num_replicas}: all groups have as many. Give one of "
                f"{allowed}."
            )
        return cls(state, size)

    def divides(self, *, is_trainable: bool, is_of_optimizer: bool) -> bool:
        """Returns True if variables of a kind are divided, if their shape allows."""
        return is_of_optimizer or (is_trainable and self.state is ShardState.ALL)

    def dim_of(self, shape: Sequence[int], *, least_rows: int = 1) -> int | None:
        """Returns the dim along which an array is cut: the largest one that S divides, the first of several; None: it
        stays whole.

        Args:
          shape: [...] of the whole array.
          least_rows: How long each shard is at least, along that dim.
        """
        count = self.num_shards
        dims = [d for d, size in enumerate(shape) if size % count == 0 and size >= count * least_rows]
        return max(dims, key=lambda dim: shape[dim], default=None) if count > 1 else None
