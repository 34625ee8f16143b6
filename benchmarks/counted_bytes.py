"""``CountedBytes``: a relay on loopback before a server, which counts what passes in both directions."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Final, final

_CHUNK: Final = 1 << 20


@final
class CountedBytes:
    """Relays connections to a server.

    Args:
      server: The server's address, ``host:port``.

    Attributes:
      address: Its own address.
      to_server, from_server: The bytes until now.
    """

    def __init__(self, server: str):
        host, _, port = server.rpartition(":")
        self._server = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.to_server = self.from_server = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                try:
                    server = socket.create_connection(self._server, 5.0)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._relay, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._relay, args=(server, client, False), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, is_to_server: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK):
                with self._lock:
                    if is_to_server:
                        self.to_server += len(chunk)
                    else:
                        self.from_server += len(chunk)
                sink.sendall(chunk)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()
