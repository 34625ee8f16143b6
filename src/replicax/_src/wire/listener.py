"""``Listener``: accepts connections, sends strangers away, and serves each authenticated peer on a thread of its own.

An unauthenticated peer costs a thread, a socket and 96 bytes, and what OpenSSL keeps for it under TLS, for five seconds
at most. When there are more than 256, the oldest is dropped: so they cannot keep a peer with the token out.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final, final

from replicax._src.wire.client import is_loopback_peer
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import PeerEndedError
from replicax._src.wire.handshake import encrypted, greet_client
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import shut_down

_log = logging.getLogger(__name__)

MOST_STRANGERS: Final = 256
HANDSHAKE_S: Final = 5.0
_PAUSE_S: Final = 0.1
"""Before the next connection is accepted, when the process could not: it has no descriptor left, say."""

Serve = Callable[[Connection], None]
"""Serves a peer until its connection ends."""


@final
class Listener:
    """Serves the peers that connect to a socket.

    Args:
      listening: The socket; the listener owns it.
      security: What the listener asks of its peers.
      serve: Called on a thread of its own for each authenticated peer. The connection is closed when it returns.
      rejected: Called for each stranger that was sent away.
    """

    def __init__(
        self,
        listening: socket.socket,
        security: Security,
        serve: Serve,
        rejected: Callable[[], None] = lambda: None,
    ):
        self._listening, self._security = listening, security
        self._serve, self._rejected = serve, rejected
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._is_closed = False
        self.port: int = listening.getsockname()[1]
        threading.Thread(target=self._accept, name="replicax listener", daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections, and sends strangers away. Peers go on."""
        self._is_closed = True
        shut_down(self._listening)  # wakes the thread that accepts
        self._listening.close()
        with self._lock:
            for stranger in self._strangers:
                shut_down(stranger)

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
                    self._drop_oldest()  # which gives its descriptor back
                has_failed = True
                time.sleep(_PAUSE_S)
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                self._drop_oldest()
            with self._lock:
                self._strangers[connection] = None
            host = str(address[0]).removeprefix("::ffff:")
            peer = f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
            thread = threading.Thread(
                target=self._meet, args=(connection, peer), name="replicax peer", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # there are too many threads
                self._forget(connection)
                connection.close()

    def _meet(self, stranger: socket.socket, peer: str) -> None:
        try:
            connection = self._authenticated(stranger, peer)
        except (OSError, ValueError) as error:  # ValueError: it was shut down meanwhile
            if not isinstance(error, PeerEndedError):
                _log.info("%s was sent away: %s.", peer, error)
            self._rejected()
            return
        finally:
            self._forget(stranger)
        try:
            self._serve(connection)
        except OSError as error:  # the peer is gone
            _log.debug("The connection with %s ended: %s.", peer, error)
        finally:
            connection.close()

    def _authenticated(self, stranger: socket.socket, peer: str) -> Connection:
        deadline = time.monotonic() + HANDSHAKE_S
        context = self._security.server
        connection: socket.socket = stranger
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: connection.close())
            is_loopback = is_loopback_peer(stranger)
            connection.settimeout(0.0)
            if context is not None:
                # A copy, for TLS takes what it is given: another thread may shut the first one down.
                connection = stranger.dup()
                undo.callback(stranger.close)
                connection = encrypted(connection, context, deadline)
            is_checked = greet_client(
                connection,
                self._security.token,
                deadline,
                wants_checksums=self._security.wants_checksums(
                    is_loopback=is_loopback, uses_tls=isinstance(connection, ssl.SSLSocket)
                ),
            )
            undo.pop_all()
        if connection is not stranger:
            stranger.close()
        return Connection(connection, peer, is_checked=is_checked)

    def _drop_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]
                shut_down(oldest)  # its thread sends it away

    def _forget(self, stranger: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(stranger, None)
