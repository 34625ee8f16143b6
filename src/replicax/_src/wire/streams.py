"""Bytes in both directions over a socket, plain or with TLS. All waits have a deadline."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol, final

from replicax._src.wire.errors import ForeignPeerError
from replicax._src.wire.frames import Part
from replicax._src.wire.sockets import wait_for

_TICK_S: Final = 1.0
_MOST_PARTS: Final = 512  # in one call; the system's limit is 1024
_SMALL_BYTES: Final = 16 * 1024
_RECEIVED_AT_ONCE: Final = 256 * 1024
_SENT_AT_ONCE: Final = (
    96 * 1024
)  # from 128 KB on the allocator returns memory to the system, which costs page faults
_HANDSHAKE_BYTES: Final = 4 * 1024
_HANDSHAKE_BYTES_WITH_CERTIFICATES: Final = 16 * 1024


class Stream(Protocol):
    """Bytes in both directions. One thread may read while another one writes."""

    def read(self, memory: memoryview, deadline: float, *, fill: bool) -> int:
        """Receives at least one byte; returns 0 at the end. With ``fill`` it receives as many bytes as arrive
        quickly.
        """
        ...

    def read_arrived(self, memory: memoryview) -> int | None:
        """Receives what has arrived, without waiting. None if nothing has; 0 at the end."""
        ...

    def write(self, parts: Sequence[Part], deadline: float) -> None:
        """Sends all parts."""
        ...

    def has_pending(self) -> bool:
        """True if the stream has read bytes from the system that its user has not read."""
        ...


def stream_over(
    connection: socket.socket,
    context: ssl.SSLContext | None,
    deadline: float,
    server_hostname: str | None = None,
) -> Stream:
    """Returns the stream of a socket, with TLS if there is a context: see ``EncryptedStream``."""
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # otherwise small parts wait 40 ms for each other
    if context is None:
        return PlainStream(connection)
    return EncryptedStream(connection, context, deadline, server_hostname)


@final
class PlainStream:
    """A blocking socket. The system ends each wait after a second, so that the deadline is checked.

    ``settimeout`` would need one more system call for each read and write.
    """

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(_TICK_S), 0))
        self._socket = connection

    def read(self, memory: memoryview, deadline: float, *, fill: bool) -> int:
        flags = socket.MSG_WAITALL if fill else 0
        while True:
            if deadline - time.monotonic() < _TICK_S:
                wait_for(self._socket, select.POLLIN, deadline)
                flags = 0
            try:
                return self._socket.recv_into(memory, 0, flags)
            except BlockingIOError:
                continue

    def read_arrived(self, memory: memoryview) -> int | None:
        try:
            return self._socket.recv_into(memory, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def has_pending(self) -> bool:
        return False

    def write(self, parts: Sequence[Part], deadline: float) -> None:
        left = list(parts)
        while left:
            flags = 0
            if deadline - time.monotonic() < _TICK_S:
                wait_for(self._socket, select.POLLOUT, deadline)
                flags = socket.MSG_DONTWAIT
            try:
                if len(left) == 1:
                    sent = self._socket.send(left[0], flags)
                else:
                    sent = self._socket.sendmsg(left[:_MOST_PARTS], (), flags)
            except BlockingIOError:
                continue
            num_whole = 0
            while num_whole < len(left) and sent >= len(left[num_whole]):
                sent -= len(left[num_whole])
                num_whole += 1
            del left[:num_whole]
            if sent:
                left[0] = memoryview(left[0])[sent:]


@final
class EncryptedStream:
    """TLS over a socket. OpenSSL works in memory, so that one system call sends many of its 16 KB records.

    ``ssl.SSLSocket`` makes one call to send a record and two to receive it, which takes twice the time for 64 MB.

    Args:
      connection: The socket.
      context: The TLS settings.
      deadline: The deadline of the handshake.
      server_hostname: The name that the server's certificate must have; None at the server.

    Raises:
      TimeoutError: The peer did not complete the handshake in time.
      ForeignPeerError: The peer sent more than a handshake takes.
      OSError: The peer does not use TLS, or its certificate is not accepted.
    """

    def __init__(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        deadline: float,
        server_hostname: str | None = None,
    ):
        self._socket = PlainStream(connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = server_hostname is None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, is_server, server_hostname)
        self._using = threading.Lock()  # OpenSSL allows one thread at a time
        self._received = memoryview(bytearray(_SMALL_BYTES))
        has_certificates = context.verify_mode is not ssl.CERT_NONE
        self._handshake(
            deadline, _HANDSHAKE_BYTES_WITH_CERTIFICATES if has_certificates else _HANDSHAKE_BYTES
        )

    def _handshake(self, deadline: float, most_bytes: int) -> None:
        num_bytes = 0
        while True:
            try:
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                is_done = False
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._send_outgoing(deadline)  # this sends the reason to the peer
                raise
            self._send_outgoing(deadline)
            if is_done:
                return
            if num_bytes >= most_bytes:
                raise ForeignPeerError(f"its handshake has more than {most_bytes} bytes")
            num_bytes += self._receive(deadline, most_bytes - num_bytes)

    def read(self, memory: memoryview, deadline: float, *, fill: bool) -> int:
        if fill and len(self._received) < _RECEIVED_AT_ONCE:  # the body of a frame: the peer is authenticated
            self._received = memoryview(bytearray(_RECEIVED_AT_ONCE))
        size, at = len(memory), 0
        while True:
            read, is_over = self._decrypt(memory[at:])
            at += read
            if is_over or (at and (at == size or not fill)):
                return at
            if not self._receive(deadline):
                return at

    def read_arrived(self, memory: memoryview) -> int | None:
        num_bytes = self._socket.read_arrived(self._received)
        if num_bytes is not None:
            self._take_in(num_bytes)
        read, is_over = self._decrypt(memory)
        return read if read or is_over else None

    def _decrypt(self, memory: memoryview) -> tuple[int, bool]:
        """Returns how many bytes of those that are here were read, and whether the stream has ended."""
        size, at = len(memory), 0
        with self._using:
            try:
                while at < size:
                    read = self._tls.read(size - at, memory[at:])  # type: ignore[arg-type]
                    if not read:
                        return at, True
                    at += int(read)
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return at, True
        return at, False

    def has_pending(self) -> bool:
        with self._using:
            return self._tls.pending() > 0 or self._incoming.pending > 0

    def write(self, parts: Sequence[Part], deadline: float) -> None:
        small: list[Part] = []
        for part in parts:
            if len(part) < _SMALL_BYTES:
                small.append(part)
                continue
            self._write(b"".join(small), deadline)
            small.clear()
            self._write(part, deadline)
        self._write(b"".join(small), deadline)

    def _write(self, data: Part, deadline: float) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _SENT_AT_ONCE):
            with self._using:
                self._tls.write(view[start : start + _SENT_AT_ONCE])
            self._send_outgoing(deadline)

    def _send_outgoing(self, deadline: float) -> None:
        """Sends the output of OpenSSL. Output that it makes during a read waits for the next write, as TLS allows."""
        with self._using:
            made = self._outgoing.read()
        if made:
            self._socket.write([made], deadline)

    def _receive(self, deadline: float, most_bytes: int = _RECEIVED_AT_ONCE) -> int:
        """Waits for data and gives it to OpenSSL; returns 0 at the end of the stream."""
        num_bytes = self._socket.read(self._received[:most_bytes], deadline, fill=False)
        self._take_in(num_bytes)
        return num_bytes

    def _take_in(self, num_bytes: int) -> None:
        """Gives OpenSSL what was received; nothing at the end of the stream."""
        with self._using:
            if num_bytes:
                self._incoming.write(self._received[:num_bytes])
            else:
                self._incoming.write_eof()
