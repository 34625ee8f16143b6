"""Cutting connections that a server of this process has accepted. Arrow Flight's server cannot end a stream itself.

While it reads from a peer, or writes to a stopped one, its thread waits until that peer does something
(https://github.com/apache/arrow/issues/43819). The socket can be ended below it: then the stream breaks at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection
from pathlib import Path

_DESCRIPTORS = Path("/dev/fd")  # of Linux and macOS


def cut(port: int, peer_ports: Collection[int]) -> int:
    """Ends the connections between ``port`` of this process and these ports of peers.

    Returns:
      How many they were; 0 also where a system does not list the files that a process has open.
    """
    num_cut = 0
    for descriptor in _open_sockets():
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is not connected
            with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
                own, other = connection.getsockname(), connection.getpeername()
                is_ip = isinstance(own, tuple) and isinstance(other, tuple)  # its true family tells
                if is_ip and own[1] == port and other[1] in peer_ports:
                    connection.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
    return num_cut


def port_of_peer(peer: str) -> int | None:
    """The port in what gRPC calls a peer: ``ipv4:127.0.0.1:40727``, ``ipv6:%5B::1%5D:40727``."""
    port = peer.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdecimal() else None


def _open_sockets() -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    found.append(int(name))
    return found
