"""``ServerClient``: the client of one parameter server, or of the two that hold the same group of shards."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np

from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import Link, TaskClient
from replicax._src.program_kit.errors import (
    MessageError,
    StaleCoordinatorError,
    UnauthenticatedError,
    UnavailableError,
    UnknownProgramError,
)

_PAUSES_S: Final = (0.0, 0.2, 1.0)
"""Seconds before each reconnection. If the server returns after a failure, the last one repeats until the deadline."""
_TURN_S: Final = 0.1
"""Seconds before the other server of a group is asked, until one of the two says that it is the primary."""


@final
class ServerClient:
    """Sends requests to one parameter server: it connects, and after a failure it reconnects and sends again.

    With replication it is the client of a group of shards, which two servers hold. It asks the primary, and if that
    does not serve the group, the other server.

    A request is a message whose ``op`` names an operation of the store. ``begin`` adds the session id and the
    group, and sends it; ``end`` waits for the answer. So a caller can ask several servers at once. It holds
    ``lock`` from ``begin`` to ``end``.

    Args:
      name: The server's name, such as ``"ps 0"``.
      connector: Connects to it.
      incarnation: The session id of the coordinator.

    Attributes:
      programs: The programs that the server has, by digest. They are sent again to a server that has lost them.
      returns: True if the server keeps its data when it restarts. Requests then wait for it.
    """

    def __init__(self, name: str, connector: TaskClient, incarnation: Any):
        self.name = name
        self.lock = threading.RLock()
        self.programs: dict[str, UpdateProgram] = {}
        self.returns = False
        self.num_messages = self.num_opened = 0
        self._incarnation = incarnation
        self._connectors = [connector]
        self._group: int | None = None
        self._view_lock = threading.Lock()
        self._primary = self._connected_to = self._epoch = 0
        self._connection: Link | None = None
        self._failure: Exception | None = None
        self._is_closed = False

    def replicate(self, group: int, other: TaskClient) -> None:
        """Makes it the client of a group, which ``other``'s server holds, too. Call it before the first request."""
        if self._group is None:
            self._connectors.append(other)
            self._group, self.returns = group, True

    def use_primary(self, primary: int, epoch: int) -> None:
        """Sets the primary of the group: its first server (0) or its second (1). Ignores an epoch that is over.

        It does not take ``lock``, and wakes a thread that waits for the other server.
        """
        with self._view_lock:
            if epoch < self._epoch:
                return
            self._primary, self._epoch = primary, epoch
        connection = self._connection
        if connection is not None and self._connected_to != primary:
            connection.close()

    def begin(self, request: Message) -> Message:
        """Sends a request. ``end`` raises failures, so that the other servers get their requests first.

        Returns:
          The message that was sent, for ``end``.
        """
        header = {**request.header, "incarnation": self._incarnation}
        if self._group is not None:
            header["group"] = self._group
        message = Message(header, request.arrays)
        self._begin(message)
        return message

    def end(self, message: Message, deadline: float, may_repeat: bool = True) -> Message | Exception:
        """Waits for the answer to a request, and returns it, or an error.

        Args:
          message: The message that ``begin`` has returned.
          deadline: The deadline on the clock of ``time.monotonic``.
          may_repeat: True if a request whose answer was lost may be sent again.
        """
        pauses = self._pauses() if may_repeat else iter(())
        stale_at: frozenset[int] = frozenset()
        resent: frozenset[str] = frozenset()
        while True:
            try:
                return self._receive(deadline)
            except UnknownProgramError as error:  # the server has restarted, and did nothing of the request
                if error.digest in resent or error.digest not in self.programs:
                    return error
                resent |= {error.digest}
                answer = self.end(self.begin(message_of(self.programs[error.digest])), deadline)
                if isinstance(answer, Exception):
                    return answer
                self._begin(message)
            except (UnavailableError, StaleCoordinatorError) as error:
                if isinstance(error, StaleCoordinatorError):  # this server may have been unreachable for long
                    stale_at |= {self._connected_to}
                    if len(stale_at) == len(self._connectors):
                        return error
                with self._view_lock:
                    if self._primary == self._connected_to:  # or ``use_primary`` has named another one
                        self._primary = (self._primary + 1) % len(self._connectors)
                self.disconnect()
                pause = next(pauses, None)
                if pause is None or time.monotonic() + pause >= deadline or self._is_closed:
                    return self._named(error)
                time.sleep(pause)
                self._begin(message)
            except (MessageError, UnauthenticatedError) as error:  # the connection may have ended with it
                self.disconnect()
                return error
            except Exception as error:  # the server answered with it: the connection stays
                return error

    def disconnect(self) -> None:
        """Ends the connection. The next request opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Closes the client, from any thread."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:  # it is not removed: a thread that waits on it gets UnavailableError
            connection.close()
        self._connectors[0].close()  # another client closes the other one

    def _pauses(self) -> Iterator[float]:
        if not self.returns:
            return iter(_PAUSES_S)
        if self._group is not None:
            return itertools.chain(_PAUSES_S[:1], itertools.repeat(_TURN_S))
        return itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1]))

    def _begin(self, message: Message) -> None:
        self._failure = None
        try:
            self._send(message)
        except Exception as error:
            self._failure = error

    def _send(self, message: Message) -> None:
        if self._is_closed:
            raise UnavailableError(f"The client of {self.name} has been closed.", self.name)
        while self._connection is None or self._connected_to != self._primary:
            self.disconnect()  # its server is no longer the primary
            self._connected_to = self._primary
            self._connection = self._connectors[self._connected_to].open()
            self.num_opened += 1
        self._connection.send(message)
        self.num_messages += 1

    def _receive(self, deadline: float) -> Message:
        if self._failure is not None:
            raise self._failure
        assert self._connection is not None
        return self._connection.receive(max(deadline - time.monotonic(), 0.0))

    def _named(self, error: UnavailableError | StaleCoordinatorError) -> Exception:
        if isinstance(error, UnavailableError) and not error.task:
            return UnavailableError(f"{self.name}: {error}", self.name)
        return error


def message_of(program: UpdateProgram) -> Message:
    """Returns the request that gives a server a program."""
    header = {"op": "program", "digest": program.digest, "described": program.described()}
    return Message(header, [np.frombuffer(program.blob, np.uint8)])
