"""``Acceptor``: accepts connections, and serves each on a thread of its own. Limits unauthenticated peers.

There are at most 256 unauthenticated peers. The oldest is dropped for the next one, so they cannot lock others out.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Final, final

from replicax._src.wire.sockets import shut_down

MOST_UNAUTHENTICATED: Final = 256
HANDSHAKE_S: Final = 5.0
"""The longest time that a peer may take to authenticate. The function that meets it enforces the limit."""
_PAUSE_S: Final = 0.1
"""The pause after a failure to accept, for example when the process has no file descriptor left."""

Meet = Callable[[socket.socket, str], None]
"""Meets a peer, given its ``host:port``, and closes the connection at the end."""


@final
class Acceptor:
    """Accepts connections from ``start`` to ``close``.

    Args:
      listening: The socket; the acceptor owns it.
      meet: A function that is called on a thread of its own for each connection.
    """

    def __init__(self, listening: socket.socket, meet: Meet):
        self._listening, self._meet = listening, meet
        self._lock = threading.Lock()
        self._unauthenticated: dict[socket.socket, None] = {}  # in the order of arrival
        self._is_closed = False

    @property
    def num_unauthenticated(self) -> int:
        return len(self._unauthenticated)

    def start(self) -> None:
        """Starts to accept."""
        threading.Thread(target=self._accept, name="replicax listener", daemon=True).start()

    def close(self) -> None:
        """Stops accepting connections, and closes those of unauthenticated peers."""
        self._is_closed = True
        shut_down(self._listening)  # wakes the thread that accepts
        self._listening.close()
        with self._lock:
            for connection in self._unauthenticated:
                shut_down(connection)

    def authenticated(self, connection: socket.socket) -> None:
        """Records that a peer is authenticated, or has left. Also called when ``meet`` returns."""
        with self._lock:
            self._unauthenticated.pop(connection, None)

    def _accept(self) -> None:
        has_failed = False
        while True:
            try:
                connection, address = self._listening.accept()
                has_failed = False
            except OSError:
                if self._is_closed:
                    return
                if has_failed:
                    self._drop_oldest()  # which frees its file descriptor
                has_failed = True
                time.sleep(_PAUSE_S)
                continue
            if len(self._unauthenticated) >= MOST_UNAUTHENTICATED:
                self._drop_oldest()
            with self._lock:
                self._unauthenticated[connection] = None
            host = str(address[0]).removeprefix("::ffff:")
            peer = f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
            thread = threading.Thread(
                target=self._met, args=(connection, peer), name="replicax peer", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the process has too many threads
                self.authenticated(connection)
                connection.close()

    def _met(self, connection: socket.socket, peer: str) -> None:
        try:
            self._meet(connection, peer)
        finally:
            self.authenticated(connection)

    def _drop_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._unauthenticated), None)
            if oldest is not None:
                del self._unauthenticated[oldest]
                shut_down(oldest)  # its thread closes it
