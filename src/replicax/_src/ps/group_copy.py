"""``GroupCopy``: one parameter server's copy of a group of pieces, as the primary or the backup (``group_rules.py``)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from replicax._src.ps.errors import MessageError, UnavailableError
from replicax._src.ps.group_rules import GroupRules, Partner, Place, Refusal, View
from replicax._src.ps.messages import Message
from replicax._src.ps.server_stream import PsClient, PsLink
from replicax._src.ps.store import Store
from replicax._src.ps.store_state import StateTaker, state_messages

_log = logging.getLogger("replicax")

_WAIT_S: Final = 50.0
"""For the backup's word, or the coordinator's: who asks gives up after 60 s."""
_ACK_S: Final = 5.0
"""For the backup's word, after the primary has done the same: longer, and it cannot be reached."""
_TIMES_AS_LONG: Final = 4.0
"""Besides, the backup may take so many times as long as the primary: what is compiled, say, or made, on a busy machine."""
_COPY_S: Final = 120.0
_SEND_BYTES_PER_S: Final = 50 << 20
_FEW: Final = 4
_ROUNDS: Final = 4
_MANY_BYTES: Final = 256 << 20
_MOST_BYTES: Final = 1 << 30
"""More may not wait to be brought, if it is more than all that there is, too: the copy is given up then."""
_ENTRY_BYTES: Final = 16 << 10
"""What waits to be brought counts as so much more: a message takes its time, and memory, however small it is."""
_ROOM_S: Final = 20.0
"""While many bytes wait to be brought an update is answered so much later; not never, as bringing takes as long as it takes."""
_READS: Final = frozenset({"find"})
_DUPLICATE: Final = "duplicate"


class _Way:
    """To a backup, for one epoch."""

    def __init__(self, epoch: int, client: PsClient):
        self.epoch = epoch
        self._client = client
        try:
            self.link: PsLink = client.open()
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        self.link.close()
        self._client.close()


@final
class GroupCopy:
    """A store, the way to the other server that has the same, and the rules. All methods may be called from any thread.

    Two locks: the *order*, held while a message is sent on and applied, which is never waited for with the other one; and
    ``_changed``, for the rules, held briefly.

    Args:
      group: Its number.
      task: The number of this server.
      incarnation: Of the coordinator.
      connect: Gives a client of another server, by its number.
    """

    def __init__(self, group: int, task: int, incarnation: str, connect: Callable[[int], PsClient]):
        self._group, self._task, self._incarnation, self._connect = group, task, incarnation, connect
        self._rules = GroupRules(task)
        self._order = threading.Lock()
        self._changed = threading.Condition()
        self._store = self._new_store()
        self._way: _Way | None = None
        self._joining_way: _Way | None = None
        self._opened_epoch = 0
        self._patient_until = 0.0
        self._is_reading = False
        self._is_closed = False
        self._outcomes: deque[tuple[int, str]] = deque()
        self._waiting: list[_Entry] | None = None
        self._waiting_bytes = self._waiting_epoch = self._most_waiting_bytes = 0
        self._taker: StateTaker | None = None
        self._error = ""

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
            if not self._rules.take(view):
                return
            self._outcomes.clear()
            self._changed.notify_all()
            joins = view.backup == self._task and view.is_joining
            brings = self._rules.partner is Partner.JOINING
            if joins:
                self._taker = None
        if joins:
            with self._order, self._changed:
                if self._rules.takes_copy(view.epoch):  # or all was brought while this waited for the order
                    self._store.leave(self._incarnation)
                    self._store = self._new_store()
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
        is_change = _is_change(message.header)
        with self._order:
            with self._changed:
                place = self._rules.order(is_change=is_change)
                epoch, partner = self._rules.epoch, self._rules.partner
            entry = _Entry(place.seq, message if is_change else None)
            if partner is Partner.IN_SYNC:
                self._send(epoch, entry)
            began = time.monotonic()
            answer, error, outcome = _applied(self._store, message)
            entry.outcome = outcome if is_change else ""  # what only reads is nobody's there
            self._be_patient(time.monotonic() - began)
            if partner is Partner.IN_SYNC:
                self._outcomes.append((entry.seq, entry.outcome))
            elif self._waiting is not None and is_change:
                # What is a duplicate has done nothing, and who has to wait sends it again and again.
                entry = _Entry(place.seq, None) if entry.outcome == _DUPLICATE else entry
                self._keep_waiting(entry.kept())
        if is_change:
            self._wait_for_room()
        self._wait(place)
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
                _, _, outcome = _applied(self._store, Message(inner, message.arrays))
            if verdict:
                with self._changed:
                    self._rules.applied(seq)
        return Message({"applied": seq, "outcome": outcome})

    def statistics(self) -> dict[str, Any]:
        """The store's."""
        return self._store.statistics()

    @property
    def is_primary(self) -> bool:
        """Whether it serves clients, as far as it knows."""
        with self._changed:
            return self._rules.is_primary

    def described(self) -> dict[str, Any]:
        """Its part; see ``GroupRules.described``; and what went wrong with the backup last."""
        with self._changed:
            return {**self._rules.described(), "error": self._error}

    def close(self) -> None:
        """Drops all; who waits raises UnavailableError."""
        with self._changed:
            self._is_closed = True
            ways = self._take_ways()
            self._changed.notify_all()
        for way in ways:
            way.close()
        self._store.leave(self._incarnation)

    def _take_ways(self) -> list[_Way]:
        ways = [way for way in (self._way, self._joining_way) if way is not None]
        self._way = self._joining_way = None
        return ways

    def _new_store(self) -> Store:
        store = Store()
        store.hello(self._incarnation)
        return store

    # --- the primary: sending on -----------------------------------------------------------------------

    def _send(self, epoch: int, entry: _Entry) -> None:
        """Under the order. What goes wrong is told by ``_wait``."""
        try:
            way = self._way or self._open(epoch)
            if way is not None and way.epoch == epoch:
                _send(way.link, self._message(epoch, entry))
        except Exception as error:
            self._lose(epoch, error)

    def _open(self, epoch: int) -> _Way | None:
        """The way to a backup that had all from the beginning; once."""
        with self._changed:
            view = self._rules.view
            if view is None or view.epoch != epoch or view.backup is None or self._opened_epoch == epoch:
                return None
            self._opened_epoch = epoch
        way = _Way(epoch, self._connect(view.backup))
        return way if self._keep(way) else None

    def _keep(self, way: _Way) -> bool:
        with self._changed:
            is_of_now = self._rules.epoch == way.epoch and not self._is_closed
            if is_of_now:
                self._way, self._joining_way = way, None
                self._changed.notify_all()
        if not is_of_now:
            way.close()
        return is_of_now

    def _message(self, epoch: int, entry: _Entry) -> Message:
        return Message({**self._fields("forward", epoch, entry.seq), "message": entry.header}, entry.arrays)

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

    def _wait(self, place: Place) -> None:
        """Until what is at a place may be answered. One of those who wait reads what the backup says."""
        until = time.monotonic() + _WAIT_S
        while True:
            with self._changed:
                way = self._reads_next(place, until)
            if way is None:
                return
            # All of it, though this one may wait no longer: who reads too briefly would lose a backup that is there.
            self._read(way, max(_ACK_S, self._patient_until - time.monotonic()))

    def _wait_for_room(self) -> None:
        """While what waits to be brought is much: updates that come slower than it is brought are what makes it less."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting_bytes < _MANY_BYTES, _ROOM_S)

    def _be_patient(self, took_s: float) -> None:
        """The backup does now what took the primary so long. Under the order."""
        if took_s > _ACK_S / _TIMES_AS_LONG:
            until = time.monotonic() + _ACK_S + _TIMES_AS_LONG * took_s
            self._patient_until = max(self._patient_until, until)

    def _reads_next(self, place: Place, until: float) -> _Way | None:
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

    def _read(self, way: _Way, left_s: float) -> None:
        try:
            header = way.link.receive(left_s).header
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
        """What the backup said to a message. With the lock."""
        if "refused" in header:
            self._error = f"It refuses what it is sent: {header['refused']}."
            self._rules.refused(epoch, Refusal(header["refused"]))
            return
        seq, outcome = header["applied"], header["outcome"]
        while self._outcomes and self._outcomes[0][0] < seq:
            self._outcomes.popleft()  # of an epoch before
        # (Its own may not be noted yet; then it is the backup that was quicker.)
        if self._outcomes and self._outcomes[0][0] == seq and self._outcomes.popleft()[1] != outcome:
            self._differs(epoch, seq, outcome)
            return
        self._rules.acknowledge(epoch, seq)

    def _differs(self, epoch: int, seq: int, outcome: str) -> None:
        self._error = f"At message {seq} it came to {outcome or 'nothing special'}, and this one did not."
        _log.error(
            "The two copies of group %d are not the same: %s The backup is given up, and brought all anew. Do the machines "
            "have the same jaxlib and the same kind of CPU?",
            self._group,
            self._error,
        )
        self._rules.lose(epoch)

    # --- bringing what there is to a backup that joins -------------------------------------------------

    def _bring(self, view: View) -> None:
        assert view.backup is not None
        way = None
        try:
            way = _Way(view.epoch, self._connect(view.backup))
            with self._changed:
                if self._rules.epoch != view.epoch or self._is_closed:
                    raise _later_view()
                self._joining_way = way
            acked = self._bring_copy(view, way)
            self._bring_rest(view, way, acked)
        except Exception as error:
            _log.info("ps %d could not be brought a copy of group %d: %s", view.backup, self._group, error)
            with self._order:
                if self._waiting_epoch == view.epoch:  # in a later view as well: nobody else drops what waits
                    self._drop_waiting()
            self._lose(view.epoch, error)
            if way is not None:
                way.close()

    def _keep_waiting(self, entry: _Entry) -> None:
        """What comes while all is brought is to be brought, too, if it does not become too much. Under the order."""
        assert self._waiting is not None
        self._waiting.append(entry)
        self._waiting_bytes += entry.num_bytes + _ENTRY_BYTES
        if self._waiting_bytes <= self._most_waiting_bytes:
            return
        error = (
            f"Updates of {self._waiting_bytes} bytes came while it was brought what there is, which was less."
        )
        self._drop_waiting()
        self._lose(self._waiting_epoch, UnavailableError(error))
        way = self._joining_way
        if way is not None and way.epoch == self._waiting_epoch:
            way.close()  # who brings it finds that this is over

    def _drop_waiting(self) -> None:
        with self._changed:
            self._waiting, self._waiting_bytes = None, 0
            self._changed.notify_all()

    def _bring_copy(self, view: View, way: _Way) -> int:
        with self._order:
            if self._rules.epoch != view.epoch:
                raise _later_view()
            state, seq = self._store.state(), self._rules.seq
            self._waiting, self._waiting_bytes, self._waiting_epoch = [], 0, view.epoch
            self._most_waiting_bytes = max(_MOST_BYTES, sum(value.nbytes for _, _, value in state.pieces))
        for header, arrays in state_messages(state):
            fields = self._fields("copy", view.epoch, seq)
            _check_taken(_called(way, Message({**fields, **header}, arrays)))
        return seq

    def _bring_rest(self, view: View, way: _Way, acked: int) -> None:
        """What came meanwhile; the last of it while nothing else comes: others may come faster than they are brought."""
        for left in reversed(range(_ROUNDS)):
            with self._order:
                waiting = self._take_waiting(view)
                if not left or len(waiting) <= _FEW:
                    last = self._bring_waiting(view, way, waiting) or acked
                    with self._changed:
                        is_one = self._rules.synced(view.epoch, last)
                        self._waiting, self._waiting_bytes, self._error = None, 0, ""
                        self._outcomes.clear()
                    if not is_one or not self._keep(way):
                        raise _later_view()
                    return
            acked = self._bring_waiting(view, way, waiting) or acked

    def _take_waiting(self, view: View) -> list[_Entry]:
        """What is to be brought now. Under the order."""
        waiting = self._waiting
        if waiting is None or self._rules.epoch != view.epoch:
            raise _later_view()
        with self._changed:
            self._waiting, self._waiting_bytes = [], 0
            self._changed.notify_all()
        return waiting

    def _bring_waiting(self, view: View, way: _Way, waiting: Sequence[_Entry]) -> int | None:
        """Returns the number of the last one, which the backup has said that it has."""
        acked = None
        for entry in waiting:
            taken = _check_taken(_called(way, self._message(view.epoch, entry)))
            if taken["outcome"] != entry.outcome:
                raise MessageError(
                    f"At message {entry.seq} it came to {taken['outcome']!r}, not {entry.outcome!r}."
                )
            acked = entry.seq
        return acked

    # --- the backup that joins -------------------------------------------------------------------------

    def _take_copy(self, epoch: int, seq: int, message: Message) -> Message:
        with self._changed:
            if not self._rules.takes_copy(epoch):
                return Message({"refused": str(Refusal.INCOMPLETE)})
        if message.header["part"] == "state":
            self._taker = StateTaker(self._new_store())
        taker = self._taker
        if taker is None:
            return Message({"refused": str(Refusal.INCOMPLETE)})
        if taker.take(message.header, message.arrays):
            with self._order, self._changed:
                if not self._rules.has_copy(epoch, seq):
                    return Message({"refused": str(Refusal.INCOMPLETE)})
                self._store, self._taker = taker.store, None
                self._outcomes.clear()  # numbers begin anew
        return Message({"applied": seq, "outcome": ""})


class _Entry:
    """A client's message in the order, as the backup gets it: nothing is read there, but refused all the same what cannot be."""

    __slots__ = ("arrays", "header", "outcome", "seq")

    def __init__(self, seq: int, message: Message | None):
        self.seq, self.outcome = seq, ""
        self.header: Mapping[str, Any] | None = None
        self.arrays: Sequence[np.ndarray] = ()
        if message is None:
            return
        self.header, self.arrays = message.header, message.arrays
        if message.header.get("op") == "step":
            self.arrays = _with_no_row_numbers(message)
            self.header = {**message.header, "used": [], "only_apply": True}

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def kept(self) -> _Entry:
        """With arrays of its own: the memory of a message is used again."""
        self.arrays = [np.array(array) for array in self.arrays]
        return self


def _with_no_row_numbers(message: Message) -> Sequence[np.ndarray]:
    """The arrays of a step, of row numbers none, but of the same kind."""
    rows = message.header.get("rows")
    first = len(message.arrays) - len(rows) if isinstance(rows, list) else len(message.arrays)
    if first < 0:
        return message.arrays
    numbers = [array[:0] if array.ndim else array for array in message.arrays[first:]]
    return [*message.arrays[:first], *numbers]


def _later_view() -> UnavailableError:
    return UnavailableError("The coordinator has decided otherwise meanwhile.")


def _is_change(header: Mapping[str, Any]) -> bool:
    op = header.get("op")
    if op == "step":
        return header.get("program") is not None or header.get("gradients") is not None
    return op not in _READS


def _applied(store: Store, message: Message) -> tuple[Message | None, Exception | None, str]:
    """The answer or the error, and in a word what came of it: the same on both servers, or they are not the same."""
    try:
        answer = store.answer(message)
    except Exception as error:
        return None, error, type(error).__name__
    header = answer.header
    return answer, None, str(header.get("checksum") or (_DUPLICATE if header.get("duplicate") else ""))


def _send(link: PsLink, message: Message) -> None:
    """Not for ever: who is cut off takes nothing, and says nothing."""
    num_bytes = sum(array.nbytes for array in message.arrays)
    link.send(message, _ACK_S + num_bytes / _SEND_BYTES_PER_S)


def _called(way: _Way, message: Message) -> Mapping[str, Any]:
    _send(way.link, message)
    return way.link.receive(_COPY_S).header


def _check_taken(header: Mapping[str, Any]) -> Mapping[str, Any]:
    if "refused" in header:
        raise UnavailableError(f"It refuses what it is sent: {header['refused']}.")
    return header
