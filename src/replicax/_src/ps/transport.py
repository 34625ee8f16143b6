"""The calls between tasks: a ``TaskServer`` answers what ``TaskClient`` and its ``Link`` ask, over Arrow Flight.

``ask`` is one call with a deadline, and heals when the task was started again. A ``Link`` is a stream of messages and
answers, in order; it does not heal: a new one is opened. What travels is said in ``messages.py``, who may speak in
``credentials.py``. Memory is safe from those whom the credentials keep out: they are sent away before the body of a
call is read. An authenticated peer is trusted with memory: a compressed batch, say, is large before anybody sees it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, final

from replicax._src.cluster.spec import split_address
from replicax._src.errors import ReplicaxError
from replicax._src.ps.buffers import Buffers
from replicax._src.ps.bundles import bundled
from replicax._src.ps.connections import cut_made, resolved
from replicax._src.ps.credentials import Credentials
from replicax._src.ps.deadlines import Deadline, Deadlines
from replicax._src.ps.errors import UnavailableError, of_answer
from replicax._src.ps.messages import (
    LARGEST_BODY,
    Decoder,
    Encoded,
    Message,
    decoded_header,
    encode,
    header_bytes,
)
from replicax._src.ps.server import PING, Counts, Service, Session, TaskServer, load_flight
from replicax._src.ps.sockets import connected

__all__ = ["Link", "Service", "Session", "TaskClient", "TaskServer"]

log = logging.getLogger("replicax")

_T = TypeVar("_T")

_CANCEL_S = 0.2
_RELEASE_S = 1.0


@final
class TaskClient:
    """Speaks to one task. Threads may share it; nothing is connected before the first call.

    Args:
      address: ``host:port`` of the task.
      credentials: The same kind as the task's.
      task: Its name, for messages and errors: ``"ps 0"``.
      max_message_bytes: Of one answer.

    Raises:
      InvalidArgumentError: A file of the credentials cannot be read.
      MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self, address: str, credentials: Credentials, task: str, *, max_message_bytes: int = LARGEST_BODY
    ):
        self._flight = load_flight()
        self._client = self._flight.Client(address, credentials)
        self._uses_tls = credentials.uses_tls
        self._address = address
        self._task = task
        self._max_message_bytes = max_message_bytes
        self._deadlines = Deadlines()
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._ended = Counts()
        self._is_closed = False
        self._peers: set[tuple[str, int]] = set()  # where its connections lead to

    def ask(self, what: str, header: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """Asks the task for one thing, and waits for the answer.

        Raises:
          UnavailableError: The task is dead, stopped, or did not answer in time. It may have done what was asked.
          UnauthenticatedError: It refused the credentials.
          ReplicaxError: What ``ps.errors.of_answer`` makes of an answer that is an error.
        """
        answer = decoded_header(self._action(what, header_bytes(header), timeout_s))
        if "error" in answer:
            raise of_answer(answer["error"], self._task)
        return answer

    def open(self, timeout_s: float = 10.0) -> Link:
        """Opens a stream.

        Raises:
          UnavailableError: The task is dead or stopped.
          UnauthenticatedError: It refused the credentials.
        """
        deadline = time.monotonic() + timeout_s
        way_in = decoded_header(self._action(PING, b"{}", timeout_s))
        pipe = self._socket(way_in, deadline) or self._stream()
        link = Link(self, pipe, Decoder(Buffers(), self._max_message_bytes))
        with self._lock:
            self._links.add(link)
            is_closed = self._is_closed
        if is_closed:  # meanwhile: nobody else would close it, and no deadline would pass
            link.close()
            raise self._closed()
        link._begin(max(0.0, deadline - time.monotonic()))
        return link

    def statistics(self) -> dict[str, int]:
        """Answers that came by links and bytes in both directions, and links that are open."""
        total = Counts()
        with self._lock:
            for counts in (self._ended, *(link.counts for link in self._links)):
                total.add(counts)
            return {
                "messages": total.messages,
                "bytes_in": total.bytes_in,
                "bytes_out": total.bytes_out,
                "links": len(self._links),
            }

    def close(self) -> None:
        """Closes all links and the connection. What waits for an answer raises UnavailableError."""
        self._is_closed = True
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()
        self._deadlines.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _socket(self, way_in: Mapping[str, Any], deadline: float) -> Any:
        """A stream on a socket of its own, if the task has these, and is where it is thought to be."""
        host, port = split_address(self._address)
        # It is behind something that passes connections on, or uses TLS; or something before it does.
        if way_in.get("at") != port or self._uses_tls:
            return None
        try:
            # The other half is for a stream of Arrow Flight.
            limit_s = max(0.001, deadline - time.monotonic()) / 2
            return connected(host, way_in["port"], way_in["ticket"], limit_s)
        except OSError as error:
            log.info("%s is not reached at port %s, for streams: %s.", self._name, way_in["port"], error)
            return None

    def _stream(self) -> Any:
        self._peers = self._peers or resolved(*split_address(self._address))
        try:
            return self._client.stream()
        except self._flight.ERRORS as error:
            if self._is_closed:
                raise self._closed() from None
            raise self._error(error, "open a stream") from error

    def _action(self, what: str, body: bytes, timeout_s: float) -> bytes:
        asked = f"answer {what!r}" if what else "take a connection"
        if self._is_closed:
            raise self._closed()
        try:
            return self._client.action(what, body, timeout_s)
        except self._flight.ERRORS as error:
            raise self._error(error, f"{asked} within {timeout_s:g} s") from error

    def _error(self, error: BaseException, what: str) -> ReplicaxError:
        return self._flight.error_of(error, self._name, what)

    def _closed(self) -> UnavailableError:
        return UnavailableError(f"The client of {self._name} was closed.", self._task)

    @property
    def _name(self) -> str:
        return f"{self._task} at {self._address}"

    def _ended_link(self, link: Link) -> None:
        with self._lock:
            if link in self._links:
                self._links.remove(link)
                self._ended.add(link.counts)


@final
class Link:
    """A stream to a task: messages, and their answers in order. Made by ``TaskClient.open``.

    Several messages may be sent before their answers are received. One thread may send while another one receives.
    After any error but one that the task answered with, the link is closed: open another one.
    """

    def __init__(self, client: TaskClient, pipe: Any, decoder: Decoder):
        self._client = client
        self._pipe = pipe
        self._decoder = decoder
        self._came: deque[Message] = deque()  # with the one before
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._why_closed = ""
        self._send_deadline = Deadline(lambda limit_s: self._expire("take", limit_s))
        self._receive_deadline = Deadline(lambda limit_s: self._expire("answer", limit_s))
        self.counts = Counts()
        for deadline in (self._send_deadline, self._receive_deadline):
            client._deadlines.add(deadline)

    def send(self, message: Message, timeout_s: float = 60.0) -> None:
        """Sends a message. Its arrays must not change until the answer has come: large ones are not copied.

        A task takes no message while its answer to an earlier one is not received, but for what the connection holds, a
        few hundred KB. Who sends more than that before it receives does the one and the other on two threads.

        Raises:
          MessageError: It cannot travel. The link goes on.
          UnavailableError: The task has ended, or took nothing for that time. The link is closed.
        """
        encoded = encode(message)
        self._bounded(self._sending, self._send_deadline, timeout_s, lambda: self._write(encoded))

    def send_all(self, messages: Sequence[Message], timeout_s: float = 60.0) -> None:
        """Sends messages in order, small ones together: that costs hardly more than one. See ``send``.

        Each is answered on its own. The task does the first ones while the others wait there; answers to what was sent
        together may come together, each a few milliseconds after it was there at the latest.

        Raises:
          MessageError: One cannot travel; none has been sent then. The link goes on.
          UnavailableError: As ``send``.
        """
        if len(messages) == 1:
            self.send(messages[0], timeout_s)
            return
        encoded = list(bundled([encode(message) for message in messages]))

        def write() -> None:
            for each in encoded:
                self._write(each)

        self._bounded(self._sending, self._send_deadline, timeout_s, write)

    def receive(self, timeout_s: float) -> Message:
        """Waits for the answer to the first message that has none yet.

        Raises:
          UnavailableError: The task has ended, or did not answer in time. The link is closed.
          MessageError: What came is no message. The link is closed.
          ReplicaxError: What ``ps.errors.of_answer`` makes of an answer that is an error. The link goes on.
        """
        answer = self._said(self._bounded(self._receiving, self._receive_deadline, timeout_s, self._read))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def receive_all(self, timeout_s: float) -> list[Message | ReplicaxError]:
        """Waits as ``receive``, and returns what has come together: at least one answer, or the error that it is."""
        first = self._bounded(self._receiving, self._receive_deadline, timeout_s, self._read)
        answers = [first, *self._came]
        self._came.clear()
        return [self._said(answer) for answer in answers]

    def call(self, message: Message, timeout_s: float) -> Message:
        """Sends a message and waits for its answer; see ``send`` and ``receive``."""
        started = time.monotonic()
        self.send(message, timeout_s)
        return self.receive(max(0.0, timeout_s - (time.monotonic() - started)))

    def close(self) -> None:
        """Ends the stream. What waits for an answer raises UnavailableError."""
        self._end(f"The link to {self._client._name} was closed.")
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, timeout_s: float) -> None:
        self._bounded(self._sending, self._send_deadline, timeout_s, self._pipe.begin)

    def _bounded(
        self, lock: threading.Lock, deadline: Deadline, timeout_s: float, do: Callable[[], _T]
    ) -> _T:
        """Does what may block; whatever goes wrong in it closes the link."""
        client = self._client
        try:
            with lock:
                if self._why_closed:
                    raise UnavailableError(self._why_closed, client._task)
                client._deadlines.set(deadline, timeout_s)
                try:
                    return do()
                except EOFError:
                    why = self._why_closed or f"{client._name} has ended the stream."
                    raise UnavailableError(why, client._task) from None
                except UnavailableError as error:  # the peer says why, and not who it is
                    why = f"{client._name} has ended the stream: {error}."
                    raise UnavailableError(why, client._task) from None
                except client._flight.ERRORS as error:
                    if self._why_closed:
                        raise UnavailableError(self._why_closed, client._task) from None
                    raise client._error(error, "go on with a stream") from error
                finally:
                    deadline.clear()
        except ReplicaxError as error:
            self._end(str(error))
            self._release()
            raise
        except BaseException as error:  # Ctrl-C: a message may be half sent, or half received
            self._end(f"{type(error).__name__} came while the stream to {client._name} was used.")
            self._release()
            raise

    def _last_words(self) -> ReplicaxError | None:
        """Why the task has ended the stream, if it says so in what it has sent, and nobody waits for that."""
        if self._why_closed or not self._receiving.acquire(blocking=False):
            return None
        try:
            while True:
                self._pipe.receive(self._decoder)
        except ReplicaxError as error:
            return error
        except (EOFError, *self._client._flight.ERRORS):
            return None
        finally:
            self._receiving.release()

    def _write(self, message: Encoded) -> None:
        self.counts.bytes_out += message.num_bytes
        try:
            self._pipe.write(message)
        except self._client._flight.ERRORS:
            said = self._last_words()
            if said is not None:
                raise said from None
            raise

    def _read(self) -> Message:
        while not self._came:
            try:
                messages = self._pipe.receive(self._decoder)
            finally:
                self.counts.bytes_in = self._decoder.num_bytes
            self.counts.messages += len(messages)
            self._came.extend(messages)
        return self._came.popleft()

    def _said(self, answer: Message) -> Message | ReplicaxError:
        error = answer.header.get("error")
        return answer if error is None else of_answer(error, self._client._task)

    def _expire(self, what: str, timeout_s: float) -> None:
        self._end(
            f"{self._client._name} did not {what} a message within {timeout_s:.3g} s: it is stopped, busy, or cannot "
            f"be reached."
        )

    def _end(self, why: str) -> None:
        """Wakes who waits; from any thread."""
        if not self._why_closed:
            self._why_closed = why
            self._wake()
            self._client._ended_link(self)
            for deadline in (self._send_deadline, self._receive_deadline):
                self._client._deadlines.remove(deadline)

    def _wake(self) -> None:
        """Ends what blocks. A write to a stopped task is not woken when it is cancelled.

        So the connections to that task are cut, with all links on them: it takes nothing of any of them.
        """
        if self._pipe.cancel_wakes_writers:
            self._pipe.cancel()
        elif self._sending.acquire(timeout=_CANCEL_S):
            self._pipe.cancel()
            self._sending.release()
        else:
            cut_made(self._client._peers)

    def _release(self) -> None:
        """Gives up the stream, when nobody reads or writes any more: who did has been woken."""
        for lock in (self._sending, self._receiving):
            if not lock.acquire(timeout=_RELEASE_S):
                return
            lock.release()
        self._pipe.cancel()
        self._pipe.close()
