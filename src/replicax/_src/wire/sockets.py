"""Listening sockets, and waits for a socket with a deadline."""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import time
from typing import Final

_ALL_IPV4: Final = "0.0.0.0"
_LONGEST_POLL_S: Final = 1000.0


def bind_host(host: str) -> str:
    """Returns the address to bind for peers that reach this machine as ``host``: all networks, unless it is loopback.

    A name may stand for an address that this machine does not have, such as that of a Kubernetes service.
    """
    if host in ("localhost", "::1") or host.startswith("127."):
        return host
    return "::" if ":" in host else _ALL_IPV4


def listen(host: str, port: int, backlog: int = 512) -> socket.socket:
    """Returns a listening socket. If it listens on all networks, it accepts IPv6, too.

    The backlog is long, so that many unauthenticated peers that connect at once do not delay others.

    Raises:
      OSError: It cannot listen there; the port may be in use.
    """
    if bind_host(host) == _ALL_IPV4:
        with contextlib.suppress(OSError):  # this machine has no IPv6, or the port is in use
            return _listening("::", port, backlog)
    return _listening(host, port, backlog)


def _listening(host: str, port: int, backlog: int) -> socket.socket:
    listener = _bound(host, port, socket.SO_REUSEADDR)  # allows a restart on the same port at once
    try:
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def bind_shared(host: str, port: int) -> socket.socket:
    """Returns a socket that reserves a port without listening, for a gRPC server of this process.

    Only another socket with SO_REUSEPORT, such as gRPC's, can bind the port.

    Raises:
      OSError: It cannot bind there; the port may be in use.
    """
    return _bound(host, port, socket.SO_REUSEPORT)


def _bound(host: str, port: int, option: int) -> socket.socket:
    host = bind_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, option, 1)
    if host == "::":
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # accept IPv4, too
    try:
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def prepare(connection: socket.socket) -> None:
    """Makes the system send small messages at once, and end a connection two minutes after its peer's machine is
    lost.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        option = getattr(socket, name, None)
        if option is not None:  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def shut_down(connection: socket.socket) -> None:
    """Ends a connection from any thread, and wakes a thread that blocks in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def seconds_left(deadline: float) -> float:
    """Returns the seconds until ``deadline``, on the clock of ``time.monotonic``.

    Raises:
      TimeoutError: It has passed.
    """
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline has passed")
    return left_s


def wait_for(connection: socket.socket, event: int, deadline: float) -> None:
    """Waits for ``select.POLLIN`` or ``select.POLLOUT``, or the end of the connection.

    Raises:
      TimeoutError: The deadline has passed.
      OSError: The connection was closed here.
    """
    poll = select.poll()
    try:
        poll.register(connection, event)
    except ValueError:  # its descriptor is -1
        raise OSError(errno.EBADF, "the connection was closed") from None
    while not poll.poll(math.ceil(1000 * min(seconds_left(deadline), _LONGEST_POLL_S))):
        pass
