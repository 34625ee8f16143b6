"""``Link``: this process's connection with one other member, and what the two share."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Final, final

import numpy as np

from replicax._src.wire.connection import Connection
from replicax._src.wire.frames import Kind, Part

DIRECT_BYTES: Final = 40 * 1024
"""The most bytes that the exchanging thread sends itself. Two such frames fit into the system's buffers, so that
members that send to each other at once do not wait for each other.
"""


@final
class Link:
    """The connection with one other member.

    The thread that made the connection calls ``run``, which sends large frames while the exchanging thread receives.
    One thread at a time sends, so the frames keep their order.

    Attributes:
      connection: The connection.
      memory: The other member's shared memory, which this process reads; None if they share none.
      is_read: True if the other member reads this process's memory.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self.memory: np.ndarray | None = None
        self.is_read = False
        self._queue: queue.SimpleQueue[tuple[bytes, Sequence[Part], float] | str | None] = queue.SimpleQueue()
        self._num_queued = self._num_sent = 0
        self._has_ended = threading.Event()

    def send(self, head: bytes, body: Sequence[Part], deadline: float) -> None:
        """Sends a frame, or leaves it to ``run``. The body's memory must not change until the peer has answered it.

        Raises:
          OSError: The connection has ended.
        """
        num_bytes = len(head) + (sum(map(len, body)) if body else 0)
        if num_bytes <= DIRECT_BYTES and self._num_queued == self._num_sent:
            if body:
                self.connection.send([(Kind.MESSAGE, head, body)], deadline)
            else:
                self.connection.send_head(head, deadline)
        else:
            self._num_queued += 1
            self._queue.put((head, body, deadline))

    def run(self) -> None:
        """Sends large frames until ``release``, and closes the connection."""
        is_lost = False
        try:
            while (frame := self._queue.get()) is not None:
                if isinstance(frame, str):
                    self.connection.end(frame, is_refusal=True)
                    return
                try:
                    if not is_lost:
                        self.connection.send([(Kind.MESSAGE, frame[0], frame[1])], frame[2])
                except OSError:
                    is_lost = True
                    self.connection.cancel()  # which the exchanging thread notices
                del frame  # its memory can be used again
                self._num_sent += 1
        finally:
            self._has_ended.set()
            self.connection.close()

    def cancel(self) -> None:
        """Ends the connection at once, from any thread. A thread that blocks in it gets an error."""
        self.connection.cancel()

    def refuse(self, reason: str) -> None:
        """Ends the link, and tells the peer why. Does not block."""
        self._queue.put(reason)

    def release(self) -> None:
        """Lets ``run`` return, once all frames are sent or the link is cancelled. Does not block.

        From then on nobody may wait for the connection: its descriptor may become another file's.
        """
        self._queue.put(None)

    def join(self, deadline: float) -> None:
        """Waits until ``run`` returns; cancels the link at the deadline."""
        self._has_ended.wait(max(0.0, deadline - time.monotonic()))
        self.cancel()
