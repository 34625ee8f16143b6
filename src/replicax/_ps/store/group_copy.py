"""``GroupCopy``: one parameter server's copy of a group of shards, as primary or backup (see ``group_rules.py``)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

from replicax._ps.store.backup_sync import BackupSync, CopyTaker
from replicax._ps.store.backup_way import BackupWay
from replicax._ps.store.copy_rules import NextStep
from replicax._ps.store.group_entries import Entry, applied, is_change, is_refusal, is_snapshot
from replicax._ps.store.group_rules import Partner, Place, Refusal, View
from replicax._ps.store.group_state import GroupState
from replicax._ps.store.keeper_rules import Progress
from replicax._ps.store.log import DEFAULT_LOG_BYTES, Position
from replicax._ps.store.snapshot_keeper import SnapshotKeeper
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import SnapshotError, UnavailableError

_log = logging.getLogger("replicax")

_WAIT_S: Final = 50.0
"""The longest wait for the backup's acknowledgment or the coordinator's decision. Clients give up after 60 s."""
_ROOM_S: Final = 20.0
"""The longest delay of an update's answer while a joining backup lacks much. It slows clients down but never
blocks them.
"""


@final
class GroupCopy:
    """A store, the connection to the other server of the group, and the rules. All methods are thread-safe.

    ``CopyRules`` decides. ``GroupState`` has the parts and the two locks. ``BackupSync`` brings a joining backup up to
    date.

    Args:
      group: The number of the group.
      task: The number of this server.
      incarnation: The session id of the coordinator.
      connect: Returns a client of another server, given the server's number.
      log_bytes: The most memory for updates that the backup lacks.
      keep: Makes its snapshot keeper, which may restore a snapshot. None turns snapshots off.

    Attributes:
      restored: The description of the snapshot that it started from; None if it started empty.
    """

    def __init__(
        self,
        group: int,
        task: int,
        incarnation: str,
        connect: Callable[[int], TaskClient],
        log_bytes: int = DEFAULT_LOG_BYTES,
        keep: Callable[[GroupCopy], SnapshotKeeper] | None = None,
    ):
        self._state = GroupState(group, task, incarnation, log_bytes)
        self._connect = connect
        self._sync = BackupSync(self._state, connect)
        self._taker = CopyTaker(self._state)
        self._keeper = None if keep is None else keep(self)
        self.restored = None if self._keeper is None else self._keeper.restored

    def take(self, view: View) -> None:
        """Applies the coordinator's decision about which servers hold the group.

        Raises:
          InvalidArgumentError: This server lacks data that its role in the view needs.
        """
        with self._state.changed:
            if view.epoch <= self._state.rules.role.epoch:
                return
            ways = self._state.take_ways()
        for way in ways:
            way.close()  # threads that wait on it check again
        with self._state.changed:
            if not self._state.rules.take(view):
                return
            self._state.changed.notify_all()
            brings = self._state.rules.brings
            if view.backup == self._state.task and view.is_joining:
                self._taker.begin()
        if brings:
            threading.Thread(
                target=self._sync.bring, args=(view,), name=f"replicax-copy-{self._state.group}", daemon=True
            ).start()

    def answer(self, message: Message) -> Message:
        """Executes a client's request. Returns when the loss of one server can no longer lose its effect.

        Other errors than the one below are the store's.

        Raises:
          UnavailableError: The client must send it again, maybe to the other server. It may or may not have been
            applied.
        """
        is_update = is_change(message.header)
        with self._state.order:
            with self._state.changed:
                ordered = self._state.rules.order(
                    time.monotonic(), is_change=is_update, is_snapshot=is_snapshot(message.header)
                )
                entry = Entry(ordered.position, message if is_update else None)
                if ordered.is_logged:
                    self._state.rules.log.append(entry.position, entry)
            if ordered.is_sent:
                self._send(ordered.epoch, entry)
            began = time.monotonic()
            answer, error, outcome = self._apply(message)
            now = time.monotonic()
            with self._state.changed:
                entry.outcome = outcome if is_update else ""  # the backup does not execute reads
                entry.is_refused = is_update and is_refusal(message.header, error)
                self._state.rules.patience.took(now - began, now)
            if is_update and not ordered.is_sent:
                self._state.own(entry)
        until = time.monotonic() + _WAIT_S
        if is_update:
            self._wait_for_room()
        try:
            self._wait(ordered.place, until)
        finally:
            if self._state.keeps(entry):  # the backup may still need it
                with self._state.order:
                    self._state.own(entry)
        if error is not None:
            raise error
        assert answer is not None
        if message.header.get("op") == "checksum":  # the backup's was equal, or it is no longer in sync
            return Message({**answer.header, "is_on_two": self._state.rules.role.partner is Partner.IN_SYNC})
        return answer

    def forwarded(self, message: Message) -> Message:
        """Applies a message that the primary has forwarded, or a part of the state that it sends."""
        header = message.header
        epoch, seq = header["epoch"], header["seq"]
        if header["op"] == "copy":
            return self._taker.take(epoch, message)
        with self._state.order:
            with self._state.changed:
                answer = self._state.rules.forwarded(epoch, seq)
            if isinstance(answer, Refusal):
                return Message({"refused": str(answer)})
            outcome = ""
            inner = header["message"]
            if answer and inner is not None:
                _, _, outcome = self._apply(Message(inner, message.arrays))
            if answer:
                with self._state.changed:
                    self._state.rules.applied(Position(header["ordered_in"], seq))
        return Message({"applied": seq, "outcome": outcome, "writes": self._writes})

    def statistics(self) -> dict[str, Any]:
        """The statistics of the store and of its snapshots."""
        return {
            **self._state.store.statistics(),
            **({} if self._keeper is None else self._keeper.statistics()),
        }

    @property
    def is_primary(self) -> bool:
        """True if this server serves clients, in the newest view that it has."""
        with self._state.changed:
            return self._state.rules.role.is_primary

    def described(self) -> dict[str, Any]:
        """Returns the role of this server (see ``GroupRules.described``), the last error of the backup, and the
        update count.
        """
        updates = self._state.store.statistics()["updates"]
        with self._state.changed:
            return {
                **self._state.rules.role.described(),
                "error": self._state.rules.error,
                "updates": updates,
            }

    def close_keeper(self) -> None:
        """Takes a last snapshot, while the store still exists."""
        if self._keeper is not None:
            self._keeper.close()

    def close(self) -> None:
        """Closes the connections and drops the store. Threads that wait raise UnavailableError."""
        if self._keeper is not None:
            self._keeper.end()
        with self._state.changed:
            self._state.rules.is_closed = True
            ways = self._state.take_ways()
            self._state.changed.notify_all()
        for way in ways:
            way.close()
        self._state.store.leave()

    # --- snapshots, for the keeper -----------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """Returns counters that change with the store, for the snapshot keeper."""
        return self._state.store.progress._replace(position=self.position)

    @property
    def position(self) -> Position:
        """The position of the last update that was applied."""
        with self._state.changed:
            return self._state.rules.role.position

    def order_snapshot(self) -> None:
        """Orders a snapshot on both servers, at the same place in the order of updates. Only the primary does
        this.

        The primary then knows that the backup may delay an update until there is memory beside the snapshot.
        """
        with contextlib.suppress(UnavailableError):  # another server is the primary, or none is
            self.answer(Message({"op": "snapshot", "incarnation": self._state.incarnation}))

    def snapshot(self, directory: Path, epoch: int = 0, kept_epoch: int = 0) -> dict[str, Any]:
        """Writes a snapshot with the position of the last update: see ``Store.snapshot``.

        Raises:
          SnapshotError: It could not be written.
        """
        store = self._state.store

        @contextlib.contextmanager
        def moment() -> Iterator[Mapping[str, Any]]:
            with self._state.order:
                if self._state.rules.is_closed or store is not self._state.store:
                    raise SnapshotError(
                        f"The copy of group {self._state.group} is being replaced. The next snapshot will be of "
                        "the new copy."
                    )
                yield {"position": list(self.position)}

        return store.snapshot(directory, epoch, kept_epoch, moment)

    @property
    def session(self) -> int:
        return self._state.store.session

    def restore(
        self, directory: Path, epoch: int | None = None, session: int | None = None
    ) -> dict[str, Any] | None:
        """Restores the newest intact snapshot if it belongs to this coordinator: see ``Store.restore``.

        A snapshot has the whole state at its position, without programs and without gradients that wait for their
        round.
        """
        told = self._state.store.restore(directory, epoch, session)
        if told is not None and told["incarnation"] == self._state.incarnation:
            with self._state.changed:
                lacks = None if told["num_held_gradients"] else told["programs"]
                self._state.rules.restored(Position(*told["position"]), lacks)
            return told
        self._state.store = self._state.new_store()
        return None

    def _apply(self, message: Message) -> tuple[Message | None, Exception | None, str]:
        """Applies a message. The caller holds ``order``."""
        if not is_snapshot(message.header):
            return applied(self._state.store, message)
        if self._keeper is not None:
            self._keeper.ask()
        return Message({}), None, ""

    @property
    def _writes(self) -> bool:
        return self._keeper is not None and self._keeper.is_writing

    # --- the primary: forwarding -----------------------------------------------------------------------

    def _send(self, epoch: int, entry: Entry) -> None:
        """Sends an entry to the backup. The caller holds ``order``. ``_wait`` raises a failure."""
        try:
            way = self._state.way or self._open(epoch)
            if way is not None and way.epoch == epoch:
                way.send(self._state.message(epoch, entry), self._ack_s())
        except Exception as error:
            self._state.lose(epoch, error)

    def _open(self, epoch: int) -> BackupWay | None:
        """Opens the connection to a backup that has had everything from the beginning. It tries once per epoch."""
        with self._state.changed:
            backup = self._state.rules.opens(epoch)
        if backup is None:
            return None
        way = BackupWay(epoch, self._connect(backup))
        return way if self._state.use(way) else None

    # --- the primary: waiting --------------------------------------------------------------------------

    def _wait(self, place: Place, until: float) -> None:
        """Waits until the message at a place may be answered. One of the waiting threads reads from the backup."""
        while True:
            with self._state.changed:
                way = self._reads_next(place, until)
            if way is None:
                return
            # Use the full limit, even if this thread may wait less: a reader with a short limit would lose a
            # healthy backup.
            self._read(way, self._ack_s())

    def _wait_for_room(self) -> None:
        """Waits while the joining backup lacks much, so that updates arrive more slowly than they are sent to it."""
        with self._state.changed:
            self._state.changed.wait_for(lambda: not self._state.rules.has_much_waiting, _ROOM_S)

    def _ack_s(self) -> float:
        with self._state.changed:
            return self._state.rules.patience.ack_s(time.monotonic())

    def _reads_next(self, place: Place, until: float) -> BackupWay | None:
        """Returns None once the message may be answered, else the connection that this thread must read next.

        The caller holds ``changed``.
        """
        while True:
            way, left_s = self._state.way, until - time.monotonic()
            match self._state.rules.next_step(place, left_s, can_read=way is not None):
                case NextStep.ANSWER:
                    return None
                case NextStep.READ:
                    return way
                case NextStep.WAIT:
                    self._state.changed.wait(left_s)

    def _read(self, way: BackupWay, left_s: float) -> None:
        try:
            header = way.receive(left_s)
        except Exception as error:
            self._state.lose(way.epoch, error)
            with self._state.changed:
                self._state.rules.has_read()
                self._state.changed.notify_all()
            return
        with self._state.changed:
            self._state.rules.has_read()
            self._note(way.epoch, header)
            self._state.changed.notify_all()

    def _note(self, epoch: int, header: Mapping[str, Any]) -> None:
        """Records the backup's answer to a message. The caller holds ``changed``."""
        rules = self._state.rules
        if "refused" in header:
            rules.refused(epoch, Refusal(header["refused"]))
            return
        said = header["applied"], header["outcome"], time.monotonic()
        if not rules.acknowledged(epoch, *said, writes=header["writes"]):
            _log.error(
                "The two copies of group %d differ: %s The backup is dropped and will be copied again. Check that "
                "both machines have the same jaxlib and the same kind of CPU.",
                self._state.group,
                rules.error,
            )
