"""``Connection``: one end of a connection whose peer is authenticated. It sends and receives frames.

One thread may send while another one receives. All waits have a deadline. After any error the connection is unusable.
``cancel`` ends it from any thread.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

from replicax._src.drawing.text import printable_lines
from replicax._src.wire.errors import ForeignPeerError, PeerEndedError, WireError
from replicax._src.wire.frames import (
    HEADER_BYTES,
    LARGEST_HEAD,
    SUM_BYTES,
    Header,
    Kind,
    Part,
    check_body,
    check_head,
    frame_parts,
    parsed_header,
)
from replicax._src.wire.sockets import prepare, shut_down
from replicax._src.wire.streams import Stream

_BUFFER_BYTES: Final = 128 * 1024
_FIRST_BYTES: Final = 16 * 1024
"""The size of the first read of a frame: enough for a small frame, and only a small part of a large one, as it is
copied.
"""
_LAST_WORDS_S: Final = 2.0
_RELEASE_S: Final = 1.0
_LONGEST_REASON: Final = 16 * 1024


Room = Callable[[memoryview, int], memoryview]
"""Returns memory for a body, given the head of the frame and the number of bytes."""


def no_room(head: memoryview, num_bytes: int) -> memoryview:
    """Refuses a body, on connections that carry none."""
    raise ForeignPeerError(
        f"a body of {num_bytes} bytes was announced on a connection that carries no bodies"
    )


@final
class Connection:
    """One end of an authenticated connection.

    Args:
      connection: The socket. The new object owns it.
      stream: The bytes over the socket.
      peer: The peer's address, for messages.
      is_checked: True if bodies have checksums.

    Attributes:
      peer: The peer's address, for messages.
      bytes_in, bytes_out: The bytes of all frames.
    """

    def __init__(self, connection: socket.socket, stream: Stream, peer: str, *, is_checked: bool):
        prepare(connection)
        self._socket, self._stream = connection, stream
        self._is_checked = is_checked
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._header: Header | None = None  # the header of the next frame, once it has arrived
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.peer = peer
        self.bytes_in = self.bytes_out = 0

    def send(self, frames: Sequence[tuple[Kind, bytes, Sequence[Part]]], deadline: float) -> None:
        """Sends frames in one write, if the system accepts them at once. Each is given as kind, head and body.

        Raises:
          TimeoutError: The peer did not read them in time.
          OSError: The connection has ended.
        """
        parts: list[Part] = []
        for kind, head, body in frames:
            parts += frame_parts(kind, head, body, is_checked=self._is_checked)
        num_bytes = sum(map(len, parts))
        if len(parts) > 1 and num_bytes <= _FIRST_BYTES:  # many buffers cost more than a copy
            parts = [b"".join(parts)]
        _acquire(self._sending, deadline)
        try:
            self.bytes_out += num_bytes
            self._stream.write(parts, deadline)
        finally:
            self._sending.release()

    def send_head(self, head: bytes, deadline: float) -> None:
        """Sends one message without a body; see ``send``."""
        parts = frame_parts(Kind.MESSAGE, head)
        _acquire(self._sending, deadline)
        try:
            self.bytes_out += len(parts[0])
            self._stream.write(parts, deadline)
        finally:
            self._sending.release()

    def send_messages(self, messages: Iterable[tuple[bytes, Sequence[Part]]], deadline: float) -> None:
        """Sends messages, each given as head and body; see ``send``."""
        self.send([(Kind.MESSAGE, head, body) for head, body in messages], deadline)

    def receive(self, deadline: float, room: Room = no_room) -> memoryview | None:
        """Waits for the next message.

        Args:
          deadline: The deadline on the clock of ``time.monotonic``.
          room: Called for memory if a frame has a body.

        Returns:
          The head of the frame, valid until the next one is received. None for a frame with a body, whose head
          ``room`` got.

        Raises:
          PeerEndedError: The peer has ended the connection; the error has its reason, if it sent one.
          WireError: The data is damaged, or not a frame.
          TimeoutError: No message arrived in time.
          OSError: The connection has ended.
        """
        _acquire(self._receiving, deadline)
        try:
            header = self._header
            if header is None:
                if self._end - self._start < HEADER_BYTES:
                    self._gather(HEADER_BYTES, deadline)
                header = self._take_header()
            kind, head_bytes, body_bytes, _ = header
            head = self._taken(head_bytes, deadline)
            self._header = None
            check_head(header, head)
            self.bytes_in += HEADER_BYTES + head_bytes + body_bytes
            if kind is not Kind.MESSAGE:
                raise PeerEndedError(
                    printable_lines(bytes(head).decode(errors="replace")), is_refusal=kind is Kind.REFUSAL
                )
            if body_bytes:
                self._receive_body(header, room(head, body_bytes), deadline)
                return None
            return head
        finally:
            self._receiving.release()

    def has_frame(self) -> bool:
        """True if a full message without a body has arrived. Only the receiving thread may ask."""
        header = self._header
        if header is None:
            if self._end - self._start < HEADER_BYTES:
                return False
            try:
                header = self._take_header()
            except WireError:  # the next ``receive`` raises it
                return False
        is_message = header.kind is Kind.MESSAGE and not header.body_bytes
        return is_message and self._end - self._start >= header.head_bytes

    def receive_arrived(self) -> list[memoryview]:
        """Reads once, without waiting. Returns the heads of the messages without a body that are here in full.

        They are valid until the next call. If there is none, ``receive`` may have to wait: the message is large, or a
        part of it is missing, or the peer has ended the connection. Only the receiving thread may call it.

        Raises:
          WireError: The next frame is damaged.
          OSError: The connection has ended.
        """
        heads: list[memoryview] = []
        with self._receiving:
            if not self.has_frame():
                self._read_arrived()
            while self.has_frame():
                header = self._header
                assert header is not None
                stop = self._start + header.head_bytes
                head = self._buffer[self._start : stop]
                try:
                    check_head(header, head)
                except WireError:
                    if heads:  # the next call raises it
                        break
                    raise
                heads.append(head)
                self._start, self._header = stop, None
                self.bytes_in += HEADER_BYTES + header.head_bytes
        return heads

    def _read_arrived(self) -> None:
        """Reads what has arrived, if there is room for it."""
        buffered = self._end - self._start
        if self._end + _FIRST_BYTES > _BUFFER_BYTES or not buffered:
            self._buffer[:buffered] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, buffered
        if buffered == _BUFFER_BYTES:
            return  # the message is larger
        size = self._stream.read_arrived(self._buffer[self._end : self._end + _FIRST_BYTES])
        if size == 0 and not buffered and self._header is None:
            raise PeerEndedError
        self._end += size or 0

    @property
    def is_checked(self) -> bool:
        """True if bodies have checksums."""
        return self._is_checked

    def has_bytes(self) -> bool:
        """True if bytes of the peer are here that ``receive`` has not taken. Only the receiving thread may ask."""
        return self._header is not None or self._start < self._end or self._stream.has_pending()

    def fileno(self) -> int:
        """Returns the descriptor, for ``Watch``; -1 once it is closed."""
        return self._socket.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Waits until the peer has sent data, or the connection has ended. Returns False if neither happens in time."""
        if self.has_bytes():
            return True
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(1000 * timeout_s))
        except (OSError, ValueError):  # it is closed
            return True

    def end(self, reason: str, *, is_refusal: bool = False) -> None:
        """Tells the peer why the connection ends, and reads for a while what it still sends.

        Otherwise the system may reset the connection, and the peer would lose data that it has not read yet.
        """
        until = time.monotonic() + _LAST_WORDS_S
        kind = Kind.REFUSAL if is_refusal else Kind.END
        with contextlib.suppress(OSError):
            self.send([(kind, reason.encode()[:_LONGEST_REASON], ())], until)
            self._socket.shutdown(socket.SHUT_WR)
            with self._receiving:
                while self._stream.read(self._buffer, until, fill=False):
                    pass
        self.close()

    def cancel(self) -> None:
        """Ends the connection, from any thread. A thread that blocks in it gets an error."""
        shut_down(self._socket)

    def close(self) -> None:
        """Ends the connection and closes its descriptor, once no thread uses it."""
        self.cancel()
        for lock in (self._sending, self._receiving):
            if not lock.acquire(timeout=_RELEASE_S):
                return  # a reused descriptor number would give that thread another connection
            lock.release()
        self._socket.close()

    def _receive_body(self, header: Header, memory: memoryview, deadline: float) -> None:
        if len(memory) != header.body_bytes:
            raise ForeignPeerError(f"a body of {header.body_bytes} bytes was announced for {len(memory)}")
        self._fill(memory, deadline)
        if self._is_checked:
            check_body(memory, self._taken(SUM_BYTES, deadline))

    def _take_header(self) -> Header:
        self._header = parsed_header(self._buffer, self._start)
        self._start += HEADER_BYTES
        return self._header

    def _taken(self, size: int, deadline: float) -> memoryview:
        """Returns the next bytes, valid until the next call."""
        if self._end - self._start < size:
            if size > _BUFFER_BYTES:
                return self._taken_large(size, deadline)
            self._gather(size, deadline)
        start, self._start = self._start, self._start + size
        return self._buffer[start : self._start]

    def _gather(self, size: int, deadline: float) -> None:
        """Receives until the buffer has ``size`` unread bytes."""
        buffered = self._end - self._start
        if self._start + size > _BUFFER_BYTES:
            self._buffer[:buffered] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, buffered
        elif not buffered:
            self._start = self._end = 0
        while self._end - self._start < size:
            stop = max(self._start + size, min(self._end + _FIRST_BYTES, _BUFFER_BYTES))
            self._end += self._received(self._buffer[self._end : stop], deadline, fill=False)

    def _taken_large(self, size: int, deadline: float) -> memoryview:
        assert size <= LARGEST_HEAD
        memory = memoryview(bytearray(size))
        self._fill(memory, deadline)
        return memory

    def _fill(self, memory: memoryview, deadline: float) -> None:
        at = min(self._end - self._start, len(memory))
        memory[:at] = self._buffer[self._start : self._start + at]
        self._start += at
        while at < len(memory):
            at += self._received(memory[at:], deadline, fill=True)

    def _received(self, memory: memoryview, deadline: float, *, fill: bool) -> int:
        size = self._stream.read(memory, deadline, fill=fill)
        if not size:
            raise PeerEndedError
        return size


def _acquire(lock: threading.Lock, deadline: float) -> None:
    """Acquires a lock, which another thread may have until its own deadline."""
    if lock.acquire(blocking=False):
        return
    limit_s = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
    if not lock.acquire(timeout=limit_s):
        raise TimeoutError("another thread uses the connection")


FOREVER: Final = math.inf
