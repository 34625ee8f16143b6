"""The rules by which the controller finds members that run different programs, or wait in different places. Pure.

All members must run the same programs in the same order. The *position* of a program is the count of programs before
it, so the controller knows from heartbeats which program each member ran at every position.

- It is a *mismatch* if two members ran different programs at one position, or if one waits to agree on a program at a
  position that another has passed.
- Programs and the all-gathers that block the thread that runs them are one sequence. Such an all-gather has the
  position of the next program: between two programs all members wait in the same all-gathers, in the same order. It is
  a mismatch if a member waits in one, and another one waits in a different one at that position or has begun the
  program there. An all-gather of another thread (which reads ahead, or writes a checkpoint) has no position, and is not
  in the sequence. Nor are all-gathers and reads of a member that runs programs in several threads, except the agreement
  on a program. A member that is late is no mismatch.
- Batches that members read together are in the sequence too. A member that waits for a batch says after how many reads,
  and after which program. It is a mismatch if another member has gone on to the next program, or waits in an all-gather
  before it, without this read, or if it makes this read elsewhere.
- A member that entered as a newcomer is compared from the first program on that it runs together with the others. It is
  in no all-gather of an earlier date, and has opened its datasets alone.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.control.channel_member import ChannelMember, Run, Runs

Participants = Sequence[tuple[int, ChannelMember]]
"""The members that run programs together, with their numbers."""
Reading = tuple[int, int, str]


@final
@dataclass
class AllGather:
    """An all-gather that not all members have offered to.

    Attributes:
      values: The offered values, by member.
      position: The position of the next program; None if it is not in the sequence.
      is_agreement: True if it agrees on that program.
      date: Its date. Members that take part since then complete it.
      has_threads: True if a member has offered that runs programs in several threads.
      newest_since: The latest date since which a member takes part that has offered.
    """

    values: dict[int, Any]
    position: int | None = None
    is_agreement: bool = False
    date: int = 0
    has_threads: bool = False
    newest_since: int = 0

    def offer(self, number: int, member: ChannelMember, value: Any) -> None:
        """Takes the value of a member."""
        self.values[number] = value
        self.has_threads |= member.has_threads
        self.newest_since = max(self.newest_since, member.takes_part_since)

    def is_passed_by(self, number: int, member: ChannelMember, *, has_threads: bool) -> bool:
        """Returns True if a member has reached its position without it.

        Args:
          has_threads: True if one of those that have offered runs programs in several threads.
        """
        if not member.is_present or self.position is None or number in self.values:
            return False
        if member.takes_part_since > self.date or self._is_awaited_by(member):
            return False
        if has_threads or member.has_threads:
            return self.is_agreement and member.reached_program >= self.position
        return member.reached >= self.position

    def _is_awaited_by(self, member: ChannelMember) -> bool:
        """Returns True if a member waits in an earlier all-gather, without newcomers that have offered to this one."""
        is_before = member.next is not None and member.position < (self.position or 0)
        return is_before and self.newest_since > member.next_date


def different_programs(number: int, participants: Participants) -> dict[int, dict[str, Any]]:
    """Returns what this member and another one ran at the first position at which they differ; empty if they agree."""
    member = next(member for each, member in participants if each == number)
    for other_number, other in participants:
        last = min(member.position, other.position)
        position = first_difference(member.runs, other.runs, last) if other_number != number else None
        if position is not None:
            return {number: _status_of(position, member.runs), other_number: _status_of(position, other.runs)}
    return {}


def drop_compared_runs(members: Iterable[ChannelMember], participants: Participants) -> int:
    """Drops the runs of all members that the present participants have passed. Returns their lowest position."""
    lowest = min((member.position for _, member in participants if member.is_present), default=-1)
    for member in members:
        drop_runs(member.runs, lowest)
    return lowest


def drop_runs(runs: Runs, lowest: int) -> None:
    """Drops the runs that ended before a position."""
    num_ended = bisect.bisect_right(runs, lowest, lo=min(1, len(runs)), key=lambda run: run.position) - 1
    del runs[: max(0, num_ended)]


def first_apart(
    members: Sequence[ChannelMember], participants: Participants, all_gathers: Iterable[AllGather]
) -> tuple[int, int] | None:
    """Returns a member that waits, and one that has passed this place or waits elsewhere. None if there are none.

    Args:
      members: All members, by number. One that has offered may be no participant any more.
      participants: The participants.
      all_gathers: The all-gathers that are not complete.
    """
    in_all_gathers = _apart_in_all_gathers(members, participants, all_gathers)
    return next(itertools.chain(in_all_gathers, _apart_in_reads(participants)), None)


def _apart_in_all_gathers(
    members: Sequence[ChannelMember], participants: Participants, all_gathers: Iterable[AllGather]
) -> Iterator[tuple[int, int]]:
    """Yields members in an all-gather, with members that have reached its position without it."""
    for gather in all_gathers:
        has_threads = any(members[number].has_threads for number in gather.values)
        for number, member in participants:
            if gather.is_passed_by(number, member, has_threads=has_threads):
                yield next(iter(gather.values)), number


def _apart_in_reads(participants: Participants) -> Iterator[tuple[int, int]]:
    """Yields members that read a batch, with members that go on without this read or make it elsewhere."""
    present = [
        (number, member) for number, member in participants if member.is_present and not member.has_threads
    ]
    for number, member in present:
        if member.reading is None:
            continue
        for other_number, other in present:
            if is_read_passed(member.reading, other.reached, other.reads) or is_read_elsewhere(
                member.reading, other.reading
            ):
                yield number, other_number


def is_read_passed(reading: Reading, reached: int, num_reads: int) -> bool:
    """Returns True if a member that has reached a position with so many reads has gone on without a read."""
    return reached > reading[0] and num_reads <= reading[1]


def is_read_elsewhere(reading: Reading, other: Reading | None) -> bool:
    """Returns True if another member makes this read at another place."""
    return other is not None and other[1] == reading[1] and _is_elsewhere(reading, other)


def _is_elsewhere(one: Reading, other: Reading) -> bool:
    """Returns True if two reads of one number are made at different places. A dataset of a newcomer has no name."""
    return one[0] != other[0] or (one[2] != other[2] and bool(one[2]) and bool(other[2]))


def first_difference(one: Runs, other: Runs, last: int) -> int | None:
    """Returns the first known position, up to ``last``, at which two members ran different programs."""
    if not one or not other:
        return None
    first = max(one[0].position, other[0].position)
    changes = sorted({run.position for run in (*one, *other) if first <= run.position <= last})
    return next((p for p in changes if _run_at(p, one).program != _run_at(p, other).program), None)


def _run_at(position: int, runs: Runs) -> Run:
    return next(run for run in reversed(runs) if run.position <= position)


def _status_of(position: int, runs: Runs) -> dict[str, Any]:
    run = _run_at(position, runs)
    at = {} if run.at is None else {"at": run.at}
    return {"position": position, "program": run.program, "doing": "in", **at}
