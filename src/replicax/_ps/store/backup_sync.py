"""``BackupSync`` brings a joining backup up to date. ``CopyTaker`` receives that data at the backup."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final, final

from replicax._ps.store.backup_way import BackupWay
from replicax._ps.store.group_entries import Entry
from replicax._ps.store.group_rules import Refusal, View
from replicax._ps.store.group_state import GroupState
from replicax._ps.store.log import Position
from replicax._ps.store.store import Store
from replicax._ps.store.store_state import program_messages, state_messages, take_part
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import MessageError, UnavailableError

_log = logging.getLogger("replicax")

_FEW: Final = 4
_ROUNDS: Final = 4


@final
class BackupSync:
    """The primary's side: it sends the updates that the backup lacks, or first the state and then the later
    updates.

    Args:
      state: The state of the group on this server.
      connect: Returns a client of another server, given the server's number.
    """

    def __init__(self, state: GroupState, connect: Callable[[int], TaskClient]):
        self._state, self._connect = state, connect

    def bring(self, view: View) -> None:
        """Sends the backup of a view everything it lacks, then marks it as in sync, unless a newer view has
        arrived.
        """
        assert view.backup is not None
        way = None
        try:
            way = BackupWay(view.epoch, self._connect(view.backup))
            with self._state.changed:
                if self._state.rules.epoch != view.epoch or self._state.is_closed:
                    raise _later_view()
                self._state.joining_way = way
            acked = self._bring_state(view, way)
            self._bring_rest(view, way, acked)
        except Exception as error:
            _log.info(
                "Could not bring the copy of group %d on ps %d up to date: %s",
                self._state.group,
                view.backup,
                error,
            )
            self._state.lose(view.epoch, error)
            if way is not None:
                way.close()

    def _bring_state(self, view: View, way: BackupWay) -> int:
        """Returns the number of the last update that the backup has: its own position if the log reaches it, else
        the state's.
        """
        fields = self._state.fields("copy", view.epoch, 0)
        said = way.bring(Message({**fields, "part": "where"}))
        at, state = Position(*said["position"]), None
        with self._state.order:
            programs = self._state.store.programs(said["lacks"] or ())
            with self._state.changed:
                if self._state.rules.epoch != view.epoch:
                    raise _later_view()
                is_resumed = said["lacks"] is not None and len(programs) == len(said["lacks"])
                is_resumed = is_resumed and self._state.log.reaches(at)
            if not is_resumed:
                with self._state.changed:
                    at = self._state.rules.position
                    self._state.log.begin(at)
                state = self._state.store.state()
        resuming = itertools.chain(program_messages(programs), [({"part": "resume"}, ())])
        parts = resuming if state is None else state_messages(state)
        for header, arrays in parts:
            way.bring(Message({**fields, "position": list(at), **header}, arrays))
        return at.seq

    def _bring_rest(self, view: View, way: BackupWay, acked: int) -> None:
        """Sends the updates that follow the state. The last of them are sent while the order is held, so that
        none is added.
        """
        for left in reversed(range(_ROUNDS)):
            with self._state.order:
                entries = self._lacking(view, acked)
                if not left or len(entries) <= _FEW:
                    acked = self._bring_entries(view, way, entries, acked)
                    with self._state.changed:
                        is_one = self._state.rules.synced(view.epoch, acked)
                        self._state.error = ""
                    if not is_one or not self._state.use(way):
                        raise _later_view()
                    return
            acked = self._bring_entries(view, way, entries, acked)

    def _lacking(self, view: View, acked: int) -> list[Entry]:
        """Returns the updates that the backup lacks. The caller holds ``order``."""
        with self._state.changed:
            if not self._state.log.is_on or self._state.rules.epoch != view.epoch:
                raise _later_view()
            entries = [entry for _, entry in self._state.log.after(acked)]
        for entry in entries:
            self._state.own(entry)
        return entries

    def _bring_entries(self, view: View, way: BackupWay, entries: Sequence[Entry], acked: int) -> int:
        """Sends these updates. Returns the number of the last one that the backup acknowledged."""
        for entry in entries:
            taken = way.bring(self._state.message(view.epoch, entry))
            acked = entry.position.seq
            with self._state.changed:
                if self._state.rules.epoch != view.epoch:
                    raise _later_view()
                if not entry.agrees(taken["outcome"]):
                    self._state.log.end()
                    raise MessageError(
                        f"Message {acked} gave {taken['outcome']!r} on the backup, and {entry.outcome!r} on the "
                        "primary."
                    )
                self._state.log.acknowledge(acked)
                self._state.changed.notify_all()
        return acked


@final
class CopyTaker:
    """The backup's side: it builds a store from what the primary sends."""

    def __init__(self, state: GroupState):
        self._state = state
        self._new: Store | None = None

    def begin(self) -> None:
        """Drops what an earlier primary has sent."""
        self._new = None

    def take(self, epoch: int, message: Message) -> Message:
        """Applies one part of the primary's data."""
        with self._state.changed:
            if not self._state.rules.takes_copy(epoch):
                return Message({"refused": str(Refusal.INCOMPLETE)})
        part = message.header["part"]
        if part == "where":
            with self._state.order, self._state.changed:
                said = {"position": list(self._state.rules.position), "lacks": self._state.lacks}
                return Message({"applied": 0, "outcome": "", **said})
        at = Position(*message.header["position"])
        if part == "resume":
            with self._state.order, self._state.changed:
                is_one = self._state.rules.position == at and self._state.rules.has_copy(epoch, at)
                self._state.lacks = ()
            return _brought(is_one, at)
        if part == "state":
            with self._state.order:
                with self._state.changed:
                    if not self._state.rules.takes_copy(epoch):
                        return _brought(False, at)
                    self._state.rules.dropped()
                self._state.store.leave()  # before the new store is made: memory may not hold both
                self._state.store = self._state.new_store()
                self._state.lacks = ()
            self._new = self._state.new_store()
        store = self._new
        if store is None and part == "program":  # for a store that was restored from its snapshot
            store = self._state.store
        if store is None:
            return _brought(False, at)
        if take_part(store, message.header, message.arrays):
            with self._state.order, self._state.changed:
                if not self._state.rules.has_copy(epoch, at):
                    return _brought(False, at)
                self._state.store, self._new = store, None
        return _brought(True, at)


def _brought(is_taken: bool, at: Position) -> Message:
    return Message({"applied": at.seq, "outcome": ""} if is_taken else {"refused": str(Refusal.INCOMPLETE)})


def _later_view() -> UnavailableError:
    return UnavailableError("A newer view of this group has arrived. Send the request again.")
