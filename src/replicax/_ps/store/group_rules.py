"""The rules for one server's copy of a group of shards: order, apply, answer. Pure: no clock, no transport.

With replication, the shards of parameter server g form *group* g. Two servers hold a group: the *primary*,
which clients talk to, and the *backup*. A ``View`` names both. Only the coordinator makes views, each with a
higher *epoch* than the one before. The rules:

- The primary numbers the messages of clients in the order in which it applies them. It sends each to the backup
  with its epoch. The backup applies only a message with its own epoch and the next number.
- The primary answers a client when the backup has acknowledged the message and all before it, so both servers
  have what was answered. This holds for reads too: a replaced primary finds out by asking the backup.
- A backup that becomes the primary refuses messages of the earlier primary, because its epoch is higher.
- A primary that cannot reach its backup answers no client until the coordinator has removed the backup.
- A backup that *joins* lacks data. The primary does not wait for it until it has sent what the backup lacks
  (``log.py``). From then on it waits for acknowledgments. Only then it tells the coordinator that the backup is
  in sync, which may now become the primary.
- A backup that had another outcome of a message than the primary has other values. The primary says so until it has
  copied everything to it. Until then the coordinator counts it as a server that has nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self, final

from replicax._ps.store.log import START, Position
from replicax._src.program_kit.errors import InvalidArgumentError, UnavailableError

FIRST_EPOCH: Final = 1
"""The epoch of a group's first view, in which its servers begin with nothing."""


@final
@dataclass(frozen=True)
class View:
    """The servers that hold the shards of a group.

    Attributes:
      group: The number of the group.
      epoch: A number higher than the epochs of all earlier views of the group.
      primary: The number of the parameter server that clients talk to.
      backup: The number of the server that has the second copy; None if there is none.
      is_joining: True if the backup has no data yet.
      is_differing: True if the backup that joins must get everything, because its data may differ from the primary's.
      since: The position of the primary from which a lost group resumes; later updates are lost. None if none was
        lost.
    """

    group: int
    epoch: int
    primary: int
    backup: int | None
    is_joining: bool = False
    since: Position | None = None
    is_differing: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """The servers that must learn of the view. The backup is first, because it must accept what the primary
        sends.
        """
        return (self.primary,) if self.backup is None else (self.backup, self.primary)

    def described(self) -> dict[str, Any]:
        """Returns the view as JSON."""
        return {
            "group": self.group,
            "epoch": self.epoch,
            "primary": self.primary,
            "backup": self.backup,
            "is_joining": self.is_joining,
            "since": self.since,
            "is_differing": self.is_differing,
        }

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Self:
        """Makes the view that ``described`` returned."""
        since = described["since"]
        return cls(**{**described, "since": None if since is None else Position(*since)})


class Partner(StrEnum):
    """The state of the backup, as the primary sees it."""

    NONE = "none"
    JOINING = "joining"
    """The primary is sending what it lacks; no client waits for it."""
    IN_SYNC = "in sync"
    """The primary answers no message before the backup has acknowledged it."""
    FAILED = "failed"
    """The primary could not send what it lacks. No client waits for it."""
    LOST = "lost"
    """It was in sync and does not answer. The primary answers no message until the coordinator has decided."""


class Refusal(StrEnum):
    """A reason why a backup does not accept a primary's message."""

    DEPOSED = "deposed"
    """The backup is itself the primary, in a view with a higher epoch."""
    INCOMPLETE = "incomplete"
    """The backup lacks earlier messages."""


class Place(NamedTuple):
    """The place of a message in the order: the server's term as the primary, and the message's number."""

    tenure: int
    seq: int


@final
class GroupRules:
    """The role of one server in one group. Not thread-safe.

    Args:
      task: The number of the server.

    Attributes:
      view: The newest view; None before the first.
      position: The position of the last message that this server ordered as primary or applied as backup.
      partner: The state of the backup, if this server is the primary.
      has_difference: True if the other server had another outcome of a message, and has not been copied since.
    """

    def __init__(self, task: int):
        self._task = task
        self.view: View | None = None
        self.position = START
        self.partner = Partner.NONE
        self.has_difference = False
        self._acked = self._synced_at = 0
        self._tenure = (
            0  # how often it became the primary: a message ordered in one term is never answered in another
        )
        self._has_all = True
        self._is_deposed = False

    @property
    def seq(self) -> int:
        """The number in ``position``."""
        return self.position.seq

    @property
    def epoch(self) -> int:
        """The epoch of the view; 0 before the first view."""
        return 0 if self.view is None else self.view.epoch

    @property
    def is_primary(self) -> bool:
        """True if this server serves clients, in the newest view that it has."""
        return self.view is not None and self.view.primary == self._task and not self._is_deposed

    @property
    def has_partner(self) -> bool:
        """True if this server is the primary and has a backup that is not lost."""
        return self.is_primary and self.partner in (Partner.JOINING, Partner.IN_SYNC)

    @property
    def is_backup(self) -> bool:
        """True if this server accepts a primary's messages."""
        return self.view is not None and self.view.backup == self._task

    def take(self, view: View) -> bool:
        """Applies a view. Returns True if it is new; an older view changes nothing.

        A joining backup may have more updates than the primary, or fewer.

        Raises:
          InvalidArgumentError: This server would be the primary or a backup in sync, but lacks updates that were
            answered, or updates that the coordinator expects it to have.
        """
        if view.epoch <= self.epoch:
            return False
        was_primary = self.is_primary
        keeps_all = self._has_all and not self._is_deposed
        if self.view is None:  # a process that missed the first view was not there then
            keeps_all = keeps_all and view.epoch == FIRST_EPOCH
        elif not (was_primary or self.is_backup):
            keeps_all = False
        joins = view.is_joining and view.backup == self._task
        if view.since is not None and view.primary == self._task:
            keeps_all = self.position == view.since  # it may have restarted since it said what it has
        if not keeps_all and not joins and self._task in view.members:
            raise InvalidArgumentError(
                f"ps {self._task} lacks updates of group {view.group}, so it cannot be a member of it in "
                f"epoch {view.epoch}. Let it join as a backup first."
            )
        self.view = view
        self._is_deposed = False
        if view.primary == self._task:
            self._has_all = True
        if joins:
            self._has_all = False
        if view.primary == self._task:
            self._begin_primary(view, is_new=not was_primary)
        else:
            self.partner = Partner.NONE
        return True

    def _begin_primary(self, view: View, is_new: bool) -> None:
        self._tenure += is_new
        self.has_difference = self.has_difference and not is_new
        self._acked = self._synced_at = self.seq
        if view.backup is None:
            self.partner = Partner.NONE
        else:
            self.partner = Partner.JOINING if view.is_joining else Partner.IN_SYNC

    # --- the primary ----------------------------------------------------------------------------------

    def order(self, *, is_change: bool = True) -> Place:
        """Returns the place of a client's message, which is applied next.

        A message that only reads needs a number if the backup must confirm it.

        Raises:
          UnavailableError: The message must be sent to another server.
        """
        self._check_primary()
        if is_change or self.partner is Partner.IN_SYNC:
            self.position = Position(self.epoch, self.seq + 1)
        return Place(self._tenure, self.seq)

    def may_answer(self, place: Place) -> bool:
        """True if the loss of one server can no longer lose the message at a place, nor any before it.

        Raises:
          UnavailableError: The message may or may not be lost. The client must send it again, to the next
            primary.
        """
        self._check_primary()
        if place.tenure != self._tenure:
            raise self._not_primary()
        if self.partner is Partner.IN_SYNC:
            return self._acked >= place.seq
        return self.partner is not Partner.LOST

    def acknowledge(self, epoch: int, seq: int) -> None:
        """Records that the backup of an epoch has applied all messages up to a number."""
        if epoch == self.epoch and self.is_primary:
            self._acked = max(self._acked, seq)

    def refused(self, epoch: int, why: Refusal) -> None:
        """Records that the backup of an epoch refused a message."""
        if epoch == self.epoch and why is Refusal.DEPOSED:
            self._is_deposed = True
        else:
            self.lose(epoch)

    def lose(self, epoch: int) -> None:
        """Records that the backup of an epoch cannot be reached, or differs from the primary."""
        if epoch != self.epoch or not self.is_primary:
            return
        if self.partner is Partner.IN_SYNC:
            self.partner = Partner.LOST
        elif self.partner is Partner.JOINING:
            self.partner = Partner.FAILED

    def synced(self, epoch: int, acked: int) -> bool:
        """Records that the joining backup has been sent everything so far and will be sent everything later.

        Args:
          epoch: The epoch of the view.
          acked: The number of the last message that the backup has acknowledged.

        Returns:
          False if another view has replaced this one.
        """
        if epoch != self.epoch or not self.is_primary or self.partner is not Partner.JOINING:
            return False
        self.partner, self._synced_at, self._acked = Partner.IN_SYNC, self.seq, acked
        self.has_difference = False
        return True

    # --- the backup -----------------------------------------------------------------------------------

    def forwarded(self, epoch: int, seq: int) -> bool | Refusal:
        """Checks a primary's message. Returns True to apply it, False if it has been applied before, or a
        refusal.
        """
        if epoch < self.epoch and self.is_primary:
            return Refusal.DEPOSED
        # (In a later view with the same primary this server joins, and that primary has not received the view
        # yet.)
        if epoch != self.epoch or not self.is_backup or not self._has_all or seq > self.seq + 1:
            return Refusal.INCOMPLETE
        return seq == self.seq + 1

    def applied(self, position: Position) -> None:
        """Records that the message at this position is applied."""
        self.position = position

    def takes_copy(self, epoch: int) -> bool:
        """True if the primary of that epoch must send the state to this server."""
        return epoch == self.epoch and self.is_backup and not self._has_all

    def has_copy(self, epoch: int, position: Position) -> bool:
        """Records that this server has everything up to a position. Returns False if the epoch is no longer
        current.
        """
        if not self.takes_copy(epoch):
            return False
        self.position, self._has_all = position, True
        return True

    def restored(self, position: Position) -> None:
        """Records that this server starts from a snapshot, so it may lack later messages."""
        self.position, self._has_all = position, False

    def dropped(self) -> None:
        """Records that the backup has dropped its data."""
        self.position = START

    # --- for the coordinator --------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Returns the role as JSON: ``epoch``, ``role``, ``position``, and on a primary the state of the
        ``backup``, and if the other server ``differs``.
        """
        role = "primary" if self.is_primary else "backup" if self.is_backup else "none"
        backup = self.partner
        if backup is Partner.IN_SYNC and self._acked < self._synced_at:
            backup = Partner.JOINING  # messages that were answered before it joined may not have arrived yet
        return {
            "epoch": self.epoch,
            "role": role,
            "position": list(self.position),
            "backup": str(backup),
            "differs": self.has_difference,
        }

    def _check_primary(self) -> None:
        if not self.is_primary:
            raise self._not_primary()

    def _not_primary(self) -> UnavailableError:
        where = "" if self.view is None else f" of epoch {self.view.epoch}"
        return UnavailableError(
            f"ps {self._task} does not serve this group of variables, in the view{where} that it has. Ask the "
            "other server that holds the group.",
            f"ps {self._task}",
        )
