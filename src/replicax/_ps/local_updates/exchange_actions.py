"""The actions of a group's rules, which its owner carries out in their order.

``ClaimSlot``, ``SendPush``, ``SendClose``, ``ReadRound`` and ``FetchOuter`` are requests to the server of the
fragment, of which one is in flight for each fragment. Each ends with one event: ``answered`` or ``failed``. An
answer has the instance of the server's store, and the state of the round of the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from replicax._ps.local_updates.round_state import MemberState


@final
@dataclass(frozen=True)
class ClaimSlot:
    """Create the fragment on its server if it is absent, from the outer parameters that the group has, with a number
    as its birth that was not used before. Then take the slot, if its owner and the number of its last push are
    still those of ``expected``. Repeated claims change nothing.
    """

    fragment: int
    expected: MemberState


@final
@dataclass(frozen=True)
class TakeProgress:
    """Take what was not pushed as the push ``number``: ``UnmergedProgress.take``."""

    fragment: int
    number: int


@final
@dataclass(frozen=True)
class SendPush:
    """Send a push that was taken, perhaps not for the first time.

    Attributes:
      number: Its number.
      after: The number of the push before it. The server adds a push only after that one, so none twice, and none
        before the group knows that the server has gone back to a snapshot.
      tokens: Its rows.
      is_last: True if the group pushes no more.
      stops: True if all groups shall stop.
    """

    fragment: int
    number: int
    after: int
    tokens: int
    is_last: bool
    stops: bool


@final
@dataclass(frozen=True)
class NoteLanding:
    """Note for a replay that the server has added a push, and which version has it."""

    fragment: int
    number: int
    version: int


@final
@dataclass(frozen=True)
class SendClose:
    """Ask the server to close a round. It does nothing if another version is open, or fewer members have pushed.

    Attributes:
      version: The version that is open.
      quorum: The fewest members with rows.
      is_flush: True to add the mean with a learning rate of 1 and no momentum.
    """

    fragment: int
    version: int
    quorum: int
    is_flush: bool


@final
@dataclass(frozen=True)
class ReadRound:
    """Read the state of the round."""

    fragment: int


@final
@dataclass(frozen=True)
class FetchOuter:
    """Read the outer parameters, and the state of the round of the same moment."""

    fragment: int


@final
@dataclass(frozen=True)
class AdoptOuter:
    """Adopt the outer parameters that were fetched last: ``UnmergedProgress.adopt``.

    Attributes:
      instance: The instance of the server's store.
      version: Their version there.
      keeps, returns, drops: See ``UnmergedProgress.adopt``.
    """

    fragment: int
    instance: str
    version: int
    keeps: tuple[int, ...]
    returns: tuple[int, ...]
    drops: bool


@final
@dataclass(frozen=True)
class LostPushes:
    """Tell the user that pushes are in no outer parameters.

    Attributes:
      first, last: Their numbers.
      is_refused: True if the server refused them, because they were not finite; False if it lost them, because it went
        back to a snapshot.
    """

    fragment: int
    first: int
    last: int
    is_refused: bool


@final
@dataclass(frozen=True)
class ServerSilent:
    """Tell the user that the server of a fragment does not answer. Training goes on."""

    fragment: int


@final
@dataclass(frozen=True)
class ExchangeSlow:
    """Tell the user that pushes take many times as long as the steps between two boundaries.

    Attributes:
      num_boundaries: The boundaries that have passed since the push that has no answer.
      period_s: The seconds between two boundaries.
    """

    fragment: int
    num_boundaries: int
    period_s: float


@final
@dataclass(frozen=True)
class SlotReplaced:
    """Tell the user that another process has this group's slot. This one exchanges nothing any more."""

    fragment: int


@final
@dataclass(frozen=True)
class ExchangeDone:
    """``finish`` has done its work: the parameters of the group are the outer ones."""


Action = (
    ClaimSlot
    | TakeProgress
    | SendPush
    | NoteLanding
    | SendClose
    | ReadRound
    | FetchOuter
    | AdoptOuter
    | LostPushes
    | ServerSilent
    | ExchangeSlow
    | SlotReplaced
    | ExchangeDone
)
