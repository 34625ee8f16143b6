"""``RoundState``: the numbers of one fragment on its server. Pure.

A fragment of the parameters is trained in *rounds*. The version is the number of rounds that have closed. Each group
is a *member* with a slot, which adds up what the group pushes until the round closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self, final

REFUSED: Final = -1
"""In ``MemberState.landed``: the last push was not finite, and is in no round."""


class MemberState(NamedTuple):
    """A member, as its server knows it.

    Attributes:
      owner: A number that stands for the process which has the slot; 0 for none.
      pushed: The number of the last push of that process.
      landed: The version that was open when it arrived: it is in the next one; or ``REFUSED``.
      tokens: The rows of all pushes of the open round.
      has_finished: 1 if the process pushes no more.
    """

    owner: int = 0
    pushed: int = 0
    landed: int = 0
    tokens: int = 0
    has_finished: int = 0


@final
@dataclass(frozen=True)
class RoundState:
    """The open round of a fragment.

    Attributes:
      version: The number of rounds that have closed.
      is_stopping: 1 if all groups shall end at their next boundary. On the server a ``stop_mark``.
      birth: A number that was drawn when the fragment was created. On a server that came back without a snapshot it
        differs.
      members: All members, in order.
    """

    version: int
    is_stopping: int
    birth: int
    members: tuple[MemberState, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Reads the server's shard: a row for the round, then one for each member."""
        (version, is_stopping, birth, *_), *members = rows
        return cls(
            int(version), int(is_stopping), int(birth), tuple(MemberState(*map(int, row)) for row in members)
        )

    @property
    def contributors(self) -> frozenset[int]:
        """The members that have pushed rows in the open round."""
        return frozenset(number for number, member in enumerate(self.members) if member.tokens)

    def in_instance(self, mark: int) -> Self:
        """Returns the state without a stop that was said to another instance of the server, in an earlier run.

        Args:
          mark: The ``stop_mark`` of the instance that has answered.
        """
        return replace(self, is_stopping=int(self.is_stopping == mark))

    def trains(self, member: int) -> bool:
        """True unless a member has said that it pushes no more."""
        return not self.members[member].has_finished
