"""Waits of the training thread that do not keep the live tasks from continuing after a failure.

After a failure the live tasks agree how to continue. The training thread of each must answer, also while it waits for
something else. ``Peers.gather`` does so itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from replicax._src.cluster.peers import joined_peers

_TURN_S: Final = 0.02


def turns(timeout_s: float | None = None) -> Iterator[float | None]:
    """Yields for how many seconds to wait next, until the time is up. Leave the loop when the wait is over.

    Between two turns it answers the other tasks, if this is the training thread and they tolerate failures. Otherwise
    there is one turn, of the whole time.

    Args:
      timeout_s: The longest wait; None for no limit, then a turn may have none either.
    """
    peers = joined_peers()
    if peers is None or not peers.tolerates_failures:
        yield timeout_s
        return
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = _TURN_S if deadline is None else min(_TURN_S, deadline - time.monotonic())
        yield max(0.0, left_s)
        if left_s <= 0:
            return
        peers.serve()
