"""``RequestRules``: the rules by which a client asks a parameter server, or the two that hold a group of shards.

Pure: each event returns the next action, and the caller has the connection and the clock. A client asks one request at
a time. After a failure it connects again, if need be to the other server of the group, and sends the request again
until it is answered, the pauses or the time are used up, or the request must not be repeated.

``OpenConnection`` and ``SendRequest`` have numbers, and their outcome names that number. An outcome with another number
is late, for example the answer that comes twice, or from a connection that was given up. It changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Final, NamedTuple, final

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


class OpenConnection(NamedTuple):
    """Close the connection, if there is one, and open another one. The next event is ``connected`` or ``broke``."""

    number: int
    server: int


class SendRequest(NamedTuple):
    """Send the request, or the program with this digest. The next event is ``answered`` or ``broke``."""

    number: int
    program: str | None = None


class PauseUntil(NamedTuple):
    """Close the connection. The next event is ``time_passed``, when it is ``until``."""

    number: int
    until: float


class EndRequest(NamedTuple):
    """The request has ended: with this error, or with the last answer.

    Attributes:
      error: The error; None for the answer.
      disconnects: True if the connection must be closed.
    """

    error: Exception | None
    disconnects: bool = False


Action = OpenConnection | SendRequest | PauseUntil | EndRequest
_ANSWERED: Final = EndRequest(None)


class _Tries(NamedTuple):
    """The failures of one message: the request, or a program that it needs."""

    num_failures: int = 0
    stale_at: frozenset[int] = frozenset()


_FRESH: Final = _Tries()


@final
class RequestRules:
    """The state of the client of one parameter server, or of one group of shards. Not thread-safe.

    Args:
      name: The server's name, such as ``"ps 0"``.
      programs: The digests of the programs that the client can send to a server that lacks them.

    Attributes:
      returns: True if the server keeps its data when it restarts. Requests then wait for it.
    """

    def __init__(self, name: str, programs: Container[str]):
        self._name, self._programs = name, programs
        self.returns = False
        self._num_servers = 1
        self._primary = self._epoch = 0
        self._server = 0  # is connected, or is asked for a connection
        self._is_connected = self._is_closed = False
        self._number = 0
        self._deadline, self._may_repeat = 0.0, False
        self._until = 0.0
        self._tries = _FRESH
        self._tries_of_request: _Tries | None = None  # while a program is sent
        self._program: str | None = None
        self._resent: frozenset[str] = frozenset()

    # --- events of the cluster ------------------------------------------------------------------------

    def replicated(self) -> None:
        """Another server has the same shards, and both keep them in turn."""
        self._num_servers, self.returns = 2, True

    def primary_named(self, primary: int, epoch: int) -> bool:
        """A server of the group is the primary since an epoch. An older epoch is over, and changes nothing.

        Returns True if the connection must be closed. A request that waits on it then breaks, and asks the primary.
        """
        if epoch < self._epoch:
            return False
        self._primary, self._epoch = primary, epoch
        return self._is_connected and self._server != primary

    def closed(self) -> None:
        """The client is closed for good: the current request is the last one, and is not sent again."""
        self._is_closed = True

    def disconnected(self) -> None:
        """The connection was given up, and the request with it."""
        self._is_connected = False
        self._number += 1

    # --- events of a request --------------------------------------------------------------------------

    def asked(self, deadline: float, may_repeat: bool) -> Action:
        """The caller has a request.

        Args:
          deadline: The time after which it is not sent again.
          may_repeat: True if it may be sent again when its answer was lost.
        """
        self._deadline, self._may_repeat = deadline, may_repeat
        self._tries, self._tries_of_request, self._program = _FRESH, None, None
        self._resent = frozenset()
        return self._send()

    def connected(self, number: int) -> Action | None:
        """A connection is open. If the primary has changed in the meantime, it is not used."""
        if number != self._number:
            return None
        self._is_connected = True
        return self._send()

    def answered(self, number: int) -> Action | None:
        """The answer has come."""
        if number != self._number:
            return None
        self._number += 1
        if self._tries_of_request is None:
            return _ANSWERED
        self._tries, self._tries_of_request, self._program = self._tries_of_request, None, None
        return self._send()  # the server has the program, and the request is next

    def broke(self, number: int, error: Exception, now: float) -> Action | None:
        """Connecting or sending has failed, or the answer is an error, or there is none."""
        if number != self._number:
            return None
        self._number += 1
        if isinstance(error, UnknownProgramError):  # the server has restarted, and did nothing of the request
            return self._send_program(error)
        if isinstance(error, (UnavailableError, StaleCoordinatorError)):
            return self._try_again(error, now)
        # After a MessageError or an UnauthenticatedError the connection may have ended. Other errors are the server's
        # answers, and the connection stays.
        return self._settle(error, disconnects=isinstance(error, (MessageError, UnauthenticatedError)))

    def time_passed(self, number: int, now: float) -> Action | None:
        """The pause may be over."""
        if number != self._number:
            return None
        return PauseUntil(number, self._until) if now < self._until else self._send()

    # --- rules ----------------------------------------------------------------------------------------

    def _send(self) -> Action:
        if self._is_closed:
            return self._settle(
                UnavailableError(f"The client of {self._name} has been closed.", self._name), disconnects=True
            )
        self._number += 1
        if self._is_connected and self._server == self._primary:
            return SendRequest(self._number, self._program)
        self._is_connected = False  # its server is no longer the primary
        self._server = self._primary
        return OpenConnection(self._number, self._server)

    def _send_program(self, error: UnknownProgramError) -> Action:
        if self._program is not None or error.digest in self._resent or error.digest not in self._programs:
            return self._settle(error)
        self._resent |= {error.digest}
        self._tries, self._tries_of_request, self._program = _FRESH, self._tries, error.digest
        return self._send()

    def _try_again(self, error: UnavailableError | StaleCoordinatorError, now: float) -> Action:
        num_failures, stale_at = self._tries
        if isinstance(error, StaleCoordinatorError):  # this server may have been unreachable for long
            stale_at |= {self._server}
            if len(stale_at) == self._num_servers:
                return self._settle(error)
        if self._primary == self._server:  # or ``primary_named`` has named another one
            self._primary = (self._primary + 1) % self._num_servers
        self._tries = _Tries(num_failures + 1, stale_at)
        self._until = now + self._pause_s(num_failures)
        if self._until >= self._deadline or self._is_closed:
            return self._settle(self._named(error), disconnects=True)
        self._is_connected = False
        return PauseUntil(self._number, self._until)

    def _pause_s(self, num_failures: int) -> float:
        """Returns the time before a message is sent again; infinite to give up."""
        is_program = self._tries_of_request is not None
        if not (self._may_repeat or is_program):
            return math.inf
        if self._num_servers > 1:
            return _TURN_S if num_failures else 0.0
        if num_failures < len(_PAUSES_S):
            return _PAUSES_S[num_failures]
        return _PAUSES_S[-1] if self.returns else math.inf

    def _settle(self, error: Exception, *, disconnects: bool = False) -> EndRequest:
        if disconnects:
            self._is_connected = False
        return EndRequest(error, disconnects)

    def _named(self, error: UnavailableError | StaleCoordinatorError) -> UnavailableError:
        if isinstance(error, UnavailableError) and error.task:
            return error
        # One server that has ended the session is no reason to end the job: the other one may be back soon.
        return UnavailableError(f"{self._name}: {error}", self._name)
