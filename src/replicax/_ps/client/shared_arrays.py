"""``SharedArrays``: arrays on parameter servers that several programs share. One program creates them, the others
find
them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, final

from replicax._ps.client.server_contents import ServerContents
from replicax._ps.client.tasks import Share
from replicax._ps.client.wait_rules import Awaited
from replicax._ps.client.waiting import wait_for
from replicax._ps.placement.placing_rules import copy_key
from replicax._ps.placement.server_arrays import Balance, ServerArray
from replicax._ps.programs.programs import Shard
from replicax._src.program_kit.errors import ProgramMismatchError

Found = list[dict[str, tuple[tuple[int, ...], str]]]


@final
class SharedArrays:
    """Finds arrays by their names: the first "w" of one program is the first "w" of the others.

    The chief decides where an array is, and the servers know it, so programs may use their arrays in another order.

    Args:
      contents: The shards on the servers.
      share: This program among those that share them.
      limit_s: The longest wait for the chief to create an array.
    """

    def __init__(self, contents: ServerContents, share: Share, limit_s: float):
        self._contents, self._share, self._limit_s = contents, share, limit_s
        self._counts: collections.Counter[str] = collections.Counter()

    @property
    def is_chief(self) -> bool:
        """True if this program creates the arrays that do not exist."""
        return self._share.is_chief

    def name(self, array: ServerArray) -> None:
        """Gives a new array its key. Call it in the order in which arrays are made."""
        array.key = f"{self._counts[array.name]}:{array.name}:"
        self._counts[array.name] += 1

    def place(self, arrays: Sequence[ServerArray], balance: Balance) -> list[tuple[ServerArray, Shard]]:
        """Finds the places of arrays, and of the arrays that they stand beside. The chief decides where new ones are.

        Returns:
          The shards that do not exist yet, which the chief must create now.

        Raises:
          ProgramMismatchError: The servers have another array of this name.
          UnavailableError: The chief has not created them in time.
        """
        absent: list[tuple[ServerArray, Shard]] = []

        def not_placed() -> list[str]:
            waiting = [array for array in arrays if not array.is_made]
            found = self._contents.find([key for array in waiting for key in _keys(array)])
            for array in waiting:
                absent.extend((array, shard) for shard in self._place(array, found, balance))
            return [array.name for array in waiting if not array.is_made]

        self._until(not_placed)
        return absent

    def wait_colocated(self, array: ServerArray, other: ServerArray) -> None:
        """Waits until the chief has moved an array to the servers of another one."""
        wanted = tuple(
            Shard(p.ps, key, p.rows) for p, key in zip(other.shards, _keys_of(array, other.row_ranges))
        )

        def is_moved() -> list[str]:
            found = self._contents.find([shard.key for shard in wanted])
            return [] if all(shard.key in found[shard.ps] for shard in wanted) else [array.name]

        self._until(is_moved)
        array.row_ranges, array.shards, array.colocated_with = other.row_ranges, wanted, other

    def has_copy(self, array: ServerArray, ps: int) -> bool:
        """True if a server has a copy of an array. A program that is not the chief waits until it has."""
        key = copy_key(array.key, ps)
        if self.is_chief:
            return key in self._contents.find([key])[ps]
        self._until(lambda: [] if key in self._contents.find([key])[ps] else [array.name])
        return True

    def find_copies(self, array: ServerArray) -> None:
        """Finds the copies that other programs have made."""
        found = self._contents.find([copy_key(array.key, ps) for ps in range(array.holder.num_ps)])
        array.copies |= {
            ps: key for ps, there in enumerate(found) if (key := copy_key(array.key, ps)) in there
        }

    def _place(self, array: ServerArray, found: Found, balance: Balance) -> list[Shard]:
        """Sets the shards of an array, if they exist or this is the chief. Returns those that do not exist."""
        beside = array.colocated_with
        if beside is not None:
            if not beside.is_made:
                return []
            array.row_ranges = beside.row_ranges
        self._check_is_cut_alike(array, found)
        keys = _keys_of(array, array.row_ranges)
        wanted = [None] * len(keys) if beside is None else [shard.ps for shard in beside.shards]
        there = [self._server_with(key, found, ps) for key, ps in zip(keys, wanted, strict=True)]
        if None in there and not self.is_chief:
            return []
        shards, absent = [], []
        for key, rows, is_at, shall_be_at in zip(
            keys, array.row_ranges or (None,), there, wanted, strict=True
        ):
            size = array.bytes_of(Shard(0, key, rows))
            at = shall_be_at if is_at is None else is_at
            if at is None:
                at = balance.take(size)
            else:
                balance.add(at, size)
            shard = Shard(at, key, rows)
            if is_at is None:
                absent.append(shard)
            else:
                self._check(array, shard, found[at][key], at)
            shards.append(shard)
        array.shards = tuple(shards)
        return absent

    def _server_with(self, key: str, found: Found, wanted: int | None) -> int | None:
        return next((ps for ps, has in enumerate(found) if key in has and wanted in (None, ps)), None)

    def _check_is_cut_alike(self, array: ServerArray, found: Found) -> None:
        other = next(iter(_keys_of(array, () if array.row_ranges else ((0, 0),))))
        if any(other in there for there in found):
            here, at_chief = ("sharded", "not sharded") if array.row_ranges else ("not sharded", "sharded")
            raise ProgramMismatchError(
                f"Variable {array.name!r} is {here} in {self._share.member}, but {at_chief} on the parameter "
                f"servers, where {self._share.chief} has created it. All programs must be the same, with the "
                "same variable_partitioner."
            )

    def _check(self, array: ServerArray, shard: Shard, spec: tuple[tuple[int, ...], str], ps: int) -> None:
        expected = array.shape_of(shard), str(array.dtype)
        if spec != expected:
            part = "" if shard.rows is None else f" (rows {shard.rows[0]} to {shard.rows[1]})"
            raise ProgramMismatchError(
                f"Variable {array.name!r}{part} has the shape {expected[0]} and dtype {expected[1]} in "
                f"{self._share.member}, but the shape {spec[0]} and dtype {spec[1]} on ps {ps}, where "
                f"{self._share.chief} has created it. All programs must be the same. To start another "
                "program, stop the parameter servers first."
            )

    def _until(self, missing: Callable[[], list[str]]) -> None:
        chief = self._share.chief

        def awaited() -> Awaited | None:
            names = missing()
            if not names:
                return None
            what = ", ".join(map(repr, names[:5])) + (" and others" if len(names) > 5 else "")
            why = "Check that it runs the same program, and uses this variable."
            return Awaited(f"{chief} to create the variable {what} on the parameter servers", why, chief)

        wait_for(awaited, self._share.member, self._limit_s)


def _keys(array: ServerArray) -> list[str]:
    """Returns the keys to look for: the array's own, and those that show that it is sharded in another way."""
    shards = array.row_ranges if array.colocated_with is None else array.colocated_with.row_ranges
    return [*_keys_of(array, shards), *_keys_of(array, () if shards else ((0, 0),))]


def _keys_of(array: ServerArray, shards: Sequence[Any]) -> list[str]:
    return [f"{array.key}/part_{number}" for number in range(len(shards))] if shards else [array.key]
