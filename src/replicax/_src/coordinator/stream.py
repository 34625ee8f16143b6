"""``WorkerStream``: one connection to a worker. What it was sent, and which answer is to what.

Answers come in the order of the messages. Programs and constants are sent once, before the first closure that needs them.
A connection that broke is given up with all that it awaited: what a worker may still answer is never read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, final

import numpy as np

from replicax._src.coordinator.closures import Closure
from replicax._src.coordinator.prepared import Client, Link, PreparedClosure, Session
from replicax._src.coordinator.resources import Resource, Resources
from replicax._src.ps.errors import ClosureInputError, UnavailableError
from replicax._src.ps.messages import Message
from replicax._src.ps.resources import WORKER_INDEX

Kind = Literal["closure", "program", "constant", "resource", "release"]

# A closure may take as long as it takes: who is silent is found by the beats.
_FOREVER_S = 10.0 * 365 * 24 * 3600
_SMALL_BYTES = 4096  # so much, some times over, a connection takes without its peer reading


@final
class WorkerStream:
    """A connection. One thread at a time sends, another one receives.

    Args:
      client: To the worker; it is closed with the stream.
      link: Opened by it.
      instance: Of the worker's process.

    Attributes:
      over: Set when the connection has ended.
      reason: Why, if it was not closed on purpose.
    """

    def __init__(
        self, worker: str, client: Client, link: Link, instance: Any, session: Session, resources: Resources
    ):
        self.worker, self.client, self.instance = worker, client, instance
        self._link, self._session, self._resources = link, session, resources
        self._awaited: deque[tuple[Kind, Any, float]] = deque()
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

    def running(self) -> Closure | None:
        """The closure that the worker was at when the connection ended."""
        for kind, what, _ in self._awaited:
            if kind == "closure":
                return what
            if kind == "resource":
                return None
        return None

    def making(self) -> Resource | None:
        """What the worker was to make when the connection ended."""
        for kind, what, _ in self._awaited:
            if kind in ("closure", "resource"):
                return what if kind == "resource" else None
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

    def try_send(self, closures: Sequence[Closure], low: int) -> Sequence[Closure]:
        """Sends closures that are small, if nobody else is sending. Never blocks. Returns those that it did not send."""
        if not self._sending.acquire(blocking=False):
            return closures
        try:
            for number, closure in enumerate(closures):
                prepared: PreparedClosure = closure.work.prepared
                if not self._is_ready(prepared):
                    return closures[number:]
                self._send_closure(closure, prepared, low)
            return ()
        finally:
            self._sending.release()

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

    def _is_ready(self, prepared: PreparedClosure) -> bool:
        known = self._known
        return (
            all(digest in known for digest in prepared.programs.values())
            and all(name in known for name in prepared.constants)
            and all(name in self._has for name in prepared.iterators)
            and sum(argument.nbytes for argument in _sent_along(prepared)) <= _SMALL_BYTES
        )

    def _send_closure(self, closure: Closure, prepared: PreparedClosure, low: int) -> None:
        session = self._session
        header = {
            "closure": (session.incarnation, closure.number),
            "low": low,
            "epoch": session.epoch,
            "program": dict(prepared.programs),
            "iterators": prepared.iterators,
            "named": list(prepared.named.items()),
        }
        if closure.round is not None:
            header["round"] = closure.round
        self._send("closure", closure, header, _sent_along(prepared))

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
        header["op"] = kind
        header["incarnation"] = self._session.incarnation
        # Before it is sent: the answer may be here sooner than the call is left.
        self._awaited.append((kind, what, time.monotonic()))
        try:
            self._link.send(Message(header, arrays), _FOREVER_S)
        except BaseException:
            self._awaited.pop()
            raise

    # --- receiving -------------------------------------------------------------------------------------

    def receive(self) -> tuple[Closure, Message | Exception, float]:
        """Waits for the answer to a closure; returns both, and when it was sent. What is answered to others is noted.

        Raises:
          UnavailableError: The connection has ended.
        """
        while True:
            answer = self._receive()
            kind, what, sent_at = self._awaited[0]
            if kind == "closure":
                self._awaited.popleft()
                return what, answer, sent_at
            if kind == "resource":
                self._note_resource(what, answer)
            elif isinstance(answer, Exception):
                self._note_refusal(kind, what, answer)
            self._awaited.popleft()

    def _receive(self) -> Message | Exception:
        try:
            return self._link.receive(_FOREVER_S)
        except UnavailableError as error:
            if error.task in (self.worker, ""):
                raise
            return error  # of a server that the worker needs
        except Exception as error:
            return error

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


def _sent_along(prepared: PreparedClosure) -> list[np.ndarray]:
    """The arguments of a closure that are sent with it."""
    return [array for position, array in enumerate(prepared.arguments) if position not in prepared.named]
