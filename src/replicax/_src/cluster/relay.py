"""``Relay``: prevents the loss of JAX's coordination service from ending this process.

A thread of JAX's client aborts the process as soon as its connection to the service ends, even while the user's program
is saving (jax 0.10; a Python callback in its place crashes). So the client connects to a relay in this process, which
never closes that connection. The control channel detects that the service is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from typing import Any, Final, final

from replicax._src.cluster.failures import ClusterStartError
from replicax._src.cluster.spec import split_address

_CONNECT_TIMEOUT_S: Final = 10.0
_PIECE_BYTES: Final = 1 << 16


@final
class Relay:
    """Forwards connections to an address until this process ends, in daemon threads.

    When the other side closes a connection, this side stays open and silent. Connect inside its ``with`` block; later
    connections are refused. Only this user can connect.

    Args:
      address: The destination of the connections: ``host:port``.

    Attributes:
      address: The address for gRPC: ``unix:path``, which ignores HTTP proxies in the environment.

    Raises:
      ClusterStartError: No folder for temporary files can hold a socket.
    """

    def __init__(self, address: str):
        self._target = split_address(address)
        self._open: list[socket.socket] = []
        self._folder, self._listener = _bound()
        self.address = f"unix:{self._listener.getsockname()}"
        self._listener.listen()
        _start(self._accept)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self._open.append(client)
            with contextlib.suppress(OSError):
                service = socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT_S)
                self._open.append(service)
                service.settimeout(None)
                service.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _start(_pass_on, service, client)
                _start(_pass_on_to_the_end, client, service)


def _bound() -> tuple[tempfile.TemporaryDirectory[str], socket.socket]:
    """Returns a new folder with a socket in it. Some file systems have no sockets, and socket paths must be short."""
    failures = []
    for place in (None, "/tmp"):
        with contextlib.ExitStack() as undo:
            try:
                folder = tempfile.TemporaryDirectory(prefix="replicax-", dir=place)
                undo.enter_context(folder)
                listener = undo.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(os.path.join(folder.name, "jax"))
            except OSError as error:
                failures.append(error)
            else:
                undo.pop_all()
                return folder, listener
    raise ClusterStartError(
        "JAX's connection to the other tasks goes through a Unix socket in a folder for temporary files. None could be made with "
        f"TMPDIR={os.environ.get('TMPDIR')!r} ({failures[0]}), nor in /tmp ({failures[1]}). Set TMPDIR to a folder on a local disk."
    ) from failures[0]


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            sink.sendall(piece)


def _pass_on_to_the_end(client: socket.socket, service: socket.socket) -> None:
    _pass_on(client, service)
    with contextlib.suppress(OSError):
        service.shutdown(socket.SHUT_RDWR)


def _start(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, name="replicax-relay", daemon=True).start()
