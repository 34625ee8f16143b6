"""``HeardMembers``: which groups still count, because they have pushed not long ago. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from replicax._ps.local_updates.round_state import MemberState


@final
class HeardMembers:
    """When each member was last heard of. A quorum does not wait for the others.

    Members that have not come yet count until the patience ends, so that a job whose groups start one after the other
    has full rounds.

    Args:
      member: The number of this member, which always counts.
      num_members: The number of members.
      patience_s: The seconds after which a silent member no longer counts, until it is heard of again.
      now: The time.
    """

    def __init__(self, member: int, num_members: int, patience_s: float, now: float):
        self._member, self._patience_s = member, patience_s
        self._heard_at = [now] * num_members
        self._seen: dict[int, Sequence[MemberState]] = {}

    def note(self, fragment: int, members: Sequence[MemberState], now: float) -> None:
        """Takes what the server of a fragment knows of all members."""
        before = self._seen.get(fragment, members)
        self._seen[fragment] = members
        for number, (old, new) in enumerate(zip(before, members, strict=True)):
            if old != new and (old.owner, old.pushed) != (new.owner, new.pushed):
                self._heard_at[number] = now

    def is_live(self, member: int, now: float) -> bool:
        """True if a member still counts."""
        return member == self._member or now - self._heard_at[member] <= self._patience_s
