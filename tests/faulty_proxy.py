"""``Proxy``: a TCP proxy on loopback that can cut, hold and delay its traffic."""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from replicax._src.cluster.spec import join_address

_CONNECT_TIMEOUT_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 5.0
_PIECE_BYTES: Final = 1 << 16
_MAX_HELD_PIECES: Final = 256
_FULL_PAUSE_S: Final = 0.01


class Fault(StrEnum):
    """The fault of a proxy."""

    NONE = "none"
    CUT = "cut"
    """Connections are ended, and new ones end at once."""
    BLACKHOLE = "blackhole"
    """Nothing goes through, and nobody is told; what was sent arrives when it is healed."""


class Proxy:
    """Forwards connections to an address, from its own port on loopback, in one thread.

    Args:
      host: Of the address.
      port: Of the address. No process needs to listen there yet.

    Attributes:
      address: The address to connect to instead: ``host:port``.
    """

    def __init__(self, host: str, port: int):
        self._target = (host, port)
        self._fault, self._delay_s = Fault.NONE, 0.0
        self._pipes: list[_Pipe] = []
        self._num_connections = self._num_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self.address = join_address(*self._listener.getsockname())
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        for readable in (self._listener, self._woken):
            self._selector.register(readable, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="replicax-proxy", daemon=True)
        self._thread.start()

    def set(self, fault: Fault | str = Fault.NONE, *, delay_s: float = 0.0) -> None:
        """Makes it faulty, or healthy again.

        Args:
          fault: The fault.
          delay_s: The delay of all data, each way.
        """
        with self._lock:
            self._fault, self._delay_s = Fault(fault), delay_s
        self._wake()

    def close(self) -> None:
        """Ends all connections, and the thread."""
        self._is_closed = True
        self._wake()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def statistics(self) -> dict[str, int]:
        """The number of connections so far and now, and the number of forwarded bytes."""
        return {
            "num_connections": self._num_connections,
            "num_open": len(self._pipes) // 2,
            "num_bytes": self._num_bytes,
        }

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    # --- in the thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_closed:
            ready = {key.fileobj for key, _ in self._selector.select(self._pause_s())}
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            if self._fault is Fault.CUT:
                self._end_all()
            if self._listener in ready:
                self._accept()
            for pipe in list(self._pipes):
                if pipe in self._pipes:  # not ended meanwhile, with its other direction
                    self._move(pipe, pipe.source in ready)
        self._end_all()
        self._selector.close()
        for end in (self._listener, self._woken, self._waker):
            end.close()

    def _pause_s(self) -> float | None:
        """The time until the next shard is due; None if nothing waits."""
        if self._fault is Fault.BLACKHOLE:
            return None
        due = [pipe.held[0][0] for pipe in self._pipes if pipe.held]
        return max(0.001, min(due) - time.monotonic()) if due else None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            if self._fault is Fault.CUT:
                client.close()
                return
            try:
                server = socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT_S)
            except OSError:
                client.close()  # as if nobody listened here
                return
            self._num_connections += 1
            for source, sink in ((client, server), (server, client)):
                source.setblocking(False)
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(source, selectors.EVENT_READ)
                self._pipes.append(_Pipe(source, sink))

    def _move(self, pipe: _Pipe, is_ready: bool) -> None:
        """Reads a shard if there is one, and forwards what is due."""
        try:
            if is_ready:
                self._read(pipe)
            while pipe.held and pipe.held[0][0] <= time.monotonic() and self._fault is Fault.NONE:
                shard = pipe.held[0][1]
                if not shard:
                    pipe.sink.shutdown(socket.SHUT_WR)
                    pipe.has_ended = True
                    pipe.held.clear()
                    break
                num_sent = self._send(pipe, shard)
                self._num_bytes += num_sent
                if num_sent == len(shard):
                    pipe.held.popleft()
                else:
                    pipe.held[0] = (time.monotonic() + _FULL_PAUSE_S, shard[num_sent:])
            self._listen_to(pipe)
        except OSError:
            self._end(pipe)
            return
        if all(p.has_ended for p in self._both(pipe)):
            self._end(pipe)

    def _send(self, pipe: _Pipe, shard: bytes) -> int:
        try:
            return pipe.sink.send(shard)
        except BlockingIOError:
            return 0

    def _read(self, pipe: _Pipe) -> None:
        try:
            shard = pipe.source.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            shard = b""  # told to the other side like an end: when it would arrive
        pipe.held.append((time.monotonic() + self._delay_s, shard))
        pipe.is_drained = pipe.is_drained or not shard

    def _listen_to(self, pipe: _Pipe) -> None:
        """Continues to read only while data may come and there is room for it."""
        wants = not pipe.is_drained and len(pipe.held) < _MAX_HELD_PIECES
        is_registered = pipe.source in self._selector.get_map()
        if wants and not is_registered:
            self._selector.register(pipe.source, selectors.EVENT_READ)
        elif is_registered and not wants:
            self._selector.unregister(pipe.source)

    def _both(self, pipe: _Pipe) -> Iterator[_Pipe]:
        """The two directions of its connection."""
        return (p for p in self._pipes if p.source in (pipe.source, pipe.sink))

    def _end(self, pipe: _Pipe) -> None:
        for direction in list(self._both(pipe)):
            self._pipes.remove(direction)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(direction.source)
            direction.source.close()

    def _end_all(self) -> None:
        while self._pipes:
            self._end(self._pipes[0])


class _Pipe:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket):
        self.source, self.sink = source, sink
        self.held: collections.deque[tuple[float, bytes]] = collections.deque()  # (when it is due, a shard)
        self.is_drained = False  # the source has said that nothing more comes
        self.has_ended = False  # and the sink has been told
