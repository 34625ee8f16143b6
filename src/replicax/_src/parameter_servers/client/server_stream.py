"""``ServerStream``: a client's messages to one parameter server, and what it was sent.

A stream that broke is opened again.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Final, Protocol, final

from replicax._src.parameter_servers.errors import (
    MessageError,
    StaleCoordinatorError,
    UnauthenticatedError,
    UnavailableError,
)
from replicax._src.parameter_servers.programs.programs import UpdateProgram
from replicax._src.parameter_servers.transport.messages import Message

_PAUSES_S: Final = (0.0, 0.2, 1.0)
"""Before each time that a broken stream is opened again; the last one as often as there is time, if the server comes
back.
"""
_TURN_S: Final = 0.1
"""So it is where two servers are asked in turn, until one says that it is the primary."""


class PsLink(Protocol):
    """A stream of messages to one parameter server, as ``transport.Link``.

    A dead peer raises UnavailableError, within the timeout, and the link is of no more use then.
    """

    def send(self, message: Message, timeout_s: float = 60.0) -> None: ...
    def receive(self, timeout_s: float) -> Message: ...
    def close(self) -> None: ...


class PsClient(Protocol):
    """What opens links to one parameter server, as ``transport.TaskClient``."""

    def open(self) -> PsLink: ...
    def close(self) -> None: ...


@final
class ServerStream:
    """The stream to one parameter server, and what it has been sent. Use it under its lock.

    With replication it is that to a group of pieces: to the one of two servers that serves it now. When one does not,
    the other is tried.

    Attributes:
      programs: By digest, what may be sent to it.
      sent: Digests of those that were sent.
      comes_back: Whether it does after it died, with what it had.
    """

    def __init__(self, name: str, client: PsClient):
        self.name = name
        self.lock = threading.RLock()
        self.programs: dict[str, UpdateProgram] = {}
        self.sent: set[str] = set()
        self.num_messages = self.num_opened = 0
        self._servers = [client]
        self._group: int | None = None
        self._telling = threading.Lock()
        self._at = self._link_at = self._epoch = 0
        self._link: PsLink | None = None
        self._failed: Exception | None = None
        self._is_closed = self.comes_back = False

    def replicate(self, group: int, backup: PsClient) -> None:
        """What is said to it is said to a group from now on, which is on another server, too.

        Before the first message.
        """
        if self._group is None:
            self._servers.append(backup)
            self._group, self.comes_back = group, True

    def use(self, at: int, epoch: int) -> None:
        """The first (0) or the second (1) server of the group is the primary, if nobody has said otherwise of a later
        epoch.

        Without the lock: who waits for the other one is woken.
        """
        with self._telling:
            if epoch < self._epoch:
                return
            self._at, self._epoch = at, epoch
        link = self._link
        if link is not None and self._link_at != at:
            link.close()

    def begin(self, message: Message) -> None:
        """Sends a message. What goes wrong is told by ``end``, after the others have got theirs."""
        self._failed = None
        try:
            self._send(message)
        except Exception as error:
            self._failed = error

    def end(self, message: Message, deadline: float, may_repeat: bool) -> Message | Exception:
        """The answer to the message that was begun, or the error that it tells of."""
        pauses = self._pauses() if may_repeat else iter(())
        stale_at: set[int] = set()
        while True:
            try:
                return self._receive(deadline)
            except (UnavailableError, StaleCoordinatorError) as error:
                if isinstance(error, StaleCoordinatorError):  # of two one may have been out of reach for long
                    stale_at.add(self._link_at)
                    if len(stale_at) == len(self._servers):
                        return error
                if self._at == self._link_at:  # or it was told meanwhile who is the primary
                    self._at = (self._at + 1) % len(self._servers)
                self.give_up_link()
                pause = next(pauses, None)
                if pause is None or time.monotonic() + pause >= deadline or self._is_closed:
                    return self._named(error)
                time.sleep(pause)
                self.begin(message)
            except (MessageError, UnauthenticatedError) as error:  # the stream may have ended with it
                self.give_up_link()
                return error
            except Exception as error:  # what the answer says: the stream goes on
                return error

    def close(self) -> None:
        self._is_closed = True
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._servers[0].close()  # the other one is another stream's first

    def _pauses(self) -> Iterator[float]:
        if not self.comes_back:
            return iter(_PAUSES_S)
        if self._group is not None:
            return itertools.chain(_PAUSES_S[:1], itertools.repeat(_TURN_S))
        return itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1]))

    def _send(self, message: Message) -> None:
        if self._is_closed:
            raise UnavailableError(f"The links to {self.name} have been closed.", self.name)
        if self._link_at != self._at:  # told while nobody waited: the link is closed
            self.give_up_link()
        if self._link is None:
            self._link_at = self._at
            self._link = self._servers[self._link_at].open()
            self.num_opened += 1
        if self._group is not None:
            message = Message({**message.header, "group": self._group}, message.arrays)
        self._link.send(message)
        self.num_messages += 1

    def _receive(self, deadline: float) -> Message:
        if self._failed is not None:
            raise self._failed
        assert self._link is not None
        return self._link.receive(max(deadline - time.monotonic(), 0.0))

    def give_up_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _named(self, error: UnavailableError | StaleCoordinatorError) -> Exception:
        if isinstance(error, StaleCoordinatorError):
            return error
        return error if error.task else UnavailableError(f"{self.name}: {error}", self.name)
