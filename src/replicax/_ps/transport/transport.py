"""Calls between tasks: a ``TaskServer`` answers the requests of ``TaskClient`` and its ``Link``, over ``wire``.

A ``Link`` is a connection for messages and their answers, in order. It does not reconnect: open a new one. ``call``
sends one message on a connection of its own and waits for the answer, and it reconnects after the task has restarted.
So a call does not wait behind the arrays of another connection. ``messages.py`` has the format.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar, final

from replicax._ps.errors import error_from_answer
from replicax._ps.transport.messages import (
    Decoder,
    Encoded,
    Message,
    encode,
)
from replicax._ps.transport.task_server import Counts, TaskServer, check_installed
from replicax._src.program_kit.cluster_tasks import Credentials
from replicax._src.program_kit.errors import MessageError, ReplicaxError, UnavailableError
from replicax._src.program_kit.task_connections import Buffers, Connection, Endpoint, PeerEndedError

__all__ = ["Link", "TaskClient", "TaskServer"]

_T = TypeVar("_T")

_LAST_WORDS_S: Final = 0.2
_LONGEST_CONNECT_S: Final = 60.0
_MOST_IDLE: Final = 4


@final
class TaskClient:
    """A client of one task. Threads may share it; it connects at the first call.

    Args:
      address: ``host:port`` of the task.
      credentials: The credentials that it shares with the task.
      task: The task's name, for messages and errors: ``"ps 0"``.

    Raises:
      InvalidArgumentError: A file of the credentials cannot be read.
      MissingExtraError: xxhash is not installed.
    """

    def __init__(self, address: str, credentials: Credentials, task: str):
        check_installed()
        self._endpoint = Endpoint(address, credentials, task)
        self._endpoint.check_route()
        self._task = task
        self._lock = threading.Lock()
        self._idle: list[Link] = []  # for calls
        self._links: set[Link] = set()
        self._ended = Counts()
        self._is_closed = False

    def ask(self, what: str, header: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """Sends a request to the task, and waits for the answer.

        Raises:
          UnavailableError: The task is dead, stopped, or did not answer in time. It may have executed the request.
          UnauthenticatedError: It refused the credentials.
          ReplicaxError: The answer is an error, as ``errors.error_from_answer`` makes it.
        """
        return self.call(Message({**header, "ask": what}), timeout_s, f"answer {what!r}").header

    def call(self, message: Message, timeout_s: float, did: str = "answer a message") -> Message:
        """Sends a message on a connection that no other call uses, and waits for the answer. Raises the errors of
        ``ask``.

        Args:
          message: The message.
          timeout_s: The longest wait in seconds.
          did: A verb phrase for errors, which say that the task did not do this.
        """
        deadline = time.monotonic() + timeout_s
        link = self._idle_link() or self.open(min(timeout_s, _LONGEST_CONNECT_S))
        try:
            return link.call(message, deadline - time.monotonic(), did, limit_s=timeout_s)
        finally:
            if not link.is_closed:
                with self._lock:
                    is_kept = len(self._idle) < _MOST_IDLE
                    if is_kept:
                        self._idle.append(link)
                if not is_kept:
                    link.close()

    def open(self, timeout_s: float = 10.0) -> Link:
        """Opens a connection for messages.

        Raises:
          UnavailableError: The task is dead or stopped.
          UnauthenticatedError: It refused the credentials.
        """
        if self._is_closed:
            raise self._closed()
        try:
            connection = self._connected(time.monotonic() + timeout_s)
        except OSError as error:
            if self._is_closed:
                raise self._closed() from None
            raise self._endpoint.failure(error, f"take a connection within {timeout_s:.3g} s") from error
        link = Link(self, connection, Decoder(Buffers()))
        with self._lock:
            self._links.add(link)
            is_closed = self._is_closed
        if is_closed:  # it was closed in the meantime, and no other code would close this connection
            link.close()
            raise self._closed()
        return link

    def statistics(self) -> dict[str, int]:
        """Counts answers received, bytes in both directions, and open connections."""
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
        """Closes all connections. A thread that waits for an answer raises UnavailableError."""
        with self._lock:
            self._is_closed = True
            links = list(self._links)
        for link in links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connected(self, deadline: float) -> Connection:
        return self._endpoint.connect(deadline)

    def _idle_link(self) -> Link | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                link = self._idle.pop()
            if not link.is_ended:  # the task may have ended it since
                return link
            link.close()

    def _closed(self) -> UnavailableError:
        return UnavailableError(f"The client of {self._endpoint} was closed.", self._task)

    def _ended_link(self, link: Link) -> None:
        with self._lock:
            if link in self._links:
                self._links.remove(link)
                self._ended.add(link.counts)


@final
class Link:
    """A connection to a task, for messages and their answers in order. ``TaskClient.open`` makes it.

    Several messages may be sent before their answers are received. One thread may send while another one receives.
    After
    any error but one that the task answered with, the connection is closed: open another one.
    """

    def __init__(self, client: TaskClient, connection: Connection, decoder: Decoder):
        self._client = client
        self._connection = connection
        self._decoder = decoder
        self._decoding = threading.Lock()  # held from a frame's first byte until its message is made
        self._why_closed = ""
        self._num_answers = 0
        self._error_of_next: MessageError | None = None  # the next answer is no message

    @property
    def is_closed(self) -> bool:
        """True if it can no longer be used: open another one."""
        return bool(self._why_closed)

    @property
    def is_ended(self) -> bool:
        """True if it is closed, or the task has ended it. Ask only if no message waits for an answer."""
        return self.is_closed or self._connection.wait(0.0)

    @property
    def counts(self) -> Counts:
        """The number of answers received, and of bytes in both directions."""
        connection = self._connection
        return Counts(self._num_answers, connection.bytes_in, connection.bytes_out)

    def send(self, message: Message, timeout_s: float = 60.0) -> None:
        """Sends a message. Its arrays must not change before the answer has come: large ones are not copied.

        A task reads no message while its answer to an earlier one is not received, except a few hundred KB that the
        connection
        buffers. To send more than that before receiving, send and receive on two threads.

        Raises:
          MessageError: The message cannot be sent. The connection stays open.
          UnavailableError: The task has ended, or read nothing for that time. The connection is closed.
        """
        self.send_all((message,), timeout_s)

    def send_all(self, messages: Sequence[Message], timeout_s: float = 60.0) -> None:
        """Sends messages in order, in one write, which costs hardly more than one message. See ``send``.

        Each gets its own answer. The task works on the first ones while the others wait there. Answers to messages
        that were
        sent together may come together, at most 8 ms late.

        Raises:
          MessageError: A message cannot be sent, and none has been. The connection stays open.
          UnavailableError: As for ``send``.
        """
        encoded = [encode(message) for message in messages]
        self._bounded("take a message", timeout_s, lambda deadline: self._send(encoded, deadline))

    def receive(self, timeout_s: float) -> Message:
        """Waits for the answer to the first message that has none yet.

        Raises:
          UnavailableError: The task has ended, or did not answer in time. The connection is closed.
          MessageError: The data is not a message. The connection is closed.
          ReplicaxError: The answer is an error, as ``errors.error_from_answer`` makes it. The connection stays open.
        """
        return _raised_or(self._bounded("answer a message", timeout_s, self._receive))

    def receive_all(self, timeout_s: float) -> list[Message | ReplicaxError]:
        """Waits like ``receive``. Returns all answers that have come together, or the errors that they are; at least
        one.
        """
        return self._bounded("answer a message", timeout_s, self._receive_all)

    def receive_arrived(self) -> list[Message | ReplicaxError] | None:
        """Returns the answers that have arrived on a connection that is readable; see ``fileno``. It does not wait.

        Returns None if ``receive_all`` may have to wait: the next answer is large, or only a part of it is here, or
        the task has ended the connection.

        Raises:
          UnavailableError: The connection has ended.
          MessageError: The data is not a message. The connection is closed.
        """
        return self._bounded("answer a message", math.inf, self._receive_arrived)

    def has_bytes(self) -> bool:
        """True if a part of an answer is here: ``receive_all`` must have it, as the link may not become readable."""
        return self._error_of_next is not None or self._connection.has_bytes()

    def fileno(self) -> int:
        """Returns the descriptor, to wait until it is readable; -1 once it is closed."""
        return self._connection.fileno()

    def call(
        self, message: Message, timeout_s: float, did: str = "answer a message", limit_s: float | None = None
    ) -> Message:
        """Sends a message and waits for its answer; see ``send`` and ``receive``.

        Args:
          message: The message.
          timeout_s: The longest wait in seconds.
          did: A verb phrase for errors, which say that the task did not do this.
          limit_s: The limit that an error names, if the caller has used part of its time.
        """
        encoded = [encode(message)]

        def sent_and_received(deadline: float) -> Message | ReplicaxError:
            self._send(encoded, deadline)
            return self._receive(deadline)

        return _raised_or(self._bounded(did, timeout_s, sent_and_received, limit_s))

    def close(self) -> None:
        """Closes the connection. A thread that waits for an answer raises UnavailableError."""
        self._end(f"The connection to {self._client._endpoint} was closed.")
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bounded(
        self, did: str, timeout_s: float, do: Callable[[float], _T], limit_s: float | None = None
    ) -> _T:
        """Runs a function that may block. Any error in it closes the connection."""
        client = self._client
        try:
            if self._why_closed:
                raise UnavailableError(self._why_closed, client._task)
            try:
                return do(time.monotonic() + timeout_s)
            except OSError as error:
                if self._why_closed:
                    raise UnavailableError(self._why_closed, client._task) from None
                limit_s = timeout_s if limit_s is None else limit_s
                limit = "" if math.isinf(limit_s) else f" within {limit_s:.3g} s"
                raise client._endpoint.failure(error, f"{did}{limit}") from error
        except ReplicaxError as error:
            self._fail(str(error))
            raise
        except BaseException as error:  # Ctrl-C: a message may be half sent, or half received
            self._fail(f"{type(error).__name__} interrupted the use of the connection to {client._endpoint}.")
            raise

    def _send(self, messages: Sequence[Encoded], deadline: float) -> None:
        try:
            self._connection.send_messages(messages, deadline)
        except TimeoutError:
            raise
        except OSError:
            self._raise_last_words()
            raise

    def _raise_last_words(self) -> None:
        """Raises the reason why the task has ended the connection, if it has sent one."""
        if self._why_closed or not self._decoding.acquire(blocking=False):
            return  # the thread that receives finds it
        try:
            while True:
                self._connection.receive(time.monotonic() + _LAST_WORDS_S, self._decoder.room)
        except PeerEndedError as ended:
            if ended.reason:
                raise
        except (OSError, MessageError):
            return
        finally:
            self._decoding.release()

    def _receive_all(self, deadline: float) -> list[Message | ReplicaxError]:
        with self._decoding:
            return self._received_together(deadline)

    def _receive_arrived(self, deadline: float) -> list[Message | ReplicaxError] | None:
        answers: list[Message | ReplicaxError] = []
        with self._decoding:
            if self._error_of_next is not None:
                raise self._error_of_next
            for head in self._connection.receive_arrived():
                try:
                    answers.append(self._made(self._decoder.decode(head)))
                except MessageError as error:
                    if not answers:
                        raise
                    self._error_of_next = error  # those before it are answers
                    break
        return answers or None

    def _received_together(self, deadline: float) -> list[Message | ReplicaxError]:
        answers = [self._received(deadline)]
        while self._error_of_next is None and self._connection.has_frame():
            try:
                answers.append(self._received(deadline))
            except MessageError as error:  # those before it are answers
                self._error_of_next = error
        return answers

    def _receive(self, deadline: float) -> Message | ReplicaxError:
        with self._decoding:
            return self._received(deadline)

    def _received(self, deadline: float) -> Message | ReplicaxError:
        if self._error_of_next is not None:
            raise self._error_of_next
        head = self._connection.receive(deadline, self._decoder.room)
        return self._made(self._decoder.filled() if head is None else self._decoder.decode(head))

    def _made(self, answer: Message) -> Message | ReplicaxError:
        self._num_answers += 1
        error = answer.header.get("error")
        return answer if error is None else error_from_answer(error, self._client._task)

    def _fail(self, why: str) -> None:
        self._end(why)
        self._connection.close()

    def _end(self, why: str) -> None:
        """Wakes waiting threads, from any thread."""
        if not self._why_closed:
            self._why_closed = why
            self._connection.cancel()
            self._client._ended_link(self)


def _raised_or(answer: Message | ReplicaxError) -> Message:
    if isinstance(answer, ReplicaxError):
        raise answer
    return answer
