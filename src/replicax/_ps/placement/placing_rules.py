"""The rules that place values on parameter servers. They know what the client knows, and ask nobody."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from replicax._ps.placement.placement_plan import ArrayPlace, PlacementNeeds, PlacementPlan, Places
from replicax._ps.placement.server_arrays import Balance, ServerArray, Shard
from replicax._src.program_kit.errors import UnsupportedError


@dataclass(frozen=True)
class PlacementState:
    """What a client knows of the parameter servers.

    Attributes:
      registered: The arrays that do not exist yet, in the order of their registration.
      bytes_on: The number of bytes on each server.
      first_key: The number in the next array's key. Numbers are not used twice.
    """

    registered: Sequence[ServerArray]
    bytes_on: Sequence[int]
    first_key: int


def plan_placement(needs: PlacementNeeds, state: PlacementState) -> PlacementPlan:
    """Returns the plan for what a function needs.

    Arrays are created in the order of their registration, each on the server with the fewest bytes. With an array, all
    that were registered before it are created, except those that wait for an array to stand beside.

    Raises:
      UnsupportedError: An array must be kept whole, but exists in shards.
    """
    for array in needs.kept_whole:
        check_may_be_whole(array)
    draft = _Draft(needs, state)
    for array, other in needs.colocated:
        if array.is_made:
            draft.create([other])
            draft.colocate(array, other)
    draft.create(needs.used)
    for array, near in needs.copied:
        draft.create([array])
        for ps in range(len(state.bytes_on)) if near is None else servers_of(near, draft.after):
            draft.copy(array, ps)
    return draft.plan()


def check_may_be_whole(array: ServerArray) -> None:
    """Checks that an array can be kept on one server.

    Raises:
      UnsupportedError: The servers already have it in shards.
    """
    if array.is_made and array.row_ranges:
        raise UnsupportedError(
            f"The optimizer needs variable {array.name!r} without shards, but the parameter servers "
            f"have it in {len(array.row_ranges)} shards, because it was used before the first training "
            "step was traced. Train first, or have the variable_partitioner leave it in one shard."
        )


def servers_of(arrays: Iterable[ServerArray], places: Places) -> list[int]:
    """Returns the numbers of the servers that have a shard of any of these arrays."""
    return sorted({shard.ps for array in arrays for shard in places[array].shards})


def copy_key(key: str, ps: int) -> str:
    """Returns the key of the copy on a server of the array with this key."""
    return f"{key}@{ps}"


def arrays_to_create(
    missing: Collection[ServerArray],
    registered: Sequence[ServerArray],
    beside: Mapping[ServerArray, ServerArray] | None = None,
) -> list[ServerArray]:
    """Returns missing arrays and all that were registered before the last of them, except those that wait for an
    array to stand beside. Each comes after the array that it stands beside.

    Args:
      missing: The arrays that must be created.
      registered: The arrays that do not exist, in the order of their registration.
      beside: The arrays that some stand beside, in place of their ``colocated_with``.
    """
    overlay = beside or {}
    last = max((n for n, array in enumerate(registered) if array in missing), default=-1)
    return after_those_beside(
        [
            array
            for n, array in enumerate(registered)
            if array in missing or (n < last and overlay.get(array, array.colocated_with) is None)
        ],
        overlay,
    )


def after_those_beside(
    arrays: Iterable[ServerArray], beside: Mapping[ServerArray, ServerArray] | None = None
) -> list[ServerArray]:
    """Returns the arrays that do not exist, each after the array that it stands beside, which may not exist either."""
    ordered: dict[ServerArray, None] = {}
    overlay = beside or {}

    def add(array: ServerArray) -> None:
        if array.is_made or array in ordered:
            return
        other = overlay.get(array, array.colocated_with)
        if other is not None:
            add(other)
        ordered[array] = None

    for array in arrays:
        add(array)
    return list(ordered)


@final
class _Draft:
    """A plan, while it is made.

    Attributes:
      after: The places of the arrays that it has met, once the plan is carried out.
    """

    def __init__(self, needs: PlacementNeeds, state: PlacementState):
        self._whole = frozenset(needs.kept_whole)
        self._beside = dict(needs.colocated)
        self._registered = state.registered
        self._balance = Balance(state.bytes_on)
        self._next_key = state.first_key
        self._before: dict[ServerArray, ArrayPlace] = {}
        self.after: dict[ServerArray, ArrayPlace] = {}
        self._created: list[ServerArray] = []
        self._moved: list[ServerArray] = []
        self._copied: list[tuple[ServerArray, int]] = []

    def plan(self) -> PlacementPlan:
        """Returns the finished plan."""
        beside = {
            array: other
            for array in (*self._created, *self._moved)
            if (other := self._other_of(array)) is not None
        }
        return PlacementPlan(self._before, self.after, self._created, self._moved, self._copied, beside)

    def create(self, arrays: Sequence[ServerArray]) -> None:
        """Creates those of these arrays that do not exist."""
        missing = {array for array in arrays if not self._meet(array).shards}
        if not missing:
            return
        waiting = [array for array in self._registered if not self._meet(array).shards]
        for array in arrays_to_create(missing, waiting, self._beside):
            if not self._meet(array).shards:
                self._created.append(array)
                self._put(array)

    def colocate(self, array: ServerArray, other: ServerArray) -> None:
        """Moves an existing array to the servers of another, if it is not there."""
        place = self._meet(array)
        if place.is_beside(self._meet(other)):
            return
        for shard in place.shards:
            self._balance.remove(shard.ps, array.bytes_of(shard))
        self._moved.append(array)
        self._put(array)

    def copy(self, array: ServerArray, ps: int) -> None:
        """Copies an array to a server that does not have it."""
        place = self._meet(array)
        if place.shards[0].ps == ps or ps in place.copies:
            return
        self._copied.append((array, ps))
        self._balance.add(ps, array.num_bytes)
        copies = {**place.copies, ps: copy_key(place.key, ps)}
        self.after[array] = ArrayPlace(place.key, place.shards, copies)

    def _meet(self, array: ServerArray) -> ArrayPlace:
        if array not in self.after:
            self._before[array] = self.after[array] = ArrayPlace.of(array)
        return self.after[array]

    def _other_of(self, array: ServerArray) -> ServerArray | None:
        return self._beside.get(array, array.colocated_with)

    def _put(self, array: ServerArray) -> None:
        """Chooses the servers of an array: those of the array that it stands beside, or those with the fewest bytes."""
        key = f"{self._next_key}:{array.name}"
        self._next_key += 1
        other = self._other_of(array)
        if other is not None:
            given = [(shard.ps, shard.rows) for shard in self._meet(other).shards]
            for ps, rows in given:
                self._balance.add(ps, array.bytes_of(Shard(ps, key, rows)))
        else:
            ranges = () if array in self._whole else array.row_ranges
            sizes = [(array.bytes_of(Shard(0, key, rows)), rows) for rows in ranges or (None,)]
            given = [(self._balance.take(size), rows) for size, rows in sizes]
        shards = tuple(
            Shard(ps, key if rows is None else f"{key}/part_{number}", rows)
            for number, (ps, rows) in enumerate(given)
        )
        self.after[array] = ArrayPlace(key, shards, self._meet(array).copies)
