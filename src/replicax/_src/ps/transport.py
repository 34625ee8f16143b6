"""The calls between tasks: a ``TaskServer`` answers what ``TaskClient`` and its ``Link`` ask, over Arrow Flight.

``ask`` is one call with a deadline, and heals when the task was started again. A ``Link`` is a stream of messages and
answers, in order; it does not heal: a new one is opened. What travels is said in ``messages.py``, who may speak in
``credentials.py``. Memory is safe from those whom the credentials keep out: they are sent away before the body of a
call is read. An authenticated peer is trusted with memory: a compressed batch, say, is large before anybody sees it.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self, TypeVar, final

from replicax._src.cluster.spec import join_address, split_address
from replicax._src.errors import MissingExtraError, ReplicaxError
from replicax._src.ps.buffers import Buffers
from replicax._src.ps.connections import cut_accepted, cut_made, port_of_peer, resolved
from replicax._src.ps.credentials import TOKEN_VARIABLE, Credentials
from replicax._src.ps.deadlines import Deadline, Deadlines
from replicax._src.ps.errors import MessageError, UnavailableError, described, of_answer
from replicax._src.ps.messages import (
    LARGEST_BODY,
    LARGEST_HEADER,
    Decoder,
    Encoded,
    Message,
    decoded_header,
    encode,
    header_bytes,
)

_T = TypeVar("_T")

log = logging.getLogger("replicax")

_PING = (
    ""  # asked before a stream is opened: it makes the connection, with a deadline, and shows the credentials
)
_CANCEL_S = 0.2
_RELEASE_S = 1.0


def _flight() -> ModuleType:
    try:
        from replicax._src.ps import flight
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("pyarrow"):
            raise
        raise MissingExtraError("Parameter servers need pyarrow: pip install 'replicax[ps]'.") from error
    return flight


# --- servers ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Session:
    """One stream at a server, from when it is opened until it ends.

    Attributes:
      number: From 1, unique at the server.
      peer: Where it comes from, for people.
      state: For the service.
    """

    number: int
    peer: str
    state: dict[str, Any] = field(default_factory=dict)


class Service(Protocol):
    """What a ``TaskServer`` answers with. It is called on many threads: at once for different streams and asks."""

    def ask(self, what: str, header: Mapping[str, Any], session: Session | None) -> Mapping[str, Any]:
        """The answer to an ``ask``, of JSON values. It comes outside of streams: ``session`` is None."""
        ...

    def answer(self, message: Message, session: Session) -> Message:
        """The answer to a message of a stream. The next one of this stream waits for it."""
        ...

    def closed(self, session: Session) -> None:
        """The stream has ended, whatever the reason."""
        ...


class _Counts:
    """Of one end of a stream; only its thread writes."""

    __slots__ = ("bytes_in", "bytes_out", "messages")

    def __init__(self) -> None:
        self.messages = self.bytes_in = self.bytes_out = 0

    def add(self, other: _Counts) -> None:
        self.messages += other.messages
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out


@final
class TaskServer:
    """Listens at an address and answers with a ``Service``. Use it in ``with``, or ``start`` and ``shutdown`` it.

    Args:
      address: ``host:port``. A host that is not of the loopback means all networks of this machine. Port 0 takes a
        free one.
      credentials: Peers without the same are sent away.
      max_message_bytes: Of one message; a peer that announces more is told so and its stream ended, before memory
        is allocated for it.
      max_streams: How many may be open; each has a thread.

    Raises:
      InvalidArgumentError: It would be open to everybody on the network, or a file of the credentials is wrong.
      MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self,
        address: str,
        service: Service,
        credentials: Credentials,
        *,
        max_message_bytes: int = LARGEST_BODY,
        max_streams: int = 256,
    ):
        credentials.check_server(address)
        self._address = address
        self._service = service
        self._credentials = credentials
        self._max_message_bytes = max_message_bytes
        self._max_streams = max_streams
        self._flight = _flight()
        self._server: Any = None
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._streams: dict[Session, _Stream] = {}
        self._ended = _Counts()
        self._num_rejected = 0
        self._is_ending = self._is_shut_down = False

    @property
    def port(self) -> int:
        """Where it listens; before ``start`` what the address says, maybe 0."""
        return split_address(self._address)[1] if self._server is None else self._server.port

    @property
    def address(self) -> str:
        """``host:port``, with the true port once it has started."""
        return join_address(split_address(self._address)[0], self.port)

    def start(self) -> None:
        """Begins to listen.

        Raises:
          UnavailableError: It cannot listen there; the port may be in use.
        """
        if self._credentials.admits_anybody:
            log.warning(
                "The task at %s has no credentials: every program of this machine may use it. Set %s to a secret, the "
                "same for all tasks.",
                self._address,
                TOKEN_VARIABLE,
            )
        try:
            self._server = self._flight.Server(self._address, self._credentials, self)
            atexit.register(
                self.shutdown
            )  # later, a thread of gRPC that calls Python would abort the process
        except self._flight.ERRORS as error:
            raise UnavailableError(
                f"The task cannot listen at {self._address}: {error}. Is the port in use, or the host of another machine?"
            ) from error

    def statistics(self) -> dict[str, int]:
        """Messages answered and their bytes in both directions, streams that are open, and what was rejected."""
        total = _Counts()
        with self._lock:
            for counts in (self._ended, *(stream.counts for stream in self._streams.values())):
                total.add(counts)
            return {
                "messages": total.messages,
                "bytes_in": total.bytes_in,
                "bytes_out": total.bytes_out,
                "streams": len(self._streams),
                "rejected": self._num_rejected,
            }

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Stops listening. What is being answered gets half of the time; then the peers' connections are cut."""
        self._is_ending = True
        server, deadline = self._server, time.monotonic() + timeout_s
        if server is None or self._is_shut_down:
            return
        self._is_shut_down = True
        atexit.unregister(self.shutdown)
        # A daemon: should it wait for ever, it keeps the server, which would wait too when it is collected.
        ending = threading.Thread(target=server.shutdown, name="replicax shutdown", daemon=True)
        ending.start()
        while self._is_answering() and time.monotonic() < deadline - timeout_s / 2:
            time.sleep(0.005)
        ending.join(0.01)
        while ending.is_alive() and time.monotonic() < deadline:
            with self._lock:
                peers = [port_of_peer(session.peer) for session in self._streams]
            cut_accepted(server.port, {port for port in peers if port is not None})
            ending.join(0.05)
        if ending.is_alive():
            log.warning(
                "%d streams at %s did not end within %g s.", len(self._streams), self.address, timeout_s
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _is_answering(self) -> bool:
        with self._lock:
            return any(stream.is_answering for stream in self._streams.values())

    # What the server of flight.py asks, on threads of gRPC.

    def rejected(self) -> None:
        with self._lock:
            self._num_rejected += 1

    def action(self, what: str, body: bytes) -> bytes:
        try:
            if what == _PING:
                return b"{}"
            if len(body) > LARGEST_HEADER:
                raise MessageError(
                    f"{what!r} was asked with {len(body)} bytes, at most {LARGEST_HEADER} are taken."
                )
            return header_bytes(self._service.ask(what, decoded_header(body), None))
        except Exception as error:
            return header_bytes(self._failure(error, what))

    def stream(self, pipe: Any, peer: str) -> None:
        session = Session(next(self._numbers), peer)
        stream = _Stream(pipe, Decoder(Buffers(), self._max_message_bytes))
        with self._lock:
            if self._is_ending or len(self._streams) >= self._max_streams:
                self._num_rejected += 1
                raise UnavailableError(
                    "the task is ending"
                    if self._is_ending
                    else f"it has {self._max_streams} streams open, the most"
                )
            self._streams[session] = stream
        try:
            pipe.begin()
            while not self._is_ending and stream.turn(lambda message: self._answer(message, session)):
                pass
        except MessageError:
            self.rejected()
            raise
        finally:
            with self._lock:
                del self._streams[session]
                self._ended.add(stream.counts)
            self._service.closed(session)

    def _answer(self, message: Message, session: Session) -> Encoded:
        try:
            return encode(self._service.answer(message, session))
        except Exception as error:
            return encode(Message(self._failure(error, message.header.get("op", "a message"))))

    def _failure(self, error: Exception, what: str) -> dict[str, Any]:
        if not isinstance(error, ReplicaxError):
            log.error("%s failed.", what, exc_info=error)
        return {"error": described(error)}


@final
class _Stream:
    """The server's end of a stream."""

    def __init__(self, pipe: Any, decoder: Decoder):
        self._pipe = pipe
        self._decoder = decoder
        self.counts = _Counts()
        self.is_answering = False

    def turn(self, answer: Callable[[Message], Encoded]) -> bool:
        """Takes a message and sends the answer; False when the peer has ended the stream."""
        message = None
        while message is None:
            try:
                head, piece = self._pipe.read()
            except EOFError:
                return False
            self.counts.bytes_in += _num_bytes(head, piece)
            message = self._decoder.feed(head, piece)
        self.is_answering = True
        try:
            self._write(answer(message))
        finally:
            self.is_answering = False
        return True

    def _write(self, message: Encoded) -> None:
        self.counts.messages += 1
        self.counts.bytes_out += (
            message.num_bytes
        )  # before it arrives, so that who has the answer finds it counted
        self._pipe.write(message)


def _num_bytes(head: Any, piece: Any) -> int:
    return (0 if head is None else len(head)) + (0 if piece is None else len(piece))


# --- clients ------------------------------------------------------------------------------------------


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
        self._flight = _flight()
        self._client = self._flight.Client(address, credentials)
        self._address = address
        self._task = task
        self._max_message_bytes = max_message_bytes
        self._deadlines = Deadlines()
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._ended = _Counts()
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
        self._action(_PING, b"{}", timeout_s)
        self._peers = self._peers or resolved(*split_address(self._address))
        try:
            pipe = self._client.stream()
        except self._flight.ERRORS as error:
            raise self._error(error, "open a stream") from error
        link = Link(self, pipe, Decoder(Buffers(), self._max_message_bytes))
        with self._lock:
            self._links.add(link)
        link._begin(max(0.0, deadline - time.monotonic()))
        return link

    def statistics(self) -> dict[str, int]:
        """Answers that came by links and bytes in both directions, and links that are open."""
        total = _Counts()
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

    def _action(self, what: str, body: bytes, timeout_s: float) -> bytes:
        asked = f"answer {what!r}" if what else "take a connection"
        if self._is_closed:
            raise UnavailableError(f"The client of {self._name} was closed.", self._task)
        try:
            return self._client.action(what, body, timeout_s)
        except self._flight.ERRORS as error:
            raise self._error(error, f"{asked} within {timeout_s:g} s") from error

    def _error(self, error: BaseException, what: str) -> ReplicaxError:
        return self._flight.error_of(error, self._name, what)

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
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._why_closed = ""
        self._send_deadline = Deadline(lambda limit_s: self._expire("take", limit_s))
        self._receive_deadline = Deadline(lambda limit_s: self._expire("answer", limit_s))
        self.counts = _Counts()
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

    def receive(self, timeout_s: float) -> Message:
        """Waits for the answer to the first message that has none yet.

        Raises:
          UnavailableError: The task has ended, or did not answer in time. The link is closed.
          MessageError: What came is no message. The link is closed.
          ReplicaxError: What ``ps.errors.of_answer`` makes of an answer that is an error. The link goes on.
        """
        answer = self._bounded(self._receiving, self._receive_deadline, timeout_s, self._read)
        if "error" in answer.header:
            raise of_answer(answer.header["error"], self._client._task)
        return answer

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
                    raise UnavailableError(f"{client._name} has ended the stream.", client._task) from None
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

    def _write(self, message: Encoded) -> None:
        self.counts.bytes_out += message.num_bytes
        self._pipe.write(message)

    def _read(self) -> Message:
        while True:
            head, piece = self._pipe.read()
            self.counts.bytes_in += _num_bytes(head, piece)
            if (message := self._decoder.feed(head, piece)) is not None:
                self.counts.messages += 1
                return message

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
        if self._sending.acquire(timeout=_CANCEL_S):
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
