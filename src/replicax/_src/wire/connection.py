"""``Connection``: one end of a connection whose peer has been authenticated. It sends and receives frames.

One thread may send while another one receives. All waits have a deadline. After any error the connection is of no more
use; ``cancel`` ends it from any thread.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, final

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
"""What is read at once when a frame begins: enough for a small one, and little of a large one, which is copied."""
_LAST_WORDS_S: Final = 2.0
_RELEASE_S: Final = 1.0
_LONGEST_REASON: Final = 16 * 1024


Room = Callable[[memoryview, int], memoryview]
"""Gives memory for a body, by the head of the frame and the number of bytes."""


def no_room(head: memoryview, num_bytes: int) -> memoryview:
    """Refuses a body, on connections on which none travels."""
    raise ForeignPeerError(f"a body of {num_bytes} bytes was announced where none travels")


@final
class Connection:
    """One end of an authenticated connection.

    Args:
      connection: The socket. The new object owns it.
      stream: What travels over the socket.
      peer: Its address, for people.
      is_checked: True if bodies have checksums.

    Attributes:
      peer: Its address, for people.
      bytes_in, bytes_out: The bytes of all frames.
    """

    def __init__(self, connection: socket.socket, stream: Stream, peer: str, *, is_checked: bool):
        prepare(connection)
        self._socket, self._stream = connection, stream
        self._is_checked = is_checked
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._header: Header | None = None  # of the next frame, once it is known
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.peer = peer
        self.bytes_in = self.bytes_out = 0

    def send(self, frames: Sequence[tuple[Kind, bytes, Sequence[Part]]], deadline: float) -> None:
        """Sends frames, each its kind, head and body, in one write where the system takes them at once.

        Raises:
          TimeoutError: The peer did not take them in time.
          OSError: The connection has ended.
        """
        parts: list[Part] = []
        for kind, head, body in frames:
            parts += frame_parts(kind, head, body, is_checked=self._is_checked)
        num_bytes = sum(map(len, parts))
        if len(parts) > 1 and num_bytes <= _FIRST_BYTES:  # many buffers cost more than the copy
            parts = [b"".join(parts)]
        _acquire(self._sending, deadline)
        try:
            self.bytes_out += num_bytes
            self._stream.write(parts, deadline)
        finally:
            self._sending.release()

    def receive(self, deadline: float, room: Room = no_room) -> memoryview | None:
        """Waits for the next message.

        Args:
          room: Asked for memory when a frame has a body.

        Returns:
          The head of the frame, valid until the next one is received. None for a frame with a body, of which ``room``
          has had the head.

        Raises:
          PeerEndedError: The peer has ended the connection; it may say why.
          WireError: What came is damaged, or no frame.
          TimeoutError: Nothing came in time.
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
                raise PeerEndedError(bytes(head).decode(errors="replace"), is_refusal=kind is Kind.REFUSAL)
            if body_bytes:
                self._receive_body(header, room(head, body_bytes), deadline)
                return None
            return head
        finally:
            self._receiving.release()

    def has_frame(self) -> bool:
        """True if a whole message without a body has come already. Only for the thread that receives."""
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

    def wait(self, timeout_s: float) -> bool:
        """Waits until the peer has sent something, or the connection has ended. False if neither happens in time."""
        if self._header is not None or self._start < self._end or self._stream.has_pending():
            return True
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(1000 * timeout_s))
        except (OSError, ValueError):  # it is closed
            return True

    def end(self, reason: str, *, is_refusal: bool = False) -> None:
        """Tells the peer why the connection ends, and takes for a while what it still sends.

        Otherwise a system may reset the connection, and the peer loses what it has not read yet.
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
        """Ends the connection, from any thread: whoever blocks in it gets an error."""
        shut_down(self._socket)

    def close(self) -> None:
        """Ends the connection and gives up its descriptor, once no thread uses it."""
        self.cancel()
        for lock in (self._sending, self._receiving):
            if not lock.acquire(timeout=_RELEASE_S):
                return  # a number that is free again would lead that thread to another connection
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
        """The next bytes, until the next call."""
        if self._end - self._start < size:
            if size > _BUFFER_BYTES:
                return self._taken_large(size, deadline)
            self._gather(size, deadline)
        start, self._start = self._start, self._start + size
        return self._buffer[start : self._start]

    def _gather(self, size: int, deadline: float) -> None:
        """Receives until the buffer has so many bytes that nobody has taken."""
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
