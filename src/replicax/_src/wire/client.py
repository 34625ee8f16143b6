"""``connect``: an authenticated connection to a listener."""

from __future__ import annotations

import ipaddress
import socket

from replicax._src.wire.connection import Connection
from replicax._src.wire.handshake import greet_server
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import seconds_left
from replicax._src.wire.streams import stream_over


def connect(
    host: str,
    port: int,
    security: Security,
    purpose: str,
    deadline: float,
    *,
    certified_as: str | None = None,
) -> Connection:
    """Connects to a listener, and authenticates both ends.

    Args:
      purpose: What the connection is for; the listener is told. At most 16 ASCII characters.
      deadline: On the clock of ``time.monotonic``.
      certified_as: The name in the listener's certificate; that of the host by default.

    Raises:
      TokenError: One end does not know the token of the other one.
      WireError: Another program answers, or another version of replicax, or the answer was damaged.
      TimeoutError: Nobody answered in time.
      OSError: Nobody listens there, or TLS failed.
    """
    connection = _connected(host, port, deadline)
    try:
        is_loopback = is_loopback_peer(connection)
        stream = stream_over(connection, security.client, deadline, certified_as or host)
        agreed = greet_server(
            stream,
            security.token,
            purpose,
            deadline,
            wants_checksums=security.wants_checksums(
                is_loopback=is_loopback, uses_tls=security.client is not None
            ),
        )
        return Connection(connection, stream, f"{host}:{port}", is_checked=agreed.is_checked)
    except BaseException:
        connection.close()
        raise


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """The first address of the host that answers; all of them share the time."""
    failure: OSError | None = None
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_connection((str(address[0]), int(address[1])), seconds_left(deadline))
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host} has no address")


def is_loopback_peer(connection: socket.socket) -> bool:
    """True if the other end is a process of this machine."""
    host = str(connection.getpeername()[0]).removeprefix("::ffff:").partition("%")[0]
    return ipaddress.ip_address(host).is_loopback
