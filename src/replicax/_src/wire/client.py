"""``connect``: an authenticated connection to a listener."""

from __future__ import annotations

import ipaddress
import socket
import threading
from concurrent.futures import Future
from typing import Any

from replicax._src.wire.connection import Connection
from replicax._src.wire.handshake import greet_server
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import seconds_left
from replicax._src.wire.streams import stream_over


def connect(
    host: str,
    port: int,
    security: Security,
    deadline: float,
    *,
    certified_as: str | None = None,
) -> Connection:
    """Connects to a listener, and authenticates both ends.

    Args:
      host, port: The address of the listener.
      deadline: The deadline on the clock of ``time.monotonic``.
      certified_as: The name in the listener's certificate; by default the host.

    Raises:
      TokenError: One end does not know the token of the other one.
      WireError: Another program answers, or another version of replicax, or the answer was damaged.
      TimeoutError: No listener answered in time.
      OSError: The address has no listener, or TLS failed.
    """
    connection = _connected(host, port, deadline)
    try:
        is_loopback = is_loopback_peer(connection)
        stream = stream_over(connection, security.client, deadline, certified_as or host)
        is_checked = greet_server(
            stream,
            security.token,
            deadline,
            wants_checksums=security.wants_checksums(
                is_loopback=is_loopback, uses_tls=security.client is not None
            ),
        )
        return Connection(connection, stream, f"{host}:{port}", is_checked=is_checked)
    except BaseException:
        connection.close()
        raise


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """Connects to the first address of the host that answers. The deadline covers all addresses."""
    failure: OSError | None = None
    for *_, address in _addresses(host, port, deadline):
        try:
            return socket.create_connection((str(address[0]), int(address[1])), seconds_left(deadline))
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host} has no address")


def _addresses(host: str, port: int, deadline: float) -> list[Any]:
    """Resolves a name on another thread, because ``getaddrinfo`` has no deadline and cannot be interrupted."""
    found: Future[list[Any]] = Future()

    def resolve() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            found.set_exception(error)

    try:
        threading.Thread(target=resolve, name="replicax name", daemon=True).start()
    except RuntimeError:  # the interpreter is ending, or has too many threads
        resolve()
    return found.result(seconds_left(deadline))


def is_loopback_peer(connection: socket.socket) -> bool:
    """True if the other end is a process of this machine."""
    host = str(connection.getpeername()[0]).removeprefix("::ffff:").partition("%")[0]
    return ipaddress.ip_address(host).is_loopback
