"""``Watch``: waits for one of several connections, and notices at once that the peer of another one has ended it."""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Final, final

from replicax._src.wire.connection import Connection
from replicax._src.wire.sockets import seconds_left

_LONGEST_POLL_S: Final = 1000.0
_ENDED: Final = getattr(
    select, "POLLRDHUP", 0
)  # not on every system; there the end is noticed when it is read


@final
class Watch:
    """Waits on connections that belong together. One thread uses it.

    Args:
      connections: The connections. None may be closed before the last wait has returned; they may be cancelled.
    """

    def __init__(self, connections: Sequence[Connection]):
        self._connections = connections
        self._place_of = {connection.fileno(): place for place, connection in enumerate(connections)}
        self._polls = []
        for awaited in connections:
            poll = select.poll()
            for connection in connections:
                poll.register(connection.fileno(), _ENDED | (select.POLLIN if connection is awaited else 0))
            self._polls.append(poll)

    def wait(self, place: int, deadline: float) -> int | None:
        """Waits until the connection at ``place`` has bytes to receive, or any connection has ended.

        Returns:
          None if that connection has bytes, or has ended itself. Otherwise the place of another one that has ended.

        Raises:
          TimeoutError: The deadline has passed.
        """
        awaited = self._connections[place]
        if awaited.has_bytes():
            return None
        events: list[tuple[int, int]] = []
        while not events:
            limit_s = min(seconds_left(deadline), _LONGEST_POLL_S)
            events = self._polls[place].poll(math.ceil(1000 * limit_s))
        descriptors = [descriptor for descriptor, _ in events]
        return None if awaited.fileno() in descriptors else self._place_of[descriptors[0]]
