"""``Arrivals``: connections of peers that wait for this process to be in their epoch. No sockets, threads or clocks.

Members hear of an epoch one after another, so a peer may connect for an epoch of which this process has not heard. Its
connection waits until this process takes it, or until it is known that the epoch has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar, final

Connection = TypeVar("Connection")


@final
class Arrivals(Generic[Connection]):
    """The connections that have arrived, and that nobody has taken.

    Attributes:
      last_ended: The highest epoch that is known to have ended; those before it have ended too.
    """

    def __init__(self) -> None:
        self.last_ended = -1
        self._waiting: dict[tuple[int, int], Connection] = {}  # by epoch and peer

    def has_ended(self, epoch: int) -> bool:
        """Returns True if it is known that an epoch has ended."""
        return epoch <= self.last_ended

    def arrive(self, epoch: int, peer: int, connection: Connection) -> list[Connection]:
        """Takes a connection in. Returns those to close: it, if its epoch has ended, or an earlier one of the peer."""
        if self.has_ended(epoch):
            return [connection]
        earlier = self._waiting.pop((epoch, peer), None)
        self._waiting[epoch, peer] = connection
        return [] if earlier is None else [earlier]

    def missing(self, epoch: int, peers: Iterable[int]) -> list[int]:
        """Returns those peers of which no connection waits."""
        return [peer for peer in peers if (epoch, peer) not in self._waiting]

    def take(self, epoch: int, peers: Iterable[int]) -> dict[int, Connection]:
        """Hands out the connections of some peers that wait for an epoch. They wait no more."""
        waiting = [(peer, self._waiting.pop((epoch, peer), None)) for peer in peers]
        return {peer: connection for peer, connection in waiting if connection is not None}

    def end(self, epoch: int) -> list[Connection]:
        """Notes that an epoch has ended. Returns the connections to close."""
        self.last_ended = max(self.last_ended, epoch)
        return [self._waiting.pop(key) for key in list(self._waiting) if self.has_ended(key[0])]
