"""``GroupCopy``: one parameter server's copy of a group of pieces, as the primary or the backup
(``group_rules.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

from replicax._src.parameter_servers.client.server_stream import PsClient
from replicax._src.parameter_servers.errors import MessageError, SnapshotError, UnavailableError
from replicax._src.parameter_servers.store.backup_way import ACK_S, BackupWay
from replicax._src.parameter_servers.store.group_entries import Entry, applied, is_change, is_snapshot
from replicax._src.parameter_servers.store.group_rules import GroupRules, Partner, Place, Refusal, View
from replicax._src.parameter_servers.store.log import DEFAULT_LOG_BYTES, Position, UpdateLog
from replicax._src.parameter_servers.store.snapshot_keeper import SnapshotKeeper
from replicax._src.parameter_servers.store.store import Store
from replicax._src.parameter_servers.store.store_contents import Progress
from replicax._src.parameter_servers.store.store_snapshots import LONGEST_WAIT_S
from replicax._src.parameter_servers.store.store_state import StateTaker, program_messages, state_messages
from replicax._src.parameter_servers.transport.messages import Message

_log = logging.getLogger("replicax")

_WAIT_S: Final = 50.0
"""For the backup's word, or the coordinator's: who asks gives up after 60 s."""
_TIMES_AS_LONG: Final = 4.0
"""Besides, the backup may take so many times as long as the primary: what is compiled, say, or made, on a busy machine.
"""
_FEW: Final = 4
_ROUNDS: Final = 4
_ROOM_S: Final = 20.0
"""While much waits to be brought an update is answered so much later; not never, as bringing takes as long as it takes.
"""


@final
class GroupCopy:
    """A store, the way to the other server that has the same, and the rules. All methods may be called from any thread.

    Two locks: the *order*, held while a message is sent on and applied, which is never waited for with the other one;
    and ``_changed``, for the rules, held briefly.

    Args:
      group: Its number.
      task: The number of this server.
      incarnation: Of the coordinator.
      connect: Gives a client of another server, by its number.
      log_bytes: The most memory for updates that the backup lacks.
      keep: Makes the keeper of its snapshots, which may restore one; None: there are none.

    Attributes:
      restored: What the last snapshot before had, if it began with that.
    """

    def __init__(
        self,
        group: int,
        task: int,
        incarnation: str,
        connect: Callable[[int], PsClient],
        log_bytes: int = DEFAULT_LOG_BYTES,
        keep: Callable[[GroupCopy], SnapshotKeeper] | None = None,
    ):
        self._group, self._task, self._incarnation, self._connect = group, task, incarnation, connect
        self._rules = GroupRules(task)
        self._order = threading.Lock()
        self._changed = threading.Condition()
        self._store = self._new_store()
        self._way: BackupWay | None = None
        self._joining_way: BackupWay | None = None
        self._opened_epoch = 0
        self._patient_until = self._writes_until = 0.0
        self._snapshot_seq = 0
        self._lacks: Sequence[str] | None = ()
        self._is_reading = False
        self._is_closed = False
        self._log = UpdateLog[Entry](log_bytes)
        self._taker: StateTaker | None = None
        self._error = ""
        self._keeper = None if keep is None else keep(self)
        self.restored = None if self._keeper is None else self._keeper.restored

    def take(self, view: View) -> None:
        """The coordinator has decided who has the group.

        Raises:
          InvalidArgumentError: This server does not have what it would need.
        """
        with self._changed:
            if view.epoch <= self._rules.epoch:
                return
            ways = self._take_ways()
        for way in ways:
            way.close()  # who waits on it looks again
        with self._changed:
            was_primary = self._rules.is_primary
            if not self._rules.take(view):
                return
            if not self._rules.is_primary:
                self._log.end()
            elif not was_primary:
                self._log.begin(self._rules.position)
                self._lacks = ()
            self._changed.notify_all()
            brings = self._rules.partner is Partner.JOINING
            if view.backup == self._task and view.is_joining:
                self._taker = None
        if brings:
            threading.Thread(
                target=self._bring, args=(view,), name=f"replicax-copy-{self._group}", daemon=True
            ).start()

    def answer(self, message: Message) -> Message:
        """Does what a client asks, and returns when that cannot be lost any more with one server.

        Raises:
          UnavailableError: It is to be sent again, maybe to the other server: whether it is lost is not known here.
          Other errors are the store's.
        """
        is_update = is_change(message.header)
        with self._order:
            with self._changed:
                place = self._rules.order(is_change=is_update)
                epoch, partner = self._rules.epoch, self._rules.partner
                entry = Entry(self._rules.position, message if is_update else None)
                if is_update or partner is Partner.IN_SYNC:
                    self._log.append(entry.position, entry)
                if is_snapshot(message.header):
                    self._snapshot_seq = entry.position.seq
                    self._writes_until = time.monotonic() + LONGEST_WAIT_S
            if partner is Partner.IN_SYNC:
                self._send(epoch, entry)
            began = time.monotonic()
            answer, error, outcome = self._apply(message)
            with self._changed:
                entry.outcome = outcome if is_update else ""  # what only reads is not done there
            self._be_patient(time.monotonic() - began)
            if partner is not Partner.IN_SYNC and is_update:
                self._own(entry)
        until = time.monotonic() + _WAIT_S
        if is_update:
            self._wait_for_room()
        try:
            self._wait(place, until)
        finally:
            if self._keeps(entry):  # the backup may still need it
                with self._order:
                    self._own(entry)
        if error is not None:
            raise error
        assert answer is not None
        if message.header.get("op") == "checksum":  # the other one's was the same, or it is in sync no more
            return Message({**answer.header, "is_on_two": self._rules.partner is Partner.IN_SYNC})
        return answer

    def forwarded(self, message: Message) -> Message:
        """The primary has sent on a message, or a part of what there is."""
        header = message.header
        epoch, seq = header["epoch"], header["seq"]
        if header["op"] == "copy":
            return self._take_copy(epoch, seq, message)
        with self._order:
            with self._changed:
                verdict = self._rules.forwarded(epoch, seq)
            if isinstance(verdict, Refusal):
                return Message({"refused": str(verdict)})
            outcome = ""
            inner = header["message"]
            if verdict and inner is not None:
                _, _, outcome = self._apply(Message(inner, message.arrays))
            if verdict:
                with self._changed:
                    self._rules.applied(Position(header["ordered_in"], seq))
                    if self._rules.is_primary:  # since it began to apply this
                        self._log.begin(self._rules.position)
        return Message({"applied": seq, "outcome": outcome, "writes": self._writes})

    def statistics(self) -> dict[str, Any]:
        """The store's, and of its snapshots."""
        return {**self._store.statistics(), **({} if self._keeper is None else self._keeper.statistics())}

    @property
    def is_primary(self) -> bool:
        """True if it serves clients, as far as it knows."""
        with self._changed:
            return self._rules.is_primary

    def described(self) -> dict[str, Any]:
        """Its part; see ``GroupRules.described``; what went wrong with the backup last; how many updates it has."""
        updates = self._store.statistics()["updates"]
        with self._changed:
            return {**self._rules.described(), "error": self._error, "updates": updates}

    def close_keeper(self) -> None:
        """Takes the last snapshot, while all is still there."""
        if self._keeper is not None:
            self._keeper.close()

    def close(self) -> None:
        """Drops all; who waits raises UnavailableError."""
        if self._keeper is not None:
            self._keeper.end()
        with self._changed:
            self._is_closed = True
            ways = self._take_ways()
            self._changed.notify_all()
        for way in ways:
            way.close()
        self._store.leave()

    def _take_ways(self) -> list[BackupWay]:
        ways = [way for way in (self._way, self._joining_way) if way is not None]
        self._way = self._joining_way = None
        return ways

    def _new_store(self) -> Store:
        store = Store()
        store.hello(self._incarnation)
        return store

    # --- its snapshots, for the keeper -------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """Tells what has changed, for the snapshot keeper."""
        return self._store.progress._replace(position=self.position)

    @property
    def position(self) -> Position:
        """The position of the last update that was applied."""
        with self._changed:
            return self._rules.position

    def order_snapshot(self) -> None:
        """The primary has both servers write a snapshot, at the same place in the order.

        So the primary knows that the backup may let an update wait until there is room beside what it writes.
        """
        with contextlib.suppress(UnavailableError):  # another server orders, or there is nobody who may
            self.answer(Message({"op": "snapshot", "incarnation": self._incarnation}))

    def snapshot(self, directory: Path, epoch: int = 0) -> dict[str, Any]:
        """Writes a snapshot: see ``Store.snapshot``. It has the position of its last update.

        Raises:
          SnapshotError: It could not be written.
        """
        store = self._store

        @contextlib.contextmanager
        def moment() -> Iterator[Mapping[str, Any]]:
            with self._order:
                if self._is_closed or store is not self._store:
                    raise SnapshotError(f"The copy of group {self._group} is replaced; it is written then.")
                yield {"position": list(self.position)}

        return store.snapshot(directory, epoch, moment)

    def restore(self, directory: Path, epoch: int | None = None) -> dict[str, Any] | None:
        """Begins with the newest whole snapshot, if it is of this coordinator: see ``Store.restore``.

        It is all of the state at its position but for programs, and for gradients that waited for their round.
        """
        told = self._store.restore(directory, epoch)
        if told is not None and told["incarnation"] == self._incarnation:
            with self._changed:
                self._rules.restored(Position(*told["position"]))
                self._lacks = None if told["num_held_gradients"] else told["programs"]
            return told
        self._store = self._new_store()
        return None

    def _apply(self, message: Message) -> tuple[Message | None, Exception | None, str]:
        """Applies a message. The caller holds the order."""
        if not is_snapshot(message.header):
            return applied(self._store, message)
        if self._keeper is not None:
            self._keeper.ask()
        return Message({}), None, ""

    @property
    def _writes(self) -> bool:
        return self._keeper is not None and self._keeper.is_writing

    # --- the primary: sending on -----------------------------------------------------------------------

    def _send(self, epoch: int, entry: Entry) -> None:
        """Sends an entry to the backup. The caller holds the order. ``_wait`` raises what goes wrong."""
        try:
            way = self._way or self._open(epoch)
            if way is not None and way.epoch == epoch:
                way.send(self._message(epoch, entry), self._ack_s())
        except Exception as error:
            self._lose(epoch, error)

    def _open(self, epoch: int) -> BackupWay | None:
        """The way to a backup that had all from the beginning; once."""
        with self._changed:
            view = self._rules.view
            if view is None or view.epoch != epoch or view.backup is None or self._opened_epoch == epoch:
                return None
            self._opened_epoch = epoch
        way = BackupWay(epoch, self._connect(view.backup))
        return way if self._use(way) else None

    def _use(self, way: BackupWay) -> bool:
        with self._changed:
            is_of_now = self._rules.epoch == way.epoch and not self._is_closed
            if is_of_now:
                self._way, self._joining_way = way, None
                self._changed.notify_all()
        if not is_of_now:
            way.close()
        return is_of_now

    def _message(self, epoch: int, entry: Entry) -> Message:
        return Message(
            {
                **self._fields("forward", epoch, entry.position.seq),
                "ordered_in": entry.position.epoch,
                "message": entry.header,
            },
            entry.arrays,
        )

    def _fields(self, op: str, epoch: int, seq: int) -> dict[str, Any]:
        return {
            "op": op,
            "incarnation": self._incarnation,
            "group": self._group,
            "epoch": epoch,
            "seq": seq,
        }

    def _lose(self, epoch: int, error: Exception) -> None:
        with self._changed:
            if epoch == self._rules.epoch and not self._is_closed and self._rules.has_partner:
                self._error = str(error)
                self._rules.lose(epoch)
            self._changed.notify_all()

    # --- the primary: waiting --------------------------------------------------------------------------

    def _wait(self, place: Place, until: float) -> None:
        """Waits until the message at a place may be answered. One of the threads that wait reads what the backup says."""
        while True:
            with self._changed:
                way = self._reads_next(place, until)
            if way is None:
                return
            # All of it, though this one may wait no longer: who reads too briefly would lose a backup that is there.
            self._read(way, self._ack_s())

    def _ack_s(self) -> float:
        """Returns for how long the backup may say nothing."""
        now = time.monotonic()
        return max(ACK_S, self._patient_until - now, self._writes_until + ACK_S - now)

    def _wait_for_room(self) -> None:
        """Waits while the joining backup lacks much, so that updates come slower than they are brought."""
        with self._changed:
            self._changed.wait_for(lambda: not self._has_much_waiting, _ROOM_S)

    @property
    def _has_much_waiting(self) -> bool:
        return self._rules.partner is Partner.JOINING and self._log.is_half_full and not self._is_closed

    def _be_patient(self, took_s: float) -> None:
        """The backup does now what took the primary so long. Under the order."""
        if took_s > ACK_S / _TIMES_AS_LONG:
            until = time.monotonic() + ACK_S + _TIMES_AS_LONG * took_s
            self._patient_until = max(self._patient_until, until)

    def _reads_next(self, place: Place, until: float) -> BackupWay | None:
        """None when it may be answered; else the way of which this thread reads next. With the lock."""
        while True:
            if self._is_closed:
                raise UnavailableError("The coordinator's time at this parameter server is over.")
            if self._rules.may_answer(place):
                return None
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise UnavailableError(
                    f"The update was not acknowledged for {_WAIT_S:g} s: the second copy of group {self._group} is "
                    f"{self._rules.partner}. {self._error}"
                )
            if self._way is not None and self._rules.partner is Partner.IN_SYNC and not self._is_reading:
                self._is_reading = True
                return self._way
            self._changed.wait(left_s)

    def _read(self, way: BackupWay, left_s: float) -> None:
        try:
            header = way.receive(left_s)
        except Exception as error:
            self._lose(way.epoch, error)
            with self._changed:
                self._is_reading = False
                self._changed.notify_all()
            return
        with self._changed:
            self._is_reading = False
            self._note(way.epoch, header)
            self._changed.notify_all()

    def _note(self, epoch: int, header: Mapping[str, Any]) -> None:
        """Takes note of what the backup said to a message. The caller has the lock."""
        if "refused" in header:
            self._error = f"It refuses what it is sent: {header['refused']}."
            self._rules.refused(epoch, Refusal(header["refused"]))
            return
        seq, outcome = header["applied"], header["outcome"]
        if seq >= self._snapshot_seq:
            self._writes_until = time.monotonic() + LONGEST_WAIT_S if header["writes"] else 0.0
        entry = self._log.get(seq)
        if entry is not None and not entry.agrees(outcome):
            self._differs(epoch, seq, outcome)
            return
        if epoch == self._rules.epoch:
            self._log.acknowledge(seq)
        self._rules.acknowledge(epoch, seq)

    def _differs(self, epoch: int, seq: int, outcome: str) -> None:
        self._error = f"At message {seq} it came to {outcome or 'nothing special'}, and this one did not."
        _log.error(
            "The two copies of group %d are not the same: %s The backup is given up, and brought all anew. Do the machines "
            "have the same jaxlib and the same kind of CPU?",
            self._group,
            self._error,
        )
        self._log.end()  # what it has is of no use
        self._rules.lose(epoch)

    # --- bringing what there is to a backup that joins -------------------------------------------------

    def _bring(self, view: View) -> None:
        assert view.backup is not None
        way = None
        try:
            way = BackupWay(view.epoch, self._connect(view.backup))
            with self._changed:
                if self._rules.epoch != view.epoch or self._is_closed:
                    raise _later_view()
                self._joining_way = way
            acked = self._bring_state(view, way)
            self._bring_rest(view, way, acked)
        except Exception as error:
            _log.info("ps %d could not be brought a copy of group %d: %s", view.backup, self._group, error)
            self._lose(view.epoch, error)
            if way is not None:
                way.close()

    def _keeps(self, entry: Entry) -> bool:
        with self._changed:
            return self._log.get(entry.position.seq) is entry

    def _own(self, entry: Entry) -> None:
        """An update that the log keeps has memory of its own, which counts. Under the order."""
        if not self._keeps(entry):
            return
        entry.own()
        with self._changed:
            self._log.charge(entry.position.seq, entry.num_bytes)
            if self._log.is_on or not self._rules.has_partner:
                return
            epoch, way = self._rules.epoch, self._joining_way
            self._changed.notify_all()
        error = f"The updates that it lacks take more than log_bytes={self._log.max_bytes}."
        self._lose(epoch, UnavailableError(error))
        if way is not None and way.epoch == epoch:
            way.close()  # the thread that brings finds that this is over

    def _bring_state(self, view: View, way: BackupWay) -> int:
        """Returns the number up to which the backup has all: its own, if the log reaches it; else that of the state."""
        fields = self._fields("copy", view.epoch, 0)
        said = way.bring(Message({**fields, "part": "where"}))
        at, state = Position(*said["position"]), None
        with self._order:
            programs = self._store.programs(said["lacks"] or ())
            with self._changed:
                if self._rules.epoch != view.epoch:
                    raise _later_view()
                is_resumed = said["lacks"] is not None and len(programs) == len(said["lacks"])
                is_resumed = is_resumed and self._log.reaches(at)
            if not is_resumed:
                with self._changed:
                    at = self._rules.position
                    self._log.begin(at)
                state = self._store.state()
        resuming = itertools.chain(program_messages(programs), [({"part": "resume"}, ())])
        parts = resuming if state is None else state_messages(state)
        for header, arrays in parts:
            way.bring(Message({**fields, "position": list(at), **header}, arrays))
        return at.seq

    def _bring_rest(self, view: View, way: BackupWay, acked: int) -> None:
        """Brings the updates after the state; the last of them while no other is ordered, as others may come faster."""
        for left in reversed(range(_ROUNDS)):
            with self._order:
                entries = self._lacking(view, acked)
                if not left or len(entries) <= _FEW:
                    acked = self._bring_entries(view, way, entries, acked)
                    with self._changed:
                        is_one = self._rules.synced(view.epoch, acked)
                        self._error = ""
                    if not is_one or not self._use(way):
                        raise _later_view()
                    return
            acked = self._bring_entries(view, way, entries, acked)

    def _lacking(self, view: View, acked: int) -> list[Entry]:
        """The updates that the backup lacks. Under the order."""
        with self._changed:
            if not self._log.is_on or self._rules.epoch != view.epoch:
                raise _later_view()
            entries = [entry for _, entry in self._log.after(acked)]
        for entry in entries:
            self._own(entry)
        return entries

    def _bring_entries(self, view: View, way: BackupWay, entries: Sequence[Entry], acked: int) -> int:
        """Returns the number of the last one, which the backup has said that it has."""
        for entry in entries:
            taken = way.bring(self._message(view.epoch, entry))
            acked = entry.position.seq
            with self._changed:
                if self._rules.epoch != view.epoch:
                    raise _later_view()
                if not entry.agrees(taken["outcome"]):
                    self._log.end()
                    raise MessageError(
                        f"At message {acked} it came to {taken['outcome']!r}, not {entry.outcome!r}."
                    )
                self._log.acknowledge(acked)
                self._changed.notify_all()
        return acked

    # --- the backup that joins -------------------------------------------------------------------------

    def _take_copy(self, epoch: int, seq: int, message: Message) -> Message:
        with self._changed:
            if not self._rules.takes_copy(epoch):
                return Message({"refused": str(Refusal.INCOMPLETE)})
        part = message.header["part"]
        if part == "where":
            with self._order, self._changed:
                said = {"position": list(self._rules.position), "lacks": self._lacks}
                return Message({"applied": 0, "outcome": "", **said})
        at = Position(*message.header["position"])
        if part == "resume":
            with self._order, self._changed:
                is_one = self._rules.position == at and self._rules.has_copy(epoch, at)
                self._lacks = ()
            return _brought(is_one, at)
        if part == "state":
            with self._order:
                with self._changed:
                    if not self._rules.takes_copy(epoch):
                        return _brought(False, at)
                    self._rules.dropped()
                self._store.leave()  # first: there may be no room for both
                self._store = self._new_store()
                self._lacks = ()
            self._taker = StateTaker(self._new_store())
        taker = self._taker
        if taker is None and part == "program":  # of one that goes on from its snapshot
            taker = StateTaker(self._store)
        if taker is None:
            return _brought(False, at)
        if taker.take(message.header, message.arrays):
            with self._order, self._changed:
                if not self._rules.has_copy(epoch, at):
                    return _brought(False, at)
                self._store, self._taker = taker.store, None
        return _brought(True, at)


def _brought(is_taken: bool, at: Position) -> Message:
    return Message({"applied": at.seq, "outcome": ""} if is_taken else {"refused": str(Refusal.INCOMPLETE)})


def _later_view() -> UnavailableError:
    return UnavailableError("The coordinator has decided otherwise meanwhile.")
