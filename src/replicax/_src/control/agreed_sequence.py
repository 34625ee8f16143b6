"""``AgreedSequence``: what all participants have run and read so far. Pure.

The rules of ``sequence.py`` compare each member with each other one. As long as no two differ, it is enough to compare
the member that has just changed with what all of them have in common, which costs the same for every number of members.
If the answer is "perhaps", the controller compares it with each other member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import final

from replicax._src.control.channel_member import ChannelMember, Runs
from replicax._src.control.sequence import (
    AllGather,
    Reading,
    drop_compared_runs,
    drop_runs,
    first_difference,
    is_read_elsewhere,
    is_read_passed,
)

_Place = tuple[int, int, Reading | None]
"""The position that a member has reached, the number of its reads, and the batch for which it waits."""


@final
class AgreedSequence:
    """The programs and reads of the participants.

    Args:
      members: All members, by number; the controller's list.
    """

    def __init__(self, members: Sequence[ChannelMember]):
        self._members = members
        self._participants: Sequence[int] = ()
        self._numbers: frozenset[int] = frozenset()
        self._num_since = Counter[int]()
        self._is_known = False
        self._runs: Runs = []
        self._last = -1  # the highest position of which the program is known
        self._has_gaps = False  # the runs of participants contradict ``_runs``
        self._num_heartbeats = 0
        self._places: dict[int, _Place] = {}
        self._reached = Counter[tuple[int, int]]()
        self._readings = Counter[Reading]()

    # --- the participants ---------------------------------------------------------------------------------

    def follow(self, participants: Sequence[int]) -> None:
        """Takes the members that continue together. Does nothing if they are as before and nothing was forgotten."""
        if self._is_known and participants is self._participants:
            return
        self._is_known, self._participants = True, participants
        self._numbers = frozenset(participants)
        self._num_since = Counter(self._members[number].takes_part_since for number in participants)
        self._places.clear()
        self._reached.clear()
        self._readings.clear()
        for number in participants:
            self._note_place(number)
        self.join_runs()

    def forget(self) -> None:
        """Notes that many members have changed at once."""
        self._is_known = False

    def has(self, number: int) -> bool:
        """Returns True for a member that continues with the others."""
        return number in self._numbers

    def is_compared(self, number: int) -> bool:
        """Returns True for a member that runs the same programs as the others."""
        return number in self._numbers and self._members[number].takes_part

    def num_at(self, date: int) -> int:
        """Returns the number of participants that take part since a date."""
        return sum(num for since, num in self._num_since.items() if since <= date)

    # --- comparisons --------------------------------------------------------------------------------------

    def may_differ(self, number: int) -> bool:
        """Returns False if a member has run no other program than another one at any position."""
        return not self._joined(self._members[number]) or self._has_gaps

    def take_runs(self, number: int) -> None:
        """Takes the programs of a member that are compared with the next heartbeat of any member."""
        if self.is_compared(number) and not self._joined(self._members[number]):
            self._has_gaps = True

    def join_runs(self) -> None:
        """Forgets the programs that only members have run that are no participants any more."""
        self._runs, self._last = [], -1
        compared = [self._members[number] for number in self._participants if self.is_compared(number)]
        agree = [self._joined(member) for member in compared]  # of all, also after one that differs
        self._has_gaps = not all(agree)

    def count_heartbeat(self) -> bool:
        """Returns True if the runs that all have passed should be dropped, once for as many heartbeats as members."""
        self._num_heartbeats += 1
        return self._num_heartbeats >= len(self._members)

    def drop(self) -> None:
        """Drops the runs of all members that the participants have passed."""
        self._num_heartbeats = 0
        compared = [
            (number, self._members[number]) for number in self._participants if self.is_compared(number)
        ]
        drop_runs(self._runs, drop_compared_runs(self._members, compared))
        if self._has_gaps:
            self.join_runs()

    def note(self, number: int) -> None:
        """Notes that a member may have moved."""
        place = self._places.pop(number, None)
        if place is not None:
            reached, num_reads, reading = place
            _decrease(self._reached, (reached, num_reads))
            if reading is not None:
                _decrease(self._readings, reading)
        if number in self._numbers:
            self._note_place(number)

    def may_be_apart(self, number: int, all_gathers: Iterable[AllGather]) -> bool:
        """Returns False if this member neither waits where another one has passed, or elsewhere, nor has passed where
        another one waits. ``note`` comes before.
        """
        member = self._members[number]
        if not self.is_compared(number):
            return False
        if any(gather.is_passed_by(number, member, has_threads=gather.has_threads) for gather in all_gathers):
            return True
        place = self._places.get(number)
        return place is not None and self._may_read_apart(*place)

    def may_have_passed(self, gather: AllGather) -> bool:
        """Returns False if no member has reached the position of an all-gather without it."""
        return any(
            gather.is_passed_by(number, self._members[number], has_threads=gather.has_threads)
            for number in self._participants
            if self.is_compared(number)
        )

    # --- inside -------------------------------------------------------------------------------------------

    def _may_read_apart(self, reached: int, num_reads: int, reading: Reading | None) -> bool:
        if any(is_read_passed(other, reached, num_reads) for other in self._readings):
            return True
        if reading is None:
            return False
        return any(is_read_elsewhere(reading, other) for other in self._readings) or any(
            is_read_passed(reading, *other) for other in self._reached
        )

    def _note_place(self, number: int) -> None:
        member = self._members[number]
        if not member.is_present or not member.takes_part or member.has_threads:
            return
        place = (member.reached, member.reads, member.reading)
        self._places[number] = place
        self._reached[place[:2]] += 1
        if member.reading is not None:
            self._readings[member.reading] += 1

    def _joined(self, member: ChannelMember) -> bool:
        """Adds the runs of a member. Returns False, and adds nothing, if a program differs."""
        runs = member.runs
        if not runs:
            return True
        if not self._runs:
            self._runs, self._last = list(runs), member.position
            return True
        if first_difference(runs, self._runs, min(member.position, self._last)) is not None:
            return False
        if runs[0].position < self._runs[0].position:
            first = self._runs[0].position
            self._runs[:0] = [run for run in runs if run.position < first]
        if member.position > self._last:
            self._runs += [run for run in runs if run.position > self._last]
            self._last = member.position
        return True


def _decrease(counter: Counter, key: object) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
