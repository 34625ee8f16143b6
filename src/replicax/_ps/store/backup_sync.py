"""``BackupSync`` brings a joining backup up to date. ``CopyTaker`` receives that data at the backup."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import final

from replicax._ps.store.backup_way import BackupWay
from replicax._ps.store.copy_rules import CopyPlace, is_last_round, rounds
from replicax._ps.store.group_entries import Entry
from replicax._ps.store.group_rules import Refusal, View
from replicax._ps.store.group_state import GroupState
from replicax._ps.store.log import START, Position
from replicax._ps.store.store import Store
from replicax._ps.store.store_state import program_messages, state_messages, take_part
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import UnavailableError

_log = logging.getLogger("replicax")


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
                self._state.rules.check(view.epoch)
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
        place, state = CopyPlace(Position(*said["position"]), said["lacks"]), None
        with self._state.order:
            programs = self._state.store.programs(place.lacks or ())
            with self._state.changed:
                first = self._state.rules.bring(view.epoch, place, len(programs))
            if first.is_state:
                state = self._state.store.state()
        resuming = itertools.chain(program_messages(programs), [({"part": "resume"}, ())])
        parts = resuming if state is None else state_messages(state)
        for header, arrays in parts:
            way.bring(Message({**fields, "position": list(first.at), **header}, arrays))
        return first.at.seq

    def _bring_rest(self, view: View, way: BackupWay, acked: int) -> None:
        """Sends the updates that follow the state. The last of them are sent while the order is held, so that
        none is added.
        """
        for left in rounds():
            with self._state.order:
                entries = self._lacking(view, acked)
                if is_last_round(left, len(entries)):
                    acked = self._bring_entries(view, way, entries, acked)
                    with self._state.changed:
                        is_one = self._state.rules.synced(view.epoch, acked)
                    if not is_one or not self._state.use(way):
                        raise UnavailableError(
                            "The backup no longer joins: another view has come, or it is lost."
                        )
                    return
            acked = self._bring_entries(view, way, entries, acked)

    def _lacking(self, view: View, acked: int) -> list[Entry]:
        """Returns the updates that the backup lacks. The caller holds ``order``."""
        with self._state.changed:
            entries = self._state.rules.lacking(view.epoch, acked)
        for entry in entries:
            self._state.own(entry)
        return entries

    def _bring_entries(self, view: View, way: BackupWay, entries: Sequence[Entry], acked: int) -> int:
        """Sends these updates. Returns the number of the last one that the backup acknowledged."""
        for entry in entries:
            taken = way.bring(self._state.message(view.epoch, entry))
            acked = entry.position.seq
            with self._state.changed:
                self._state.rules.brought(view.epoch, entry, taken["outcome"])
                self._state.changed.notify_all()
        return acked


@final
class CopyTaker:
    """The backup's side: it builds a store from what the primary sends."""

    def __init__(self, state: GroupState):
        self._state = state
        self._new: tuple[int, Store] | None = None  # the store that is built, and the epoch of its primary

    def begin(self) -> None:
        """Drops what an earlier primary has sent."""
        self._new = None

    def take(self, epoch: int, message: Message) -> Message:
        """Applies one part of the primary's data. A part that is refused changes nothing."""
        rules, part = self._state.rules, message.header["part"]
        if part == "where":
            with self._state.order, self._state.changed:
                place = rules.says_where(epoch)
            if place is None:
                return _brought(False, START)
            return Message(
                {"applied": 0, "outcome": "", "position": list(place.position), "lacks": place.lacks}
            )
        at = Position(*message.header["position"])
        if part == "resume":
            with self._state.order, self._state.changed:
                return _brought(rules.resumes(epoch, at), at)
        if part == "state" and not self._begin(epoch, at):
            return _brought(False, at)
        store = self._store_for(epoch, at, part)
        if store is None:
            return _brought(False, at)
        if take_part(store, message.header, message.arrays):
            with self._state.order, self._state.changed:
                if not rules.has_state(epoch, at):
                    return _brought(False, at)
                self._state.store, self._new = store, None
        return _brought(True, at)

    def _begin(self, epoch: int, at: Position) -> bool:
        """Replaces the store by an empty one, and begins to build another. Returns False if that is refused."""
        with self._state.order:
            with self._state.changed:
                if not self._state.rules.begins_state(epoch, at):
                    return False
            self._state.store.leave()  # before the new store is made: memory may not hold both
            self._state.store = self._state.new_store()
            self._new = epoch, self._state.new_store()
        return True

    def _store_for(self, epoch: int, at: Position, part: str) -> Store | None:
        """Returns the store that takes a part; None if it is refused.

        A part is applied after the check, without a lock. A newer view builds a store of its own, so this changes
        nothing that is used. A program that arrives late changes nothing either.
        """
        with self._state.changed:
            if self._state.rules.takes_part(epoch, at):
                new = self._new
                return None if new is None or new[0] != epoch else new[1]
            is_own = part == "program" and self._state.rules.takes_program(epoch, at)
            return self._state.store if is_own else None


def _brought(is_taken: bool, at: Position) -> Message:
    return Message({"applied": at.seq, "outcome": ""} if is_taken else {"refused": str(Refusal.INCOMPLETE)})
