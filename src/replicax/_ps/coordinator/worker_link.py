"""``WorkerLink``: a worker's connection for functions, from the side of the thread that owns the job."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, final

from replicax._ps.client.request_threads import RequestThreads
from replicax._ps.transport.messages import Message
from replicax._src.program_kit.errors import MessageError, UnavailableError

_BUFFERED_BYTES: Final = 32 * 1024  # a connection buffers this much while its peer does not read
_HEADER_BYTES: Final = 512
_SEND_S: Final = 2.0
_OPEN_S: Final = 5.0

Answer = Message | Mapping[str, Any] | Exception
"""A worker's answer, an answer of this process in place of it, or an error of either."""


class Link(Protocol):
    """What this module uses of ``transport.Link``."""

    def fileno(self) -> int: ...
    def send_all(self, messages: Sequence[Message], timeout_s: float = 60.0) -> None: ...
    def receive_arrived(self) -> Sequence[Message | Exception] | None: ...
    def receive_all(self, timeout_s: float) -> Sequence[Message | Exception]: ...
    def has_bytes(self) -> bool: ...
    def close(self) -> None: ...


class Owner(Protocol):
    """The thread that owns the link, as the link sees it."""

    def put(self, item: Callable[[], None], /) -> None:
        """Calls a function in the owner's thread, soon. Any thread may call it."""
        ...

    def watch(self, link: WorkerLink) -> None:
        """Calls ``link.arrived`` whenever the link is readable."""
        ...

    def watch_no_more(self, link: WorkerLink) -> None:
        """Ends ``watch``, before the link's descriptor is closed."""
        ...

    def answered(self, link: WorkerLink, answers: Sequence[Answer]) -> None:
        """Takes answers, in the order of their requests."""
        ...

    def broke(self, link: WorkerLink, error: Exception) -> None:
        """Hears that the link has ended, or could not be opened."""
        ...


class _Awaited:
    """A request that is not answered, and the answer of this process if the worker does not get it."""

    __slots__ = ("num_bytes", "own_answer")

    def __init__(self, num_bytes: int, own_answer: Mapping[str, Any] | Exception | None):
        self.num_bytes, self.own_answer = num_bytes, own_answer


@final
class WorkerLink:
    """A connection for functions. Only its owner uses it. What may block, a thread does: opening, and large messages.

    Args:
      worker: The name of the worker.
      number: The number of the connection.
      connect: Opens the connection, within some seconds.
      owner: The owner.
      threads: Threads for what may block.

    Attributes:
      watched_as: The descriptor by which the owner watches it; None if it does not. It may be closed already.
    """

    def __init__(
        self,
        worker: str,
        number: int,
        connect: Callable[[float], Link],
        owner: Owner,
        threads: RequestThreads,
    ):
        self.worker, self.number = worker, number
        self.watched_as: int | None = None
        self._owner, self._threads = owner, threads
        self._link: Link | None = None
        self._is_closed = False
        self._awaited: deque[_Awaited] = deque()
        self._num_bytes = 0  # of the messages that are not answered
        self._outbox: list[list[tuple[_Awaited, Message]]] = []
        self._is_sending = False
        self._after_opening: list[Callable[[], None]] = []
        self._call(lambda: self._connect(connect))

    def fileno(self) -> int:
        assert self._link is not None
        return self._link.fileno()

    def after_opening(self, function: Callable[[], None]) -> None:
        """Calls a function once the connection is open, or has failed; at once if that is so."""
        if self._link is None and not self._is_closed:
            self._after_opening.append(function)
        else:
            function()

    def close(self) -> None:
        """Closes the connection. The owner hears nothing of it any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._outbox = []
        if self._link is not None:
            self._owner.watch_no_more(self)
            self._link.close()
        self._call_after_opening()

    def _call(self, function: Callable[[], None]) -> None:
        """Calls a function in a thread, or ends the link."""
        if not self._threads.call(function):
            error = UnavailableError("The coordinator could not start a thread for it.", self.worker)
            self._owner.put(lambda: self._broke(error))

    # --- opening ---------------------------------------------------------------------------------------

    def _connect(self, connect: Callable[[float], Link]) -> None:
        try:
            link = connect(_OPEN_S)
        except Exception as error:
            failure = error
            self._owner.put(lambda: self._broke(failure))
        else:
            self._owner.put(lambda: self._opened(link))

    def _opened(self, link: Link) -> None:
        if self._is_closed:
            link.close()
            return
        self._link = link
        self._owner.watch(self)
        self._call_after_opening()
        self._send_more()

    def _call_after_opening(self) -> None:
        waiting, self._after_opening = self._after_opening, []
        for function in waiting:
            function()

    def _broke(self, error: Exception) -> None:
        if not self._is_closed:
            self.close()
            self._owner.broke(self, error)

    # --- sending ---------------------------------------------------------------------------------------

    def send(self, messages: Sequence[Message | Mapping[str, Any] | Exception]) -> None:
        """Sends messages in one write. One that is no message is the answer of this process to that request."""
        if self._is_closed:
            return
        group: list[tuple[_Awaited, Message]] = []
        num_bytes = 0
        for message in messages:
            size = _size_of(message)
            num_bytes += size
            awaited = _Awaited(size, None if isinstance(message, Message) else message)
            self._awaited.append(awaited)
            if isinstance(message, Message):
                group.append((awaited, message))
        self._num_bytes += num_bytes
        if group:
            if self._link is None or self._is_sending or self._num_bytes > _BUFFERED_BYTES:
                self._outbox.append(group)
                self._send_more()
            else:
                error = _send(self._link, [group], _SEND_S)
                if error is not None:
                    self._broke(error)
        self._answer_soon()

    def _send_more(self) -> None:
        """Has a thread send what waits."""
        if self._outbox and not self._is_sending and self._link is not None:
            link, groups = self._link, self._outbox
            self._is_sending, self._outbox = True, []

            def send() -> None:
                error = _send(link, groups, math.inf)
                self._owner.put(lambda: self._sent(error))

            self._call(send)

    def _sent(self, error: Exception | None) -> None:
        self._is_sending = False
        if error is not None:
            self._broke(error)
        else:
            self._answer_soon()
            self._send_more()

    def _answer_soon(self) -> None:
        """Has the oldest requests answered, if the worker does not get them."""
        if self._awaited and self._awaited[0].own_answer is not None:
            self._owner.put(self._answer_oneself)

    def _answer_oneself(self) -> None:
        answers = self._own_answers()
        if answers and not self._is_closed:
            self._owner.answered(self, answers)

    def _own_answers(self) -> list[Answer]:
        answers: list[Answer] = []
        while self._awaited and (own := self._awaited[0].own_answer) is not None:
            self._num_bytes -= self._awaited.popleft().num_bytes
            answers.append(own)
        return answers

    # --- receiving -------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """Takes the answers that have arrived. The owner calls it when the link is readable."""
        link = self._link
        assert link is not None
        try:
            answers = link.receive_arrived()
        except MessageError as error:  # the answer to the oldest request is no message
            self._received([error])
            self._broke(UnavailableError(str(error), self.worker))
        except Exception as error:
            self._broke(error)
        else:
            if answers is None or link.has_bytes():
                self._owner.watch_no_more(self)
                self._receive_in_thread(link)
            if answers:
                self._received(answers)

    def _receive_in_thread(self, link: Link) -> None:
        def receive() -> None:
            failure: Exception | None = None
            answers: Sequence[Message | Exception] = ()
            try:
                answers = link.receive_all(math.inf)
            except MessageError as error:
                answers, failure = [error], UnavailableError(str(error), self.worker)
            except Exception as error:
                failure = error
            self._owner.put(lambda: self._received_in_thread(link, answers, failure))

        self._call(receive)

    def _received_in_thread(
        self, link: Link, answers: Sequence[Message | Exception], failure: Exception | None
    ) -> None:
        if self._is_closed:
            return
        if failure is None:
            if link.has_bytes():
                self._receive_in_thread(link)
            else:
                self._owner.watch(self)
        if answers:
            self._received(answers)
        if failure is not None:
            self._broke(failure)

    def _received(self, answers: Sequence[Message | Exception]) -> None:
        in_order: list[Answer] = []
        for answer in answers:
            in_order += self._own_answers()
            if self._awaited:
                self._num_bytes -= self._awaited.popleft().num_bytes
            in_order.append(answer)
        in_order += self._own_answers()
        self._owner.answered(self, in_order)


def _size_of(message: Message | Mapping[str, Any] | Exception) -> int:
    """Returns about how many bytes a message has."""
    if not isinstance(message, Message):
        return 0
    size = _HEADER_BYTES + 128 * len(message.header.get("program", ()))
    for array in message.arrays:
        size += array.nbytes
    return size


def _send(
    link: Link, groups: Sequence[Sequence[tuple[_Awaited, Message]]], timeout_s: float
) -> Exception | None:
    """Sends groups of messages. Returns the error of the link, if any.

    The error of a message that cannot travel is noted before later ones are sent: their answers may come at once.
    """
    try:
        for group in groups:
            try:
                link.send_all([message for _, message in group], timeout_s)
            except MessageError:  # none of them was sent
                for awaited, message in group:
                    try:
                        link.send_all([message], timeout_s)
                    except MessageError as error:
                        awaited.own_answer = error
    except Exception as error:
        return error
    return None
