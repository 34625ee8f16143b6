"""``TaskServer``: a task's side of the transport, which answers messages. See ``transport.py``."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self, final

from replicax._ps.errors import described
from replicax._ps.transport.messages import (
    Decoder,
    Encoded,
    Message,
    encode,
)
from replicax._src.program_kit.cluster_tasks import Credentials
from replicax._src.program_kit.errors import MessageError, ReplicaxError, UnavailableError, missing_extra
from replicax._src.program_kit.task_connections import (
    Buffers,
    Connection,
    Endpoint,
    ForeignPeerError,
    PeerEndedError,
)

log = logging.getLogger("replicax")

_LOOK_S: Final = 0.006
"""The time between two looks for answers that wait for the answers to messages that came with their own."""
_HELD_S: Final = 0.002
"""A look sends those that have waited for this long."""
_MOST_HELD_BYTES: Final = 64 * 1024
_TAKE_ANSWER_S: Final = 600.0


def check_installed() -> None:
    """Checks that the package of the checksums is installed.

    Raises:
      MissingExtraError: It is not.
    """
    try:
        import xxhash  # noqa: F401
    except ImportError as error:
        raise missing_extra("Training with parameter servers", "ps") from error


@dataclass
class Counts:
    """Counts of the messages and bytes that one end of a connection has sent and received."""

    messages: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def add(self, other: Counts) -> None:
        """Adds the counts of another end."""
        self.messages += other.messages
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out


Answer = Callable[[Message], Message]
"""Answers a message. It is called on many threads: concurrently for different connections, in order for one."""


@final
class TaskServer:
    """Listens at an address and answers messages. Use it in ``with``, or ``start`` and ``shutdown`` it.

    Args:
      address: ``host:port``. A host other than loopback means all networks of this machine. Port 0 takes a free one.
      answer: Makes the answers.
      credentials: The credentials that peers must share.
      max_streams: The most open connections; each has a thread.

    Raises:
      InvalidArgumentError: Any machine of the network could connect, or a file of the credentials cannot be read.
      MissingExtraError: xxhash is not installed.
    """

    def __init__(
        self,
        address: str,
        answer: Answer,
        credentials: Credentials,
        *,
        max_streams: int = 512,
    ):
        credentials.check_server(address)
        check_installed()
        self._make_answer = answer
        self._endpoint = Endpoint(address, credentials)
        self._max_streams = max_streams
        self._listener = None
        self._lock = threading.Lock()
        self._streams: set[_Stream] = set()
        self._counted: set[_Stream] = set()  # connections that send more than requests
        self._ended = Counts()
        self._num_rejected = 0
        self._is_ending = self._is_shut_down = False
        self._pid = os.getpid()

    @property
    def port(self) -> int:
        """The port at which it listens. Before ``start`` it is that of the address, which may be 0."""
        return self._endpoint.port if self._listener is None else self._listener.port

    @property
    def address(self) -> str:
        """``host:port``, with the actual port once it has started."""
        return self._endpoint.with_port(self.port)

    def start(self) -> None:
        """Starts to listen.

        Raises:
          UnavailableError: It cannot listen there; the port may be in use.
        """
        self._listener = self._endpoint.listen(self._serve, self._rejected)
        atexit.register(self.shutdown)

    def statistics(self) -> dict[str, int]:
        """Counts messages answered, bytes in both directions, open connections, and rejected connections."""
        total = Counts()
        with self._lock:
            for counts in (self._ended, *(stream.counts for stream in self._streams)):
                total.add(counts)
            return {
                "messages": total.messages,
                "bytes_in": total.bytes_in,
                "bytes_out": total.bytes_out,
                "streams": len(self._streams),
                "rejected": self._num_rejected,
            }

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Stops listening. Answers in progress get half of the time; then the connections are closed."""
        self._is_ending = True
        listener, deadline = self._listener, time.monotonic() + timeout_s
        # A forked process shares the sockets, so shutting them down there would close them here too.
        if listener is None or self._is_shut_down or os.getpid() != self._pid:
            return
        self._is_shut_down = True
        atexit.unregister(self.shutdown)
        listener.close()
        while self._is_answering() and time.monotonic() < deadline - timeout_s / 2:
            time.sleep(0.005)
        while True:
            with self._lock:
                connections = [stream.connection for stream in self._streams]
            if not connections or time.monotonic() >= deadline:
                break
            for connection in connections:
                connection.cancel()
            time.sleep(0.005)
        if connections:
            log.warning(
                "%d connections at %s did not end within %g s.", len(connections), self.address, timeout_s
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _is_answering(self) -> bool:
        with self._lock:
            return any(stream.is_answering for stream in self._streams)

    def _rejected(self) -> None:
        with self._lock:
            self._num_rejected += 1

    # --- on the thread of a connection ---------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        try:
            self._serve_stream(connection)
        except PeerEndedError:
            pass
        except (MessageError, ForeignPeerError) as error:
            self._rejected()
            connection.end(str(error), is_refusal=True)
        except UnavailableError as error:
            connection.end(str(error))

    def _serve_stream(self, connection: Connection) -> None:
        stream = _Stream(connection, Decoder(Buffers()))
        with self._lock:
            if self._is_ending:
                self._num_rejected += 1
                raise UnavailableError("the task is ending")
            self._streams.add(stream)

        def answer(message: Message) -> Encoded:
            if stream not in self._counted and "ask" not in message.header:
                self._count(stream)
            return self._answer(message)

        try:
            while not self._is_ending:
                stream.turn(answer)
            raise UnavailableError("the task is ending")
        finally:
            stream.end()
            with self._lock:
                self._streams.remove(stream)
                self._counted.discard(stream)
                self._ended.add(stream.counts)

    def _count(self, stream: _Stream) -> None:
        """Counts a connection that sends more than requests. Requests are answered even beyond the limit."""
        with self._lock:
            if len(self._counted) >= self._max_streams:
                self._num_rejected += 1
                raise UnavailableError(f"it already has {self._max_streams} connections, its limit")
            self._counted.add(stream)

    def _answer(self, message: Message) -> Encoded:
        try:
            return encode(self._make_answer(message))
        except Exception as error:
            if not isinstance(error, ReplicaxError):
                log.error("%s failed.", message.header.get("op", "A message"), exc_info=error)
            return encode(Message({"error": described(error)}))


@final
class _Stream:
    """The server's end of a connection for messages.

    Answers to messages that came together are sent together, unless a slow one would delay them.
    """

    def __init__(self, connection: Connection, decoder: Decoder):
        self.connection = connection
        self._decoder = decoder
        self._held: list[Encoded] = []
        self._held_bytes = 0
        self._sending = threading.Lock()  # held while answers are sent
        self._changed = threading.Condition(self._sending)
        self._flusher: threading.Thread | None = None
        self._held_since = 0.0  # since when the oldest held answer waits, or the last one did
        self._is_flusher_asleep = False  # until it is notified
        self._is_over = False
        self._failure: OSError | None = None
        self._num_answers = 0
        self.is_answering = False

    @property
    def counts(self) -> Counts:
        """The number of messages answered, and of bytes in both directions."""
        return Counts(self._num_answers, self.connection.bytes_in, self.connection.bytes_out)

    def turn(self, answer: Callable[[Message], Encoded]) -> None:
        """Receives the next message and answers it.

        Raises:
          PeerEndedError: The peer has closed the connection.
          OSError: The connection has ended.
          MessageError: The data is not a message.
        """
        head = self.connection.receive(math.inf, self._decoder.room)
        message = self._decoder.filled() if head is None else self._decoder.decode(head)
        self.is_answering = True
        try:
            answered = answer(message)
            del message  # so that its memory can be reused
            # The arrays of an answer may change with the next message.
            may_wait = not answered.body and self.connection.has_frame()
            self._hold(answered) if may_wait else self._send(answered)
        finally:
            self.is_answering = False

    def end(self) -> None:
        """Stops sending."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _hold(self, answer: Encoded) -> None:
        """Holds an answer for a short time, to send it with the next one."""
        with self._sending:
            self._held.append(answer)
            self._held_bytes += len(answer.head)
            if self._held_bytes > _MOST_HELD_BYTES:
                self._send_held()
                return
            if len(self._held) > 1:
                return
            self._held_since = time.monotonic()
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush, name="replicax answers", daemon=True)
                self._flusher.start()
            elif self._is_flusher_asleep:
                self._changed.notify()

    def _send(self, answer: Encoded) -> None:
        """Sends an answer, after the held ones."""
        with self._sending:
            if self._failure is not None:
                raise self._failure
            self._held.append(answer)
            self._send_held()

    def _flush(self) -> None:
        """Sends answers that were held for long enough, if the connection's thread still works on the next answer.

        It looks from time to time while answers are held, as to wake it for each one would cost more.
        """
        with self._sending:
            while not self._is_over and self._failure is None:
                looked_at = time.monotonic()
                if self._held and self._held_since <= looked_at - _HELD_S:
                    try:
                        self._send_held()
                    except (
                        OSError
                    ) as error:  # an answer may be half sent: the connection ends with the next one
                        self._failure = error
                    continue
                self._is_flusher_asleep = self._held_since < looked_at - _LOOK_S
                self._changed.wait(None if self._is_flusher_asleep else _LOOK_S)
                self._is_flusher_asleep = False

    def _send_held(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        if self._is_over:
            return
        # Count before the answers arrive, so that a client that has an answer finds it counted.
        self._num_answers += len(held)
        self.connection.send_messages(held, time.monotonic() + _TAKE_ANSWER_S)
