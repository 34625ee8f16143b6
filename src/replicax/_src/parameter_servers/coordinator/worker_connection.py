"""``WorkerConnection``: one connection to a worker. What it was sent, and which answer is to what.

Answers come in the order of the messages. Programs and constants are sent once, before the first closure that needs
them. Small closures that need nothing more travel together, if they may; each is a message of its own, and is answered
as such. A connection that broke is given up with all that it awaited: what a worker may still answer is never read.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, final

import numpy as np

from replicax._src.parameter_servers.coordinator.closures import Closure
from replicax._src.parameter_servers.coordinator.prepared import Client, Link, PreparedClosure, Session
from replicax._src.parameter_servers.coordinator.resources import Resource, Resources
from replicax._src.parameter_servers.errors import ClosureInputError, MessageError, UnavailableError
from replicax._src.parameter_servers.transport.messages import Message
from replicax._src.parameter_servers.worker.resources import WORKER_INDEX

Kind = Literal["closure", "program", "constant", "resource", "release"]

# A closure may take as long as it takes: who is silent is found by the beats.
_FOREVER_S = math.inf
_SMALL_BYTES = 4096
_MOST_UNANSWERED_BYTES = 8 * _SMALL_BYTES  # so much a connection takes without its peer reading


class _Awaited(NamedTuple):
    """A message that has not been answered.

    Attributes:
      what: The closure or the resource, or the name of something else.
      bundle: Messages that travelled together have the same number.
      num_bytes: Of its arrays.
    """

    kind: Kind
    what: Any
    sent_at: float
    bundle: int
    num_bytes: int


@final
class WorkerConnection:
    """A connection. Threads may share it; one of them receives.

    Args:
      client: To the worker; it is closed with the stream.
      link: Opened by it.
      instance: Of the worker's process.

    Attributes:
      over: Set when the connection has ended.
      reason: Why, if it was not closed on purpose.
      unsent: Closures that ``send`` is to send.
      needs: Closures, each with the signature of a program that it needs before, and what a dataset says that has too
        few elements for it; None if none has.
    """

    def __init__(
        self, worker: str, client: Client, link: Link, instance: Any, session: Session, resources: Resources
    ):
        self.worker, self.client, self.instance = worker, client, instance
        self._link, self._session, self._resources = link, session, resources
        self.unsent: deque[Closure] = deque()
        self.needs: deque[tuple[Closure, str, str | None]] = deque()
        self._awaited: deque[_Awaited] = deque()
        self._came: deque[Message | Exception] = deque()
        self._num_bundles = 0
        self._bytes_out = self._bytes_done = 0  # each is written by one thread at a time
        self._known: set[str] = set()
        self._refused: dict[str, Exception] = {}
        self._has: set[str] = {WORKER_INDEX}
        self._sending = threading.Lock()
        self.over = threading.Event()
        self.reason: BaseException | None = None

    def end(self, reason: BaseException | None) -> None:
        """Gives the connection up, from any thread: who blocks in it gets an UnavailableError."""
        if not self.over.is_set():
            self.reason = reason
            self.over.set()
        self._link.close()

    def interrupt(self, error: BaseException) -> None:
        """Gives the connection up because a thread that used it was interrupted."""
        self.end(
            UnavailableError(f"{type(error).__name__} came while functions were sent to it.", self.worker)
        )

    def running(self) -> list[Closure]:
        """What the worker was at when the connection ended: a closure, or one of several that travelled together."""
        awaited = list(self._awaited)
        first = next((each for each in awaited if each.kind in ("closure", "resource")), None)
        if first is None or first.kind == "resource":
            return []
        return [each.what for each in awaited if each.bundle == first.bundle]

    def making(self) -> Resource | None:
        """What the worker was to make when the connection ended."""
        for each in list(self._awaited):
            if each.kind in ("closure", "resource"):
                return each.what if each.kind == "resource" else None
        return None

    # --- sending ---------------------------------------------------------------------------------------

    def send(self, closure: Closure, low: int) -> None:
        """Sends a closure, and before it what it needs. Blocks while the worker takes nothing.

        Raises:
          UnavailableError: The connection has ended.
          Exception: The closure cannot be sent.
        """
        prepared: PreparedClosure = closure.work.prepared
        with self._sending:
            for name in prepared.iterators:
                if name not in self._has:
                    self._send_resource(self._resources.get(name))
            for name, array in prepared.constants.items():
                self._send_once("constant", name, {"name": name}, [array])
            for digest in list(prepared.programs.values()):
                if digest not in self._known:
                    program = prepared.program(digest)
                    blobs = [np.frombuffer(blob, np.uint8) for blob in program.blobs]
                    header = {"digest": digest, "described": program.described()}
                    self._send_once("program", digest, header, blobs)
            self._send_closure(closure, prepared, low)

    def try_send(self, closures: Sequence[Closure], low: int, num_together: int) -> Sequence[Closure]:
        """Sends closures that are small, if nobody else is sending, and what is unanswered is small. Never blocks: who
        receives may call it, and a worker takes nothing while its answers are not. Returns those that it did not send.

        Args:
          num_together: How many travel together at most.

        Raises:
          UnavailableError: The connection has ended.
        """
        if self.over.is_set() or not self._sending.acquire(blocking=False):
            return closures
        try:
            num_sent = 0
            while num_sent < len(closures):
                bundle = self._next_bundle(closures[num_sent : num_sent + num_together])
                if not bundle:
                    break
                self._send_bundle(bundle, low)
                num_sent += len(bundle)
            return closures[num_sent:]
        except MessageError:  # one of them cannot travel: who sends them one by one will find it
            return closures[num_sent:]
        except Exception:
            raise
        except BaseException as error:  # Ctrl-C: nobody knows whether they have been sent
            self.interrupt(error)
            raise
        finally:
            self._sending.release()

    def _next_bundle(self, closures: Sequence[Closure]) -> list[_Ready]:
        """The first ones of ``closures`` that can be sent now, and travel together."""
        bundle: list[_Ready] = []
        num_bytes = self._bytes_out - self._bytes_done
        for closure in closures:
            prepared: PreparedClosure | None = closure.work.prepared
            if prepared is None or not self._has_all(prepared):
                break
            arrays = _sent_along(prepared)
            size = sum(array.nbytes for array in arrays)
            if size > _SMALL_BYTES or num_bytes + size > _MOST_UNANSWERED_BYTES:
                break
            if bundle and closure.travels_alone:
                break
            bundle.append(_Ready(closure, prepared, arrays))
            num_bytes += size
            if closure.travels_alone:
                break
        return bundle

    def send_resources(self, resources: Sequence[Resource]) -> None:
        """Has the worker make what it has not made yet, and release what is not among them."""
        with self._sending:
            for resource in resources:
                self._send_resource(resource)
            unused = sorted(self._has.difference((resource.name for resource in resources), (WORKER_INDEX,)))
            if unused:
                self._has.difference_update(unused)
                self._send("release", unused, {"names": unused}, ())

    def forget(self, name: str) -> Exception | None:
        """The worker does not have a program, or a constant: returns what it said when it was sent, if it refused it.

        Else it is sent again with the next closure that needs it.
        """
        self._known.discard(name)
        return self._refused.get(name)

    def _has_all(self, prepared: PreparedClosure) -> bool:
        """Whether the worker has been sent what a closure needs, and could make what it takes."""
        known, iterators = self._known, prepared.iterators
        return (
            known.issuperset(prepared.programs.values())
            and known.issuperset(prepared.constants)
            and (not iterators or (self._has.issuperset(iterators) and self.input_error(prepared) is None))
        )

    def _send_bundle(self, bundle: Sequence[_Ready], low: int) -> None:
        messages = [
            self._message("closure", self._header(each.closure, each.prepared, low), each.arrays)
            for each in bundle
        ]
        self._send_all(messages, [("closure", each.closure) for each in bundle])

    def _send_closure(self, closure: Closure, prepared: PreparedClosure, low: int) -> None:
        self._send("closure", closure, self._header(closure, prepared, low), _sent_along(prepared))

    def _header(self, closure: Closure, prepared: PreparedClosure, low: int) -> dict[str, Any]:
        session = self._session
        header = {
            "closure": (session.incarnation, closure.number),
            "low": low,
            "epoch": session.epoch,
            "program": prepared.programs,
        }
        if iterators := prepared.iterators:
            header["iterators"] = iterators
        if prepared.named:
            header["named"] = list(prepared.named.items())
        if closure.round is not None:
            header["round"] = closure.round
        return header

    def _send_resource(self, resource: Resource) -> None:
        if resource.name not in self._has:
            self._has.add(resource.name)
            num_replicas = self._session.devices_per_worker
            header = {"name": resource.name, "kind": resource.kind, "num_replicas": num_replicas}
            self._send("resource", resource, header, [resource.pickle])

    def _send_once(self, kind: Kind, name: str, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        if name not in self._known:
            self._known.add(name)
            self._refused.pop(name, None)
            self._send(kind, name, header, arrays)

    def _send(self, kind: Kind, what: Any, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        self._send_all([self._message(kind, header, arrays)], [(kind, what)])

    def _message(self, kind: Kind, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        header["op"] = kind
        header["incarnation"] = self._session.incarnation
        return Message(header, arrays)

    def _send_all(self, messages: Sequence[Message], of: Sequence[tuple[Kind, Any]]) -> None:
        self._num_bundles = number = self._num_bundles + 1
        now = time.monotonic()
        sizes = [sum(array.nbytes for array in message.arrays) for message in messages]
        self._bytes_out += sum(sizes)
        # Before they are sent: an answer may be here sooner than the call is left.
        for (kind, what), num_bytes in zip(of, sizes, strict=True):
            self._awaited.append(_Awaited(kind, what, now, number, num_bytes))
        try:
            self._link.send_all(messages, _FOREVER_S)
        except Exception:
            self._bytes_out -= sum(sizes)
            with contextlib.suppress(IndexError):  # the first ones may have been answered
                while self._awaited[-1].bundle == number:
                    self._awaited.pop()
            raise

    # --- receiving -------------------------------------------------------------------------------------

    def receive(self) -> tuple[list[tuple[Closure, Message | Exception]], float]:
        """Waits for answers to closures; returns them, and when the first closure was sent.

        What is answered to others is noted.

        Raises:
          UnavailableError: The connection has ended.
        """
        answers: list[tuple[Closure, Message | Exception]] = []
        first_sent_at = 0.0
        while not answers:
            if not self._came:
                self._came.extend(self._receive())
            while self._came:
                answer = self._came[0]
                if isinstance(answer, UnavailableError) and answer.task in (self.worker, ""):
                    if answers:  # those first
                        break
                    raise answer  # not of a server that the worker needs
                self._came.popleft()
                awaited = self._awaited[0]
                self._bytes_done += awaited.num_bytes
                if awaited.kind == "closure":
                    first_sent_at = first_sent_at or awaited.sent_at
                    answers.append((awaited.what, answer))
                else:
                    self._note(awaited, answer)
                self._awaited.popleft()
        return answers, first_sent_at

    def _receive(self) -> Sequence[Message | Exception]:
        try:
            return self._link.receive_all(_FOREVER_S)
        except MessageError as error:  # what came is none, or what was sent is too large there: of the first
            if not self._awaited:
                raise
            return [error]

    def _note(self, awaited: _Awaited, answer: Message | Exception) -> None:
        if awaited.kind == "resource":
            self._note_resource(awaited.what, answer)
        elif isinstance(answer, Exception):
            self._note_refusal(awaited.kind, awaited.what, answer)

    def _note_refusal(self, kind: Kind, what: Any, error: Exception) -> None:
        if kind != "release":
            self._refused[what] = error

    def _note_resource(self, resource: Resource, answer: Message | Exception) -> None:
        if isinstance(answer, Exception):
            self._resources.failed(resource.name, self.worker, answer)
        else:
            self._resources.made(resource.name, self.worker, answer.header.get("spec"))

    def input_error(self, prepared: PreparedClosure) -> ClosureInputError | None:
        """Why the worker does not have what a closure takes."""
        return self._resources.error(prepared.iterators, self.worker)


class _Ready(NamedTuple):
    """A closure that can be sent, with what travels with it."""

    closure: Closure
    prepared: PreparedClosure
    arrays: Sequence[np.ndarray]


def _sent_along(prepared: PreparedClosure) -> Sequence[np.ndarray]:
    """The arguments of a closure that are sent with it."""
    if not prepared.named:
        return prepared.arguments
    return [array for position, array in enumerate(prepared.arguments) if position not in prepared.named]
