"""``GroupState``: the rules, the store and the connections that both roles of a server in a group use."""

from __future__ import annotations

import threading
from typing import Any, final

from replicax._ps.store.backup_way import BackupWay
from replicax._ps.store.copy_rules import CopyRules
from replicax._ps.store.group_entries import Entry
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message
from replicax._src.program_kit.errors import UnavailableError


@final
class GroupState:
    """The state of one server's copy of a group: see ``GroupCopy``.

    Attributes:
      order: The lock held while a message is forwarded and applied. A thread that holds ``changed`` never waits
        for it.
      changed: The lock and condition of the rules and the connections. It is held briefly.
      way: The connection to the backup that is in sync.
      joining_way: The connection to the backup that joins.
    """

    def __init__(self, group: int, task: int, incarnation: str, log_bytes: int):
        self.group, self.task, self.incarnation = group, task, incarnation
        self.order = threading.Lock()
        self.changed = threading.Condition()
        self.rules = CopyRules[Entry](group, task, log_bytes)
        self.store = self.new_store()
        self.way: BackupWay | None = None
        self.joining_way: BackupWay | None = None

    def new_store(self) -> Store:
        """Returns an empty store that belongs to the coordinator."""
        store = Store()
        store.hello(self.incarnation)
        return store

    def take_ways(self) -> list[BackupWay]:
        """Releases the connections to backups, for the caller to close. The caller holds ``changed``."""
        ways = [way for way in (self.way, self.joining_way) if way is not None]
        self.way = self.joining_way = None
        return ways

    def use(self, way: BackupWay) -> bool:
        """Uses a connection for the backup in sync. Closes it and returns False if a newer view has arrived."""
        with self.changed:
            is_of_now = self.rules.is_of_now(way.epoch)
            replaced = self.way
            if is_of_now:
                self.way, self.joining_way = way, None
                self.changed.notify_all()
        if not is_of_now:
            way.close()
        elif replaced is not None and replaced is not way:
            replaced.close()
        return is_of_now

    def message(self, epoch: int, entry: Entry) -> Message:
        """Returns the message that sends an entry to the backup."""
        return Message(
            {
                **self.fields("forward", epoch, entry.position.seq),
                "ordered_in": entry.position.epoch,
                "message": entry.header,
            },
            entry.arrays,
        )

    def fields(self, op: str, epoch: int, seq: int) -> dict[str, Any]:
        """Returns the header fields of every message to the backup."""
        return {
            "op": op,
            "incarnation": self.incarnation,
            "group": self.group,
            "epoch": epoch,
            "seq": seq,
        }

    def lose(self, epoch: int, error: Exception) -> None:
        """Marks the backup of an epoch as lost, and records the error."""
        with self.changed:
            self.rules.lose(epoch, str(error))
            self.changed.notify_all()

    def keeps(self, entry: Entry) -> bool:
        """True if the log keeps an entry."""
        with self.changed:
            return self.rules.log.get(entry.position.seq) is entry

    def own(self, entry: Entry) -> None:
        """Copies the arrays of an entry that the log keeps, and counts their memory. The caller holds ``order``.

        If that fills the log, the backup is lost.
        """
        if not self.keeps(entry):
            return
        entry.own()
        with self.changed:
            epoch = self.rules.charge(entry.position.seq, entry.num_bytes)
            if epoch is None:
                return
            way = self.joining_way
            self.changed.notify_all()
        error = f"The updates that the backup lacks take more than log_bytes={self.rules.log.max_bytes}."
        self.lose(epoch, UnavailableError(error))
        if way is not None and way.epoch == epoch:
            way.close()  # the thread that sends them notices and stops
