"""``DamagingProxy``: forwards connections, and changes one byte in some of the frames."""

import contextlib
import random
import socket
import threading

from replicax._src.wire.errors import WireError
from replicax._src.wire.frames import HEADER_BYTES, SUM_BYTES, parsed_header

_HELLO_BYTES, _PROOF_BYTES = 60, 36
_FLAGS_AT = 6  # in a hello
_PIECE_BYTES = 256 * 1024


class DamagingProxy:
    """Forwards connections without TLS to an address, from its own port on loopback.

    Args:
      host: Of the address.
      port: Of the address. No process needs to listen there yet.
      every: One frame of this number is damaged, over all connections and both directions.
      in_headers: The fraction of the damaged frames that are damaged in their header of 24 bytes; the others are
        damaged anywhere.
      own_port: 0 for a free one.

    Attributes:
      address: The address to connect to instead: ``host:port``.
      num_frames: The number of frames that have started.
      num_damaged: The number of frames with a changed byte.
    """

    def __init__(self, host, port, *, every=50, in_headers=0.3, seed=0, own_port=0):
        self._target, self._every, self._in_headers = (host, port), every, in_headers
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._open, self._is_closed = set(), False
        self._listening = socket.create_server(("127.0.0.1", own_port), backlog=256)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_frames = self.num_damaged = 0
        self._start(self._accept)

    def close(self):
        """Ends all connections."""
        with self._lock:
            self._is_closed = True
            ended = [self._listening, *self._open]
        for each in ended:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _damage(self, frame_bytes):
        """The position in the next frame to damage and the change of its byte; a position before the start for none."""
        with self._lock:
            self.num_frames += 1
            if self.num_frames % self._every:
                return -1, 0
            self.num_damaged += 1
            in_header = self._random.random() < self._in_headers
            return self._random.randrange(HEADER_BYTES if in_header else frame_bytes), self._random.randrange(
                1, 256
            )

    def _start(self, run, *arguments):
        threading.Thread(target=run, args=arguments, name="damaging proxy", daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self._start(self._connect, client)

    def _connect(self, client):
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            client.close()
            return
        with self._lock:
            self._open |= {client, server}
            is_closed = self._is_closed
        if not is_closed:
            has_sums = threading.Event()
            back = threading.Thread(target=self._pass_on, args=(server, client, has_sums), daemon=True)
            back.start()
            self._pass_on(client, server, has_sums)
            back.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _pass_on(self, source, sink, has_sums):
        """Forwards one direction until it ends.

        Args:
          has_sums: Set when an end asks for checksums of bodies; the second hello comes before any frame.
        """
        for end in (source, sink):
            end.settimeout(None)
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with source.makefile("rb", _PIECE_BYTES) as reader:
                hello = reader.read(_HELLO_BYTES)
                if hello[_FLAGS_AT : _FLAGS_AT + 1] == b"\x01":
                    has_sums.set()
                sink.sendall(hello)
                sink.sendall(reader.read(_PROOF_BYTES))
                while header := reader.read(HEADER_BYTES):
                    self._pass_frame(header, reader, sink, has_sums.is_set())
            sink.shutdown(socket.SHUT_WR)
        except (OSError, WireError):
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _pass_frame(self, header, reader, sink, has_sums):
        if len(header) < HEADER_BYTES:  # it was cut off
            sink.sendall(header)
            return
        found = parsed_header(header)
        left = HEADER_BYTES + found.head_bytes + found.body_bytes
        left += SUM_BYTES if has_sums and found.body_bytes else 0
        where, change = self._damage(left)
        shard, reach = bytearray(header), 0
        while True:
            if len(shard) < left and (more := reader.read(min(left - len(shard), _PIECE_BYTES))):
                shard += more
            if reach <= where < reach + len(shard):
                shard[where - reach] ^= change
            sink.sendall(shard)
            reach, left = reach + len(shard), left - len(shard)
            if not left or not shard:
                return
            shard = bytearray()
