"""``Listener``: accepts connections, sends strangers away, and serves each authenticated peer on a thread of its own.

A stranger, whom nobody has authenticated yet, costs a thread, a socket and 96 bytes, for five seconds at most.
``Acceptor`` limits how many there are.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import final

from replicax._src.wire.acceptor import HANDSHAKE_S, Acceptor
from replicax._src.wire.client import is_loopback_peer
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import PeerEndedError
from replicax._src.wire.handshake import Agreed, encrypted, greet_client
from replicax._src.wire.security import Security

_log = logging.getLogger(__name__)

Serve = Callable[[Connection, str], None]
"""Serves a peer until its connection ends. Its arguments are the connection and the purpose that the peer gave."""


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
        self._security, self._serve, self._rejected = security, serve, rejected
        self.port: int = listening.getsockname()[1]
        self._acceptor = Acceptor(listening, self._meet)
        self._acceptor.start()

    def close(self) -> None:
        """Accepts no more connections, and sends strangers away. Peers go on."""
        self._acceptor.close()

    def _meet(self, stranger: socket.socket, peer: str) -> None:
        try:
            connection, agreed = self._authenticated(stranger, peer)
        except (OSError, ValueError) as error:  # ValueError: it was shut down meanwhile
            if not isinstance(error, PeerEndedError):
                _log.info("%s was sent away: %s.", peer, error)
            self._rejected()
            return
        finally:
            self._acceptor.authenticated(stranger)
        try:
            self._serve(connection, agreed.purpose)
        except OSError as error:  # the peer is gone
            _log.debug("The connection with %s ended: %s.", peer, error)
        finally:
            connection.close()

    def _authenticated(self, stranger: socket.socket, peer: str) -> tuple[Connection, Agreed]:
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
            agreed = greet_client(
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
        return Connection(connection, peer, is_checked=agreed.is_checked), agreed
