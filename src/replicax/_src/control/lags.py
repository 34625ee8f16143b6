"""``Lags``: which members are behind others at one time, or stuck with them. Pure."""

from __future__ import annotations

from typing import final

from replicax._src.control.channel_member import ChannelMember
from replicax._src.control.sequence import Participants


@final
class Lags:
    """Who is behind whom. Members that stand at one place have one answer, so all of them cost no more than one.

    Args:
      present: The members that continue together and are present.
    """

    def __init__(self, present: Participants):
        self._present = present
        self._has_solo = any(member.is_solo for _, member in present)
        self._lowest = min((member.position for _, member in present), default=0)
        self._behind: dict[tuple[int, str | None], Participants] = {}
        self._newcomers: dict[tuple[int, str | None], Participants] = {}
        self._stuck: dict[int, Participants] = {}

    def behind(self, member: ChannelMember) -> Participants:
        """Returns the members that have not reached a member's program."""
        if not self._has_solo and self._lowest >= member.position:
            return ()
        key = _place_of(member)
        if key not in self._behind:
            self._behind[key] = [(n, other) for n, other in self._present if _is_behind(other, member)]
        return self._behind[key]

    def newcomers_behind(self, member: ChannelMember) -> Participants:
        """Returns those of ``behind`` that do not take part yet."""
        key = _place_of(member)
        if key not in self._newcomers:
            behind = self.behind(member)
            self._newcomers[key] = [(n, other) for n, other in behind if not other.takes_part]
        return self._newcomers[key]

    def stuck_with(self, member: ChannelMember) -> Participants:
        """Returns the members in the same program that run a callback, or else all that are in it."""
        if member.position not in self._stuck:
            inside = [
                (n, other)
                for n, other in self._present
                if other.is_in_program and other.position == member.position
            ]
            self._stuck[member.position] = [
                (n, other) for n, other in inside if "callback" in other.status
            ] or inside
        return self._stuck[member.position]


def _place_of(member: ChannelMember) -> tuple[int, str | None]:
    return member.position, member.status.get("program")


def _is_behind(other: ChannelMember, member: ChannelMember) -> bool:
    """Returns True if a member waits in a program for another one that has not reached it."""
    if other.is_solo:  # it may run other programs before its first step
        return not other.is_in_program or other.status["program"] != member.status["program"]
    return other.position < member.position
