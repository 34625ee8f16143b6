"""The rule of sharded state: which variables are sharded over replicas, and along which dim. Pure: no jax.

Adjacent replicas form groups of ``shard_size``. Each group has the full state, and each replica in it has one shard of
every sharded array. Shards have equal sizes, so an array without a divisible dim stays replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import ShardState, whole_number

# With more shards TPUs gather the thin shards by an all-reduce, at twice the traffic.
MOST_SHARDS = 256
"""The default limit of the number of shards."""


@dataclass(frozen=True)
class StateShards:
    """The sharding of state over R replicas.

    Attributes:
      state: The sharded state: the optimizer's variables, or the trainable ones too.
      num_shards: The number of shards S, one for each replica of a group.
    """

    state: ShardState
    num_shards: int

    @classmethod
    def of(
        cls, shard_state: ShardState | str | None, shard_size: int | None, num_replicas: int
    ) -> StateShards | None:
        """Returns the sharding for the user's arguments; None if no state is sharded.

        Args:
          shard_state: A ``ShardState``, its name, or None.
          shard_size: A divisor of R; None for the largest one up to 256.

        Raises:
          InvalidArgumentError: An argument is not one of these, or only a size is given.
        """
        if shard_state is None:
            if shard_size is not None:
                raise InvalidArgumentError(
                    f"shard_size={shard_size!r} says over how many replicas the state is sharded, but no state is sharded: give "
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
                f"shard_size={size} does not divide the number of replicas, {num_replicas}, and all groups have equal sizes. Give one of "
                f"{allowed}."
            )
        return cls(state, size)

    def divides(self, *, is_trainable: bool, is_of_optimizer: bool) -> bool:
        """Returns True if variables of this kind are sharded, provided that their shape allows it."""
        return is_of_optimizer or (is_trainable and self.state is ShardState.ALL)

    def dim_of(
        self, shape: Sequence[int], num_logical: Sequence[int] = (), *, least_rows: int = 1
    ) -> int | None:
        """Returns the dim to shard: the first of the largest ones that S divides, and one that the logical devices of a
        replica shard only if no other dim fits. Returns None if the array stays replicated.

        Args:
          shape: The shape [...] of the full array.
          num_logical: The number of logical devices that already shard each dim; by default 1 for all.
          least_rows: The minimum size of a shard along that dim.
        """
        count = self.num_shards
        taken = num_logical or [1] * len(shape)
        sizes = [size // num if size % num == 0 else 0 for size, num in zip(shape, taken, strict=True)]
        dims = [d for d, size in enumerate(sizes) if size % count == 0 and size >= count * least_rows]
        return max(dims, key=lambda dim: (taken[dim] == 1, shape[dim]), default=None) if count > 1 else None
