"""``WorkerConnection``: one connection to a worker. It knows what was sent, and which answer belongs to which
request.

Answers come in the order of the messages. Programs and constants are sent once, before the first closure that needs
them. Small closures that need nothing else may travel together as a *message group*, in one write. Each is a message
of its own, and gets its own answer. A broken connection is dropped with all that it awaited: later answers of the
worker are never read.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, final

import numpy as np

from replicax._ps.client.session import Session
from replicax._ps.coordinator.closures import Closure
from replicax._ps.coordinator.resources import Resource, Resources
from replicax._ps.strategy.remote_closures import PreparedClosure
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import Link, TaskClient
from replicax._ps.worker.resources import WORKER_INDEX
from replicax._src.program_kit.errors import ClosureInputError, MessageError, UnavailableError

Kind = Literal["closure", "program", "constant", "resource", "release"]

# A closure may take any time: heartbeats find a silent worker.
_FOREVER_S = math.inf
_SMALL_BYTES = 4096
_MOST_UNANSWERED_BYTES = 8 * _SMALL_BYTES  # a connection buffers this much while its peer does not read


class Request(NamedTuple):
    """A message to the worker.

    Attributes:
      kind: The kind of the message.
      what: The closure or the resource, or the name of something else.
      message: The message.
    """

    kind: Kind
    what: Any
    message: Message


class _Awaited(NamedTuple):
    """A request that has not been answered.

    Attributes:
      group: The number of its message group. Requests that travelled together have the same number.
      num_bytes: The number of bytes of its arrays.
    """

    kind: Kind
    what: Any
    sent_at: float
    group: int
    num_bytes: int


@final
class WorkerConnection:
    """A connection to a worker. Threads may share it; one of them receives.

    ``send`` sends the groups that ``small``, ``whole`` or ``changed`` have made.

    Args:
      worker: The name of the worker.
      client: A client of the worker; it is closed with the connection.
      link: The connection that the client has opened.
      instance: The instance id of the worker's process.
      session: The session with the tasks.
      resources: The resources that workers make.

    Attributes:
      over: An event that is set when the connection has ended.
      reason: The error that ended it; None if it was closed on purpose.
      unsent: Closures that the sending thread, which may block, must send.
      needs: Closures, each with the signature of a program that it needs first, and the message of a dataset that has
        too
        few elements; None if none has.
    """

    def __init__(
        self,
        worker: str,
        client: TaskClient,
        link: Link,
        instance: Any,
        session: Session,
        resources: Resources,
    ):
        self.worker, self.client, self.instance = worker, client, instance
        self._link, self._session, self._resources = link, session, resources
        self._incarnation = session.incarnation
        self.unsent: deque[Closure] = deque()
        self.needs: deque[tuple[Closure, str, str | None]] = deque()
        self._awaited: deque[_Awaited] = deque()
        self._came: deque[Message | Exception] = deque()
        self._num_groups = 0
        self._bytes_out = self._bytes_done = 0  # only one thread at a time writes each of them
        self._known: set[str] = set()
        self._refused: dict[str, Exception] = {}
        self._has: set[str] = {WORKER_INDEX}
        self._sending = threading.Lock()
        self.over = threading.Event()
        self.reason: BaseException | None = None

    def end(self, reason: BaseException | None) -> None:
        """Ends the connection, from any thread. A thread that blocks in it gets an UnavailableError."""
        if not self.over.is_set():
            self.reason = reason
            self.over.set()
        self._link.close()

    def interrupt(self, error: BaseException) -> None:
        """Ends the connection because a thread that used it was interrupted."""
        self.end(
            UnavailableError(f"{type(error).__name__} interrupted the sending of functions.", self.worker)
        )

    def running(self) -> list[Closure]:
        """Returns the closure that ran when the connection ended, or several that came together, of which one ran."""
        awaited = list(self._awaited)
        first = next((each for each in awaited if each.kind in ("closure", "resource")), None)
        if first is None or first.kind == "resource":
            return []
        return [each.what for each in awaited if each.group == first.group and each.kind == "closure"]

    def making(self) -> Resource | None:
        """Returns the resource that the worker made when the connection ended; None if it did something else."""
        for each in list(self._awaited):
            if each.kind in ("closure", "resource"):
                return each.what if each.kind == "resource" else None
        return None

    # --- sending ---------------------------------------------------------------------------------------

    def send(self, groups: Iterable[Sequence[Request]], *, may_block: bool = True) -> int:
        """Sends message groups, which are made one by one under the send lock. Returns the number of requests sent.

        Args:
          groups: The message groups.
          may_block: True to wait for other senders and for a slow worker. False to stop at the first group that would
            block;
            the sending thread then finds out why.

        Raises:
          UnavailableError: The connection has ended.
          Exception: A message cannot be made, or cannot travel.
        """
        if not self._sending.acquire(blocking=may_block):
            return 0
        num_sent = 0
        try:
            for requests in groups:
                self._await(requests)
                try:
                    self._link.send_all([request.message for request in requests], _FOREVER_S)
                except Exception:
                    self._await_no_more(requests)
                    raise
                num_sent += len(requests)
        except MessageError:
            if may_block:
                raise
        except Exception:
            raise
        except BaseException as error:  # Ctrl-C: it is unknown whether they were sent
            self.interrupt(error)
            raise
        finally:
            self._sending.release()
        return num_sent

    def small(self, closures: Sequence[Closure], low: int, num_together: int) -> Iterator[Sequence[Request]]:
        """Yields groups of closures that can be sent without blocking, up to the first one that cannot.

        These closures are small, the worker has all that they need, and little is unanswered. A worker does not read
        while its
        answers are not read, so the receiving thread must not wait for it.

        Args:
          closures: The closures.
          low: All closures with lower numbers have ended.
          num_together: The most closures in a group.
        """
        begin = 0
        while begin < len(closures) and not self.over.is_set():
            group: list[Request] = []
            num_bytes = self._bytes_out - self._bytes_done
            for closure in closures[begin : begin + num_together]:
                prepared: PreparedClosure | None = closure.work.prepared
                if prepared is None or not self._has_all(prepared) or (group and closure.travels_alone):
                    break
                arrays = _sent_along(prepared)
                size = sum(array.nbytes for array in arrays)
                if size > _SMALL_BYTES or num_bytes + size > _MOST_UNANSWERED_BYTES:
                    break
                group.append(self._closure(closure, prepared, arrays, low))
                num_bytes += size
                if closure.travels_alone:
                    break
            if not group:
                return
            yield group
            begin += len(group)

    def whole(self, closure: Closure, low: int) -> Iterator[Sequence[Request]]:
        """Yields a closure, and before it the programs, constants and resources that the worker lacks."""
        prepared: PreparedClosure = closure.work.prepared
        for name in prepared.iterators:
            if name not in self._has:
                yield [self._resource(self._resources.get(name))]
        for name, array in prepared.constants.items():
            if name not in self._known:
                yield [self._once("constant", name, {"name": name}, [array])]
        for digest in list(prepared.programs.values()):
            if digest not in self._known:
                program = prepared.program(digest)
                blobs = [np.frombuffer(blob, np.uint8) for blob in program.blobs]
                yield [
                    self._once("program", digest, {"digest": digest, "described": program.described()}, blobs)
                ]
        yield [self._closure(closure, prepared, _sent_along(prepared), low)]

    def changed(self, resources: Sequence[Resource]) -> Iterator[Sequence[Request]]:
        """Has the worker make the ``resources`` that it has not made yet, and release all others."""
        for resource in resources:
            if resource.name not in self._has:
                yield [self._resource(resource)]
        unused = sorted(self._has.difference((resource.name for resource in resources), (WORKER_INDEX,)))
        if unused:
            self._has.difference_update(unused)
            yield [self._request("release", unused, {"names": unused}, ())]

    def forget(self, name: str) -> Exception | None:
        """Records that the worker lacks a program or a constant. Returns the error if the worker had refused it.

        Without an error it is sent again with the next closure that needs it.
        """
        self._known.discard(name)
        return self._refused.get(name)

    def _has_all(self, prepared: PreparedClosure) -> bool:
        """True if the worker has been sent what a closure needs, and could make its resources."""
        known, iterators = self._known, prepared.iterators
        return (
            known.issuperset(prepared.programs.values())
            and known.issuperset(prepared.constants)
            and (not iterators or (self._has.issuperset(iterators) and self.input_error(prepared) is None))
        )

    def _closure(
        self, closure: Closure, prepared: PreparedClosure, arrays: Sequence[np.ndarray], low: int
    ) -> Request:
        header = {
            "closure": (self._incarnation, closure.number),
            "low": low,
            "epoch": self._session.epoch,
            "program": prepared.programs,
        }
        if iterators := prepared.iterators:
            header["iterators"] = iterators
        if prepared.named:
            header["named"] = list(prepared.named.items())
        if closure.round is not None:
            header["round"] = closure.round
        return self._request("closure", closure, header, arrays)

    def _resource(self, resource: Resource) -> Request:
        self._has.add(resource.name)
        num_replicas = self._session.devices_per_worker
        header = {"name": resource.name, "kind": resource.kind, "num_replicas": num_replicas}
        return self._request("resource", resource, header, [resource.pickle])

    def _once(self, kind: Kind, name: str, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> Request:
        self._known.add(name)
        self._refused.pop(name, None)
        return self._request(kind, name, header, arrays)

    def _request(
        self, kind: Kind, what: Any, header: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> Request:
        header["op"] = kind
        header["incarnation"] = self._incarnation
        return Request(kind, what, Message(header, arrays))

    def _await(self, requests: Sequence[Request]) -> None:
        """Registers requests before they are sent, because an answer may arrive before the send call returns."""
        self._num_groups = number = self._num_groups + 1
        now = time.monotonic()
        for kind, what, message in requests:
            num_bytes = sum(array.nbytes for array in message.arrays)
            self._bytes_out += num_bytes
            self._awaited.append(_Awaited(kind, what, now, number, num_bytes))

    def _await_no_more(self, requests: Sequence[Request]) -> None:
        self._bytes_out -= sum(array.nbytes for _, _, message in requests for array in message.arrays)
        with contextlib.suppress(IndexError):  # the earlier ones may have been answered
            while self._awaited[-1].group == self._num_groups:
                self._awaited.pop()

    # --- receiving -------------------------------------------------------------------------------------

    def receive(self) -> tuple[list[tuple[Closure, Message | Exception]], float]:
        """Waits for answers to closures. Returns them, and the time at which the first closure was sent.

        Answers to other requests are recorded.

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
                    if answers:  # return the earlier answers first
                        break
                    raise answer  # it is about this worker, not about a server that the worker needs
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
        except MessageError as error:  # the answer to the first request is malformed or too large
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
        """Returns the error because of which the worker lacks a resource of a closure; None if it has all."""
        return self._resources.error(prepared.iterators, self.worker)


def _sent_along(prepared: PreparedClosure) -> Sequence[np.ndarray]:
    """Returns the arguments of a closure that are sent with it."""
    if not prepared.named:
        return prepared.arguments
    return [array for position, array in enumerate(prepared.arguments) if position not in prepared.named]
