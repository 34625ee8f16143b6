"""``GroupCopy``: one parameter server's copy of a group of pieces, as the primary or the backup
(``group_rules.py``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

from replicax._src.parameter_servers.client.server_client import Connector
from replicax._src.parameter_servers.errors import SnapshotError, UnavailableError
from replicax._src.parameter_servers.store.backup_sync import BackupSync, CopyTaker
from replicax._src.parameter_servers.store.backup_way import AckPatience, BackupWay
from replicax._src.parameter_servers.store.group_entries import Entry, applied, is_change, is_snapshot
from replicax._src.parameter_servers.store.group_rules import Partner, Place, Refusal, View
from replicax._src.parameter_servers.store.group_state import GroupState
from replicax._src.parameter_servers.store.log import DEFAULT_LOG_BYTES, Position
from replicax._src.parameter_servers.store.snapshot_keeper import SnapshotKeeper
from replicax._src.parameter_servers.store.store_contents import Progress
from replicax._src.parameter_servers.transport.messages import Message

_log = logging.getLogger("replicax")

_WAIT_S: Final = 50.0
"""For the backup's word, or the coordinator's: who asks gives up after 60 s."""
_ROOM_S: Final = 20.0
"""While much waits to be brought an update is answered so much later; not never, as bringing takes as long as it takes.
"""


@final
class GroupCopy:
    """A store, the way to the other server that has the same, and the rules. All methods may be called from any thread.

    ``GroupState`` has its parts, and its two locks. ``BackupSync`` brings a backup that joins what it lacks.

    Args:
      group: Its number.
      task: The number of this server.
      incarnation: The coordinator's.
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
        connect: Callable[[int], Connector],
        log_bytes: int = DEFAULT_LOG_BYTES,
        keep: Callable[[GroupCopy], SnapshotKeeper] | None = None,
    ):
        self._state = GroupState(group, task, incarnation, log_bytes)
        self._connect = connect
        self._sync = BackupSync(self._state, connect)
        self._taker = CopyTaker(self._state)
        self._patience = AckPatience()
        self._opened_epoch = 0
        self._is_reading = False
        self._keeper = None if keep is None else keep(self)
        self.restored = None if self._keeper is None else self._keeper.restored

    def take(self, view: View) -> None:
        """The coordinator has decided who has the group.

        Raises:
          InvalidArgumentError: This server does not have what it would need.
        """
        with self._state.changed:
            if view.epoch <= self._state.rules.epoch:
                return
            ways = self._state.take_ways()
        for way in ways:
            way.close()  # who waits on it looks again
        with self._state.changed:
            was_primary = self._state.rules.is_primary
            if not self._state.rules.take(view):
                return
            if not self._state.rules.is_primary:
                self._state.log.end()
            elif not was_primary:
                self._state.log.begin(self._state.rules.position)
                self._state.lacks = ()
            self._state.changed.notify_all()
            brings = self._state.rules.partner is Partner.JOINING
            if view.backup == self._state.task and view.is_joining:
                self._taker.begin()
        if brings:
            threading.Thread(
                target=self._sync.bring, args=(view,), name=f"replicax-copy-{self._state.group}", daemon=True
            ).start()

    def answer(self, message: Message) -> Message:
        """Does what a client asks, and returns when that cannot be lost any more with one server.

        Raises:
          UnavailableError: It is to be sent again, maybe to the other server: whether it is lost is not known here.
          Other errors are the store's.
        """
        is_update = is_change(message.header)
        with self._state.order:
            with self._state.changed:
                place = self._state.rules.order(is_change=is_update)
                epoch, partner = self._state.rules.epoch, self._state.rules.partner
                entry = Entry(self._state.rules.position, message if is_update else None)
                if is_update or partner is Partner.IN_SYNC:
                    self._state.log.append(entry.position, entry)
                if is_snapshot(message.header):
                    self._patience.order_snapshot(entry.position.seq)
            if partner is Partner.IN_SYNC:
                self._send(epoch, entry)
            began = time.monotonic()
            answer, error, outcome = self._apply(message)
            with self._state.changed:
                entry.outcome = outcome if is_update else ""  # what only reads is not done there
            self._patience.took(time.monotonic() - began)
            if partner is not Partner.IN_SYNC and is_update:
                self._state.own(entry)
        until = time.monotonic() + _WAIT_S
        if is_update:
            self._wait_for_room()
        try:
            self._wait(place, until)
        finally:
            if self._state.keeps(entry):  # the backup may still need it
                with self._state.order:
                    self._state.own(entry)
        if error is not None:
            raise error
        assert answer is not None
        if message.header.get("op") == "checksum":  # the other one's was the same, or it is in sync no more
            return Message({**answer.header, "is_on_two": self._state.rules.partner is Partner.IN_SYNC})
        return answer

    def forwarded(self, message: Message) -> Message:
        """The primary has sent on a message, or a part of what there is."""
        header = message.header
        epoch, seq = header["epoch"], header["seq"]
        if header["op"] == "copy":
            return self._taker.take(epoch, message)
        with self._state.order:
            with self._state.changed:
                verdict = self._state.rules.forwarded(epoch, seq)
            if isinstance(verdict, Refusal):
                return Message({"refused": str(verdict)})
            outcome = ""
            inner = header["message"]
            if verdict and inner is not None:
                _, _, outcome = self._apply(Message(inner, message.arrays))
            if verdict:
                with self._state.changed:
                    self._state.rules.applied(Position(header["ordered_in"], seq))
                    if self._state.rules.is_primary:  # since it began to apply this
                        self._state.log.begin(self._state.rules.position)
        return Message({"applied": seq, "outcome": outcome, "writes": self._writes})

    def statistics(self) -> dict[str, Any]:
        """The store's, and of its snapshots."""
        return {
            **self._state.store.statistics(),
            **({} if self._keeper is None else self._keeper.statistics()),
        }

    @property
    def is_primary(self) -> bool:
        """True if it serves clients, as far as it knows."""
        with self._state.changed:
            return self._state.rules.is_primary

    def described(self) -> dict[str, Any]:
        """Its part; see ``GroupRules.described``; what went wrong with the backup last; how many updates it has."""
        updates = self._state.store.statistics()["updates"]
        with self._state.changed:
            return {**self._state.rules.described(), "error": self._state.error, "updates": updates}

    def close_keeper(self) -> None:
        """Takes the last snapshot, while all is still there."""
        if self._keeper is not None:
            self._keeper.close()

    def close(self) -> None:
        """Drops all; who waits raises UnavailableError."""
        if self._keeper is not None:
            self._keeper.end()
        with self._state.changed:
            self._state.is_closed = True
            ways = self._state.take_ways()
            self._state.changed.notify_all()
        for way in ways:
            way.close()
        self._state.store.leave()

    # --- its snapshots, for the keeper -------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """Tells what has changed, for the snapshot keeper."""
        return self._state.store.progress._replace(position=self.position)

    @property
    def position(self) -> Position:
        """The position of the last update that was applied."""
        with self._state.changed:
            return self._state.rules.position

    def order_snapshot(self) -> None:
        """The primary has both servers write a snapshot, at the same place in the order.

        So the primary knows that the backup may let an update wait until there is room beside what it writes.
        """
        with contextlib.suppress(UnavailableError):  # another server orders, or there is nobody who may
            self.answer(Message({"op": "snapshot", "incarnation": self._state.incarnation}))

    def snapshot(self, directory: Path, epoch: int = 0) -> dict[str, Any]:
        """Writes a snapshot: see ``Store.snapshot``. It has the position of its last update.

        Raises:
          SnapshotError: It could not be written.
        """
        store = self._state.store

        @contextlib.contextmanager
        def moment() -> Iterator[Mapping[str, Any]]:
            with self._state.order:
                if self._state.is_closed or store is not self._state.store:
                    raise SnapshotError(
                        f"The copy of group {self._state.group} is replaced; it is written then."
                    )
                yield {"position": list(self.position)}

        return store.snapshot(directory, epoch, moment)

    def restore(self, directory: Path, epoch: int | None = None) -> dict[str, Any] | None:
        """Begins with the newest whole snapshot, if it is of this coordinator: see ``Store.restore``.

        It is all of the state at its position but for programs, and for gradients that waited for their round.
        """
        told = self._state.store.restore(directory, epoch)
        if told is not None and told["incarnation"] == self._state.incarnation:
            with self._state.changed:
                self._state.rules.restored(Position(*told["position"]))
                self._state.lacks = None if told["num_held_gradients"] else told["programs"]
            return told
        self._state.store = self._state.new_store()
        return None

    def _apply(self, message: Message) -> tuple[Message | None, Exception | None, str]:
        """Applies a message. The caller holds the order."""
        if not is_snapshot(message.header):
            return applied(self._state.store, message)
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
            way = self._state.way or self._open(epoch)
            if way is not None and way.epoch == epoch:
                way.send(self._state.message(epoch, entry), self._patience.ack_s())
        except Exception as error:
            self._state.lose(epoch, error)

    def _open(self, epoch: int) -> BackupWay | None:
        """The way to a backup that had all from the beginning; once."""
        with self._state.changed:
            view = self._state.rules.view
            if view is None or view.epoch != epoch or view.backup is None or self._opened_epoch == epoch:
                return None
            self._opened_epoch = epoch
        way = BackupWay(epoch, self._connect(view.backup))
        return way if self._state.use(way) else None

    # --- the primary: waiting --------------------------------------------------------------------------

    def _wait(self, place: Place, until: float) -> None:
        """Waits until the message at a place may be answered. One of the threads that wait reads from the backup."""
        while True:
            with self._state.changed:
                way = self._reads_next(place, until)
            if way is None:
                return
            # All of it, though this one may wait no longer: who reads too briefly would lose a backup that is there.
            self._read(way, self._patience.ack_s())

    def _wait_for_room(self) -> None:
        """Waits while the joining backup lacks much, so that updates come slower than they are brought."""
        with self._state.changed:
            self._state.changed.wait_for(lambda: not self._has_much_waiting, _ROOM_S)

    @property
    def _has_much_waiting(self) -> bool:
        return (
            self._state.rules.partner is Partner.JOINING
            and self._state.log.is_half_full
            and not self._state.is_closed
        )

    def _reads_next(self, place: Place, until: float) -> BackupWay | None:
        """None when it may be answered; else the way of which this thread reads next. With the lock."""
        while True:
            if self._state.is_closed:
                raise UnavailableError("The coordinator's time at this parameter server is over.")
            if self._state.rules.may_answer(place):
                return None
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise UnavailableError(
                    f"The update was not acknowledged for {_WAIT_S:g} s: the second copy of group {self._state.group} is "
                    f"{self._state.rules.partner}. {self._state.error}"
                )
            if (
                self._state.way is not None
                and self._state.rules.partner is Partner.IN_SYNC
                and not self._is_reading
            ):
                self._is_reading = True
                return self._state.way
            self._state.changed.wait(left_s)

    def _read(self, way: BackupWay, left_s: float) -> None:
        try:
            header = way.receive(left_s)
        except Exception as error:
            self._state.lose(way.epoch, error)
            with self._state.changed:
                self._is_reading = False
                self._state.changed.notify_all()
            return
        with self._state.changed:
            self._is_reading = False
            self._note(way.epoch, header)
            self._state.changed.notify_all()

    def _note(self, epoch: int, header: Mapping[str, Any]) -> None:
        """Takes note of what the backup said to a message. The caller has the lock."""
        if "refused" in header:
            self._state.error = f"It refuses what it is sent: {header['refused']}."
            self._state.rules.refused(epoch, Refusal(header["refused"]))
            return
        seq, outcome = header["applied"], header["outcome"]
        self._patience.said(seq, writes=header["writes"])
        entry = self._state.log.get(seq)
        if entry is not None and not entry.agrees(outcome):
            self._differs(epoch, seq, outcome)
            return
        if epoch == self._state.rules.epoch:
            self._state.log.acknowledge(seq)
        self._state.rules.acknowledge(epoch, seq)

    def _differs(self, epoch: int, seq: int, outcome: str) -> None:
        self._state.error = (
            f"At message {seq} it came to {outcome or 'nothing special'}, and this one did not."
        )
        _log.error(
            "The two copies of group %d are not the same: %s The backup is given up, and brought all anew. Do the machines "
            "have the same jaxlib and the same kind of CPU?",
            self._state.group,
            self._state.error,
        )
        self._state.log.end()  # what it has is of no use
        self._state.rules.lose(epoch)
