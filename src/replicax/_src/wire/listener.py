"""``Listener``: accepts connections, rejects unauthenticated peers, and serves each other peer on a thread of its
own.

An unauthenticated peer costs a thread, a socket and 96 bytes, and up to 16 KB under TLS, for five seconds at most.
``Acceptor`` limits their number.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import final

from replicax._src.wire.acceptor import HANDSHAKE_S, Acceptor
from replicax._src.wire.client import is_loopback_peer
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import PeerEndedError
from replicax._src.wire.handshake import greet_client
from replicax._src.wire.security import Security
from replicax._src.wire.streams import stream_over

_log = logging.getLogger(__name__)

Serve = Callable[[Connection], None]
"""Serves a peer until its connection ends."""


@final
class Listener:
    """Serves the peers that connect to a socket.

    Args:
      listening: The socket; the listener owns it.
      security: The token and TLS settings that peers must have.
      serve: A function that is called on a thread of its own for each authenticated peer. The connection is closed
        when it
        returns.
      rejected: A function that is called for each rejected peer.
    """

    def __init__(
        self,
        listening: socket.socket,
        security: Security,
        serve: Serve,
        rejected: Callable[[], None] = lambda: None,
    ):
        self._security, self._serve, self._rejected = security, serve, rejected
        self.port: int = listening.getsockname()[1]
        self._acceptor = Acceptor(listening, self._meet)
        self._acceptor.start()

    def close(self) -> None:
        """Stops accepting connections, and rejects unauthenticated peers. Authenticated peers stay connected."""
        self._acceptor.close()

    def _meet(self, stranger: socket.socket, peer: str) -> None:
        try:
            connection = self._authenticated(stranger, peer)
        except (OSError, ValueError) as error:  # ValueError: it was shut down in the meantime
            if not isinstance(error, PeerEndedError):
                _log.info("Rejected %s: %s.", peer, error)
            self._rejected()
            return
        finally:
            self._acceptor.authenticated(stranger)
        try:
            self._serve(connection)
        except OSError as error:  # the peer has left
            _log.debug("The connection with %s ended: %s.", peer, error)
        finally:
            connection.close()

    def _authenticated(self, stranger: socket.socket, peer: str) -> Connection:
        deadline = time.monotonic() + HANDSHAKE_S
        try:
            is_loopback = is_loopback_peer(stranger)
            stream = stream_over(stranger, self._security.server, deadline)
            is_checked = greet_client(
                stream,
                self._security.token,
                deadline,
                wants_checksums=self._security.wants_checksums(
                    is_loopback=is_loopback, uses_tls=self._security.server is not None
                ),
            )
            return Connection(stranger, stream, peer, is_checked=is_checked)
        except BaseException:
            stranger.close()
            raise
