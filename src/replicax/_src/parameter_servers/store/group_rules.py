"""The rules for one server's copy of a group's pieces: order, apply, answer. Pure: no clock, no transport.

With replication the pieces that would be on parameter server g are *group* g: two servers have them, the *primary*,
which clients talk to, and the *backup*. Who is what is a ``View``; the coordinator alone makes them, each with a higher
*epoch* than the one before. The rules:

- The primary gives each message of a client a number, in the order in which it applies them, and sends it to the backup
  with its epoch. The backup applies what comes with its own epoch and the next number, and nothing else.
- The primary answers a client when the backup has said that it has applied the message and all before it: what was
  answered is on both. That is so for what only reads, too: who was followed by another primary finds out by asking.
- A backup that is made the primary takes nothing of the one before it any more, as its epoch is a higher one.
- A primary that cannot reach its backup answers nobody until the coordinator has said that it is alone.
- A backup that *joins* lacks something. The primary is as good as alone until it has brought it what it lacks
  (``log.py``), and needs its word from then on; only after that it tells the coordinator, which may then make it the
  primary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self, final

from replicax._src.errors import InvalidArgumentError
from replicax._src.parameter_servers.errors import UnavailableError
from replicax._src.parameter_servers.store.log import START, Position


@final
@dataclass(frozen=True)
class View:
    """Says which servers have the pieces of a group.

    Attributes:
      group: Its number.
      epoch: Higher than that of all views of the group before.
      primary: The number of the parameter server that clients talk to.
      backup: The number of the one that has the second copy; None if there is none.
      is_joining: The backup has nothing yet.
      since: The group was lost, and goes on from this position, that of the primary; what came after it is gone. None:
        it was not.
    """

    group: int
    epoch: int
    primary: int
    backup: int | None
    is_joining: bool = False
    since: Position | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The servers that have to know of it, in this order: a backup has to take what the primary sends."""
        return (self.primary,) if self.backup is None else (self.backup, self.primary)

    def described(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {
            "group": self.group,
            "epoch": self.epoch,
            "primary": self.primary,
            "backup": self.backup,
            "is_joining": self.is_joining,
            "since": self.since,
        }

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Self:
        """The view that ``described`` came from."""
        since = described["since"]
        return cls(**{**described, "since": None if since is None else Position(*since)})


class Partner(StrEnum):
    """The state of the backup, as the primary sees it."""

    NONE = "none"
    JOINING = "joining"
    """What it lacks is being brought; nobody waits for it."""
    IN_SYNC = "in sync"
    """Nothing is answered without its word."""
    FAILED = "failed"
    """It could not be brought what it lacks. Nobody waits for it."""
    LOST = "lost"
    """It was in sync and does not answer: nothing is answered until the coordinator has decided."""


class Refusal(StrEnum):
    """A reason for which a backup does not take what a primary sends."""

    DEPOSED = "deposed"
    """It is the primary, in a view with a higher epoch."""
    INCOMPLETE = "incomplete"
    """The backup does not have what came before."""


class Place(NamedTuple):
    """The place of a message in the order: the server's term as the primary, and the number of the message."""

    tenure: int
    seq: int


@final
class GroupRules:
    """One server's part in one group. Not for several threads at once.

    Args:
      task: The number of the server.

    Attributes:
      view: The last one that was taken; None before the first.
      position: The position of the last message that was ordered here, or that a backup applied.
      partner: The state of the backup, if this is the primary.
    """

    def __init__(self, task: int):
        self._task = task
        self.view: View | None = None
        self.position = START
        self.partner = Partner.NONE
        self._acked = self._synced_at = 0
        self._tenure = (
            0  # how often it became the primary: nothing ordered in one term is answered in another
        )
        self._has_all = True
        self._is_deposed = False

    @property
    def seq(self) -> int:
        """The number of ``position``."""
        return self.position.seq

    @property
    def epoch(self) -> int:
        """The epoch of the view; 0 before the first."""
        return 0 if self.view is None else self.view.epoch

    @property
    def is_primary(self) -> bool:
        """True if it serves clients, as far as it knows."""
        return self.view is not None and self.view.primary == self._task and not self._is_deposed

    @property
    def has_partner(self) -> bool:
        """True if it is the primary, and there is a backup that has not been lost."""
        return self.is_primary and self.partner in (Partner.JOINING, Partner.IN_SYNC)

    @property
    def is_backup(self) -> bool:
        """True if it takes what a primary sends."""
        return self.view is not None and self.view.backup == self._task

    def take(self, view: View) -> bool:
        """The coordinator has decided. Returns whether that is new; an older view changes nothing.

        Where it is the backup that joins, it may have more than the primary, or less.

        Raises:
          InvalidArgumentError: It would be the primary, or a backup in sync, without having all that was answered; or
            what the coordinator takes for all.
        """
        if view.epoch <= self.epoch:
            return False
        was_primary = self.is_primary
        keeps_all = self._has_all and not self._is_deposed
        if self.view is not None and not (was_primary or self.is_backup):
            keeps_all = False
        joins = view.is_joining and view.backup == self._task
        if view.since is not None and view.primary == self._task:
            keeps_all = keeps_all or self.position == view.since
        if not keeps_all and not joins and self._task in view.members:
            raise InvalidArgumentError(
                f"ps {self._task} does not have all of group {view.group}, and cannot be a member of it in epoch {view.epoch} "
                "before it has."
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
        self._acked = self._synced_at = self.seq
        if view.backup is None:
            self.partner = Partner.NONE
        else:
            self.partner = Partner.JOINING if view.is_joining else Partner.IN_SYNC

    # --- the primary ----------------------------------------------------------------------------------

    def order(self, *, is_change: bool = True) -> Place:
        """The place of a client's message, which is applied next.

        What only reads needs a number where the backup is asked.

        Raises:
          UnavailableError: It is to be sent to another server.
        """
        self._check_primary()
        if is_change or self.partner is Partner.IN_SYNC:
            self.position = Position(self.epoch, self.seq + 1)
        return Place(self._tenure, self.seq)

    def may_answer(self, place: Place) -> bool:
        """True if one lost server cannot lose the message at a place any more, nor any before it.

        Raises:
          UnavailableError: It may be lost, or may be not: the client sends it again, to the next primary.
        """
        self._check_primary()
        if place.tenure != self._tenure:
            raise self._not_primary()
        if self.partner is Partner.IN_SYNC:
            return self._acked >= place.seq
        return self.partner is not Partner.LOST

    def acknowledge(self, epoch: int, seq: int) -> None:
        """The backup of an epoch has applied all up to a number."""
        if epoch == self.epoch and self.is_primary:
            self._acked = max(self._acked, seq)

    def refused(self, epoch: int, why: Refusal) -> None:
        """The backup of an epoch did not take something."""
        if epoch == self.epoch and why is Refusal.DEPOSED:
            self._is_deposed = True
        else:
            self.lose(epoch)

    def lose(self, epoch: int) -> None:
        """The backup of an epoch cannot be reached, or is not as the primary is."""
        if epoch != self.epoch or not self.is_primary:
            return
        if self.partner is Partner.IN_SYNC:
            self.partner = Partner.LOST
        elif self.partner is Partner.JOINING:
            self.partner = Partner.FAILED

    def synced(self, epoch: int, acked: int) -> bool:
        """The backup that joins is sent all up to here, and all from here on. Returns whether it still is the one.

        Args:
          acked: The number up to which it has said that it has all.
        """
        if epoch != self.epoch or not self.is_primary or self.partner is not Partner.JOINING:
            return False
        self.partner, self._synced_at, self._acked = Partner.IN_SYNC, self.seq, acked
        return True

    # --- the backup -----------------------------------------------------------------------------------

    def forwarded(self, epoch: int, seq: int) -> bool | Refusal:
        """A primary has sent a message: whether it is to be applied, or had been before; or why it is not taken."""
        if epoch < self.epoch and self.is_primary:
            return Refusal.DEPOSED
        # (In a later view with the same primary it joins: that primary has only not heard of it yet.)
        if epoch != self.epoch or not self.is_backup or not self._has_all or seq > self.seq + 1:
            return Refusal.INCOMPLETE
        return seq == self.seq + 1

    def applied(self, position: Position) -> None:
        """The message at this position is applied."""
        self.position = position

    def takes_copy(self, epoch: int) -> bool:
        """True if the primary of that epoch has to bring it the state."""
        return epoch == self.epoch and self.is_backup and not self._has_all

    def has_copy(self, epoch: int, position: Position) -> bool:
        """It has all up to a position; False if that is not for it any more."""
        if not self.takes_copy(epoch):
            return False
        self.position, self._has_all = position, True
        return True

    def restored(self, position: Position) -> None:
        """It begins with a snapshot: it lacks what came after that, if anything did."""
        self.position, self._has_all = position, False

    def dropped(self) -> None:
        """The backup has dropped what it had."""
        self.position = START

    # --- for the coordinator --------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Its part, as JSON: ``epoch``, ``role``, ``position``, and of a primary how the ``backup`` is."""
        role = "primary" if self.is_primary else "backup" if self.is_backup else "none"
        backup = self.partner
        if backup is Partner.IN_SYNC and self._acked < self._synced_at:
            backup = Partner.JOINING  # what was answered while it was not there may not have arrived yet
        return {"epoch": self.epoch, "role": role, "position": list(self.position), "backup": str(backup)}

    def _check_primary(self) -> None:
        if not self.is_primary:
            raise self._not_primary()

    def _not_primary(self) -> UnavailableError:
        where = "" if self.view is None else f" of epoch {self.view.epoch}"
        return UnavailableError(
            f"ps {self._task} does not serve this group of variables, in the view{where} that it knows: the other server that "
            "has them does.",
            f"ps {self._task}",
        )
