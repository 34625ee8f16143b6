"""``PlacementPlan``: what must happen on the parameter servers before a function can run, as a value.

Tracing a function says what it needs. The rules make a plan of that, and the session carries the plan out. The
programs are built for the places in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicax._ps.placement.server_arrays import ServerArray, Shard


@dataclass(frozen=True)
class PlacementNeeds:
    """Where a function needs its values.

    Attributes:
      used: The arrays that it reads or changes. They must exist.
      kept_whole: Those that must be on one server, without shards.
      colocated: Arrays whose shards must be on the servers of another array's shards, each with that array.
      copied: Arrays without shards of which several servers need a copy, each with the arrays whose servers these are;
        None for all servers.
    """

    used: Sequence[ServerArray]
    kept_whole: Sequence[ServerArray] = ()
    colocated: Sequence[tuple[ServerArray, ServerArray]] = ()
    copied: Sequence[tuple[ServerArray, Sequence[ServerArray] | None]] = ()


@dataclass(frozen=True)
class ArrayPlace:
    """The place of an array on the parameter servers: where it is, or where it will be.

    Attributes:
      key: The prefix of the keys of its shards.
      shards: The shards and their servers; empty if it does not exist.
      copies: The keys of further copies, by parameter server.
    """

    key: str
    shards: tuple[Shard, ...]
    copies: Mapping[int, str]

    @classmethod
    def of(cls, array: ServerArray) -> ArrayPlace:
        """Returns the place where an array is now."""
        return cls(array.key, array.shards, dict(array.copies))

    @property
    def row_ranges(self) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of each shard's rows; empty if there is one shard."""
        return tuple(shard.rows for shard in self.shards if shard.rows is not None)

    def is_beside(self, other: ArrayPlace) -> bool:
        """True if each shard is on the server of the other's shard, with the same rows."""
        return [(s.ps, s.rows) for s in self.shards] == [(s.ps, s.rows) for s in other.shards]

    def key_on(self, ps: int) -> str:
        """Returns the key of the copy on one server, which must have one."""
        return self.shards[0].key if self.shards[0].ps == ps else self.copies[ps]


Places = Mapping[ServerArray, ArrayPlace]


@dataclass(frozen=True)
class PlacementPlan:
    """What the session must do on the parameter servers, in this order: create, move, copy.

    Attributes:
      before: The places of its arrays when it was made.
      places: Their places after it has been carried out.
      created: The arrays to create.
      moved: The arrays to move to other servers.
      copied: The copies to make, each as an array and the number of a server.
      beside: The array that each created or moved array shall stand beside; without those that have their own servers.
    """

    before: Places
    places: Places
    created: Sequence[ServerArray] = ()
    moved: Sequence[ServerArray] = ()
    copied: Sequence[tuple[ServerArray, int]] = ()
    beside: Mapping[ServerArray, ServerArray] = field(default_factory=dict)

    @property
    def is_current(self) -> bool:
        """True if all its arrays are still where they were when it was made."""
        return all(ArrayPlace.of(array) == place for array, place in self.before.items())

    def places_of(self, arrays: Sequence[ServerArray]) -> dict[ServerArray, ArrayPlace]:
        """Returns the places of some of its arrays. Programs keep these, and not the plan, which keeps arrays alive."""
        return {array: self.places[array] for array in arrays}
