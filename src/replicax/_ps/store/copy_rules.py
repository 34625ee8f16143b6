"""The rules for one server's copy of a group: its role, what its backup lacks, and when a client is answered.

Pure: no clock, thread, connection or array; the caller holds the lock. ``group_rules.py`` says which server may do what
in a view. These rules add the log of updates, the joining of a backup, and patience:

- A backup that joins says its position. It gets the updates after it if the log reaches that position and the server
  lacks no more than programs that are at hand. Else it gets the state at one position, and the updates after that.
- A backup that begins to take a state has dropped its own, so it is at the start until it has all of the new one.
- What belongs to another epoch than the current one changes nothing, whether it is a part of a state, an
  acknowledgment or a lost connection.
- A backup that had another outcome of an update than the primary has other values. It is lost. When it joins again with
  a position that is no later than the primary's was then, that does not count: it gets the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, final

from replicax._ps.store.ack_patience import AckPatience
from replicax._ps.store.group_rules import GroupRules, Partner, Place, Refusal, View
from replicax._ps.store.log import START, Position, UpdateLog
from replicax._src.program_kit.errors import MessageError, UnavailableError

_FEW: Final = 4
_ROUNDS: Final = 4


class Logged(Protocol):
    """An update as the log keeps it.

    Attributes:
      position: The place of the update.
      outcome: The result on the primary; None until it is known.
    """

    @property
    def position(self) -> Position: ...

    @property
    def outcome(self) -> str | None: ...

    def agrees(self, outcome: str) -> bool:
        """True if the backup's outcome is compatible with the primary's."""
        ...


T = TypeVar("T", bound=Logged)


@final
@dataclass(frozen=True)
class Ordered:
    """The place of a client's message.

    Attributes:
      place: Its place in the term of this primary.
      position: The position of the store after it.
      epoch: The epoch in which it is sent to the backup.
      is_logged: True if the log keeps it.
      is_sent: True if the backup gets it now. Else it gets it later, or there is none.
    """

    place: Place
    position: Position
    epoch: int
    is_logged: bool
    is_sent: bool


class NextStep(StrEnum):
    """What a thread does that has a client's answer."""

    ANSWER = "answer"
    READ = "read"
    """It reads the backup's next acknowledgment, for all that wait."""
    WAIT = "wait"


class CopyPlace(NamedTuple):
    """The position of a joining backup, and the digests of the programs it lacks; None if it lacks more."""

    position: Position
    lacks: Sequence[str] | None


class Bring(NamedTuple):
    """What a joining backup gets first: the state at a position, or only the programs that it lacks there."""

    at: Position
    is_state: bool


@final
class CopyRules(Generic[T]):
    """The rules of one copy. Not thread-safe.

    Args:
      group: The number of the group.
      task: The number of the server.
      log_bytes: The most bytes of updates that the backup lacks.

    Attributes:
      role: The role of the server.
      log: The updates that the backup lacks.
      patience: How long the backup may be silent.
      lacks: The digests of the programs that a restored store lacks. None if it lacks more and needs the whole state.
      error: The last problem with the backup, as text.
      is_closed: True once the coordinator's session has ended.
    """

    def __init__(self, group: int, task: int, log_bytes: int):
        self._group, self._task = group, task
        self.role = GroupRules(task)
        self.log = UpdateLog[T](log_bytes)
        self.patience = AckPatience()
        self.lacks: Sequence[str] | None = ()
        self.error = ""
        self.is_closed = False
        self._is_reading = False
        self._opened_epoch = 0
        self._differed_at = START.seq  # a backup that is not beyond may differ
        self._taking: tuple[int, Position] | None = None  # the epoch and position of the state that arrives

    def restored(self, position: Position, lacks: Sequence[str] | None) -> None:
        """Records that the server starts from a snapshot."""
        self.role.restored(position)
        self.lacks = lacks

    def is_of_now(self, epoch: int) -> bool:
        """True if a connection or a message of an epoch is still in use."""
        return epoch == self.role.epoch and not self.is_closed

    def take(self, view: View) -> bool:
        """Applies a view. Returns True if it is new.

        Raises:
          InvalidArgumentError: This server lacks data that its role in the view needs.
        """
        was_primary = self.role.is_primary
        if not self.role.take(view):
            return False
        if not self.role.is_primary:
            self.log.end()
        elif not was_primary:
            self._begin_log()
            self.lacks = ()
            self._differed_at = START.seq
        if view.is_differing and not self.role.is_primary:
            self.lacks = None
        self._taking = None
        return True

    @property
    def brings(self) -> bool:
        """True if this server must send its backup what that lacks."""
        return self.role.partner is Partner.JOINING

    # --- the primary: clients -----------------------------------------------------------------------------------

    def order(self, now: float, *, is_change: bool, is_snapshot: bool = False) -> Ordered:
        """Returns the place of a client's message, which is applied next.

        Raises:
          UnavailableError: The message must be sent to another server.
        """
        place = self.role.order(is_change=is_change)
        is_sent = self.role.partner is Partner.IN_SYNC
        if is_snapshot:
            self.patience.order_snapshot(place.seq, now)
        return Ordered(place, self.role.position, self.role.epoch, is_change or is_sent, is_sent)

    def opens(self, epoch: int) -> int | None:
        """Returns the backup to connect to, if it has had everything from the beginning. It is tried once per epoch."""
        view = self.role.view
        if view is None or view.epoch != epoch or view.backup is None or self._opened_epoch == epoch:
            return None
        self._opened_epoch = epoch
        return view.backup

    def charge(self, seq: int, num_bytes: int) -> int | None:
        """Counts the memory of a kept update. Returns the epoch whose backup is lost if that fills the log."""
        self.log.charge(seq, num_bytes)
        return None if self.log.is_on or not self.role.has_partner else self.role.epoch

    @property
    def has_much_waiting(self) -> bool:
        """True if updates should be slowed down, because the joining backup lacks much."""
        return self.role.partner is Partner.JOINING and self.log.is_half_full and not self.is_closed

    def next_step(self, place: Place, left_s: float, *, can_read: bool) -> NextStep:
        """Returns what the thread does that has the answer to the message at a place.

        Args:
          place: The place of the message.
          left_s: The seconds that the client still waits.
          can_read: True if there is a connection to the backup.

        Raises:
          UnavailableError: The message may or may not be lost. The client must send it again.
        """
        if self.is_closed:
            raise UnavailableError("The coordinator's session on this parameter server has ended.")
        if self.role.may_answer(place):
            return NextStep.ANSWER
        if left_s <= 0:
            raise UnavailableError(
                f"The update was not acknowledged in time: the backup of group {self._group} is {self.role.partner}. "
                f"{self.error}"
            )
        if can_read and self.role.partner is Partner.IN_SYNC and not self._is_reading:
            self._is_reading = True
            return NextStep.READ
        return NextStep.WAIT

    def has_read(self) -> None:
        """Records that the thread that reads has an acknowledgment, or has failed. Another one may read."""
        self._is_reading = False

    # --- the primary: its backup --------------------------------------------------------------------------------

    def acknowledged(self, epoch: int, seq: int, outcome: str, now: float, *, writes: bool) -> bool:
        """Records that the backup of an epoch has applied a message. Returns False if it differs, and is lost."""
        if epoch != self.role.epoch:
            return True  # of a backup that was dropped
        self.patience.said(seq, now, writes=writes)
        entry = self.log.get(seq)
        if entry is not None and not entry.agrees(outcome):
            self.error = (
                f"Message {seq} gave {outcome or 'no outcome'!r} on the backup, unlike on the primary."
            )
            self._differs()
            self.role.lose(epoch)
            return False
        self.log.acknowledge(seq)
        self.role.acknowledge(epoch, seq)
        return True

    def refused(self, epoch: int, why: Refusal) -> None:
        """Records that the backup of an epoch refused a message."""
        if epoch == self.role.epoch:
            self.error = f"The backup refuses what it is sent: {why}."
            self.role.refused(epoch, why)

    def lose(self, epoch: int, error: str) -> None:
        """Records that the backup of an epoch cannot be reached, or lacks more than the log keeps."""
        if self.is_of_now(epoch) and self.role.has_partner:
            self.error = error
            self.role.lose(epoch)

    def check(self, epoch: int) -> None:
        """Raises UnavailableError if a newer view than that of an epoch has arrived."""
        if not self.is_of_now(epoch):
            raise _later_view()

    def bring(self, epoch: int, said: CopyPlace, num_at_hand: int) -> Bring:
        """Decides what the joining backup of an epoch gets first.

        Args:
          epoch: The epoch of the view in which it joins.
          said: The position and programs that it has said.
          num_at_hand: The number of programs among those that it lacks that this server has.

        Raises:
          UnavailableError: A newer view has arrived.
        """
        self.check(epoch)
        has_programs = said.lacks is not None and len(said.lacks) == num_at_hand
        is_alike = said.position.seq > self._differed_at or said.position == START
        if has_programs and is_alike and self.log.reaches(said.position):
            return Bring(said.position, is_state=False)
        self._begin_log()
        return Bring(self.role.position, is_state=True)

    def lacking(self, epoch: int, acked: int) -> list[T]:
        """Returns the updates that the joining backup lacks after a number.

        Raises:
          UnavailableError: A newer view has arrived, or the log was too small.
        """
        self.check(epoch)
        if not self.log.is_on:
            raise _later_view()
        return [entry for _, entry in self.log.after(acked)]

    def brought(self, epoch: int, entry: T, outcome: str) -> None:
        """Records that the joining backup of an epoch has applied an update that it lacked.

        Raises:
          UnavailableError: A newer view has arrived.
          MessageError: It differs.
        """
        self.check(epoch)
        seq = entry.position.seq
        if not entry.agrees(outcome):
            self._differs()
            raise MessageError(
                f"Message {seq} gave {outcome!r} on the backup, and {entry.outcome!r} on the primary."
            )
        self.log.acknowledge(seq)

    def synced(self, epoch: int, acked: int) -> bool:
        """Records that the joining backup has been sent everything so far, as ``GroupRules.synced``."""
        self.error = ""
        if not self.role.synced(epoch, acked):
            return False
        self.log.acknowledge(acked)  # it may have had updates already whose acknowledgments were lost
        return True

    def _differs(self) -> None:
        self.log.end()  # its entries are useless for the backup now
        self._differed_at = self.role.seq
        self.role.has_difference = True

    def _begin_log(self) -> None:
        self.log.begin(self.role.position)

    # --- the backup ---------------------------------------------------------------------------------------------

    def forwarded(self, epoch: int, seq: int) -> bool | Refusal:
        """Checks a primary's message. Returns True to apply it, False if it has been applied before, or a refusal."""
        return self.role.forwarded(epoch, seq)

    def applied(self, position: Position) -> None:
        """Records that the message at this position is applied."""
        self.role.applied(position)
        if self.role.is_primary:  # it became the primary while it applied this
            self._begin_log()

    def says_where(self, epoch: int) -> CopyPlace | None:
        """Returns what the primary of an epoch must know of a joining backup; None if that is refused."""
        return CopyPlace(self.role.position, self.lacks) if self.role.takes_copy(epoch) else None

    def resumes(self, epoch: int, at: Position) -> bool:
        """Records that this server has the programs that it lacked, and goes on from its position.

        Returns False if it has dropped what it had there, or another view has come; then nothing changes.
        """
        if self._taking is not None or self.role.position != at or not self.role.has_copy(epoch, at):
            return False
        self.lacks = ()
        return True

    def begins_state(self, epoch: int, at: Position) -> bool:
        """Records that the state at a position begins to arrive. Returns True if this server must drop its own."""
        if not self.role.takes_copy(epoch):
            return False
        self.role.dropped()
        self.lacks = ()
        self._taking = epoch, at
        return True

    def takes_part(self, epoch: int, at: Position) -> bool:
        """True if a part of the state at a position belongs to the state that is arriving."""
        return self.role.takes_copy(epoch) and self._taking == (epoch, at)

    def takes_program(self, epoch: int, at: Position) -> bool:
        """True if a program is for what this server has, because no state is arriving."""
        return self.role.takes_copy(epoch) and self._taking is None and self.role.position == at

    def has_state(self, epoch: int, at: Position) -> bool:
        """Records that all of the state at a position has arrived. Returns False if another transfer has begun."""
        if not self.takes_part(epoch, at) or not self.role.has_copy(epoch, at):
            return False
        self._taking = None
        return True


def is_last_round(left: int, num_lacking: int) -> bool:
    """True if the order must be held while these updates are sent, so that the backup has all of them afterwards."""
    return not left or num_lacking <= _FEW


def rounds() -> Sequence[int]:
    """Returns the number of rounds that are left after each round of sending updates to a joining backup."""
    return range(_ROUNDS - 1, -1, -1)


def _later_view() -> UnavailableError:
    return UnavailableError("A newer view of this group has arrived. Send the request again.")
