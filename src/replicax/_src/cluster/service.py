"""The process beside worker 0 that outlives it: the hub of the control channel, and JAX's coordination service.

With the coordination service in worker 0 itself the death of that worker aborts all others, without a Python error.
``python -m replicax._src.cluster.service`` reads its settings from stdin, one line of JSON, and answers with a line:
``{"coordinator": "host:port"}`` or ``{"error": "..."}``. It ends when all who were there have gone; and when stdin has
ended, which is worker 0's end, at the latest after ``linger_s``.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any, final

from replicax._src.cluster.frames import Decoder, FrameError, bind_host, bind_shared, encode, listen
from replicax._src.cluster.hub import Hub, Outbox, Refusal
from replicax._src.cluster.spec import join_address, split_address

_TICK_S = 1.0
# How long who has gone silent may take to find that out, and to leave.
_SILENT_LINGER_S = 2.0
_MOST_UNSENT_BYTES = 64 * 2**20


@final
class HubServer:
    """Runs a hub on sockets, in the thread that calls ``run``.

    Args:
      hub: The rules.
      listener: Where members connect.
      fingerprint: Of the cluster; who has another one is refused.
      cluster: In words, for who is refused.
      welcome: What each member is told.
    """

    def __init__(
        self, hub: Hub, listener: socket.socket, fingerprint: str, cluster: str, welcome: dict[str, Any]
    ):
        self._hub, self._listener = hub, listener
        self._fingerprint, self._cluster, self._welcome = fingerprint, cluster, welcome
        self._selector = selectors.DefaultSelector()
        self._decoders: dict[socket.socket, Decoder] = {}
        self._numbers: dict[socket.socket, int] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._unsent: dict[socket.socket, bytearray] = {}
        self._must_end = threading.Event()

    def run(self, must_end: threading.Event, linger_s: float) -> None:
        """Serves until all members are gone.

        Args:
          must_end: Set when who started the hub has ended: then it goes on for ``linger_s`` at most.
        """
        self._must_end = must_end
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            self._serve(linger_s)
        finally:
            for connection in self._decoders:
                connection.close()
            self._selector.close()

    def _serve(self, linger_s: float) -> None:
        next_tick = time.monotonic() + _TICK_S
        ends_at: float | None = None
        silent_ends_at = 0.0
        while True:
            for key, events in self._selector.select(max(0.0, next_tick - time.monotonic())):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                connection: Any = key.fileobj
                if events & selectors.EVENT_WRITE:
                    self._flush(connection)
                if events & selectors.EVENT_READ:
                    self._read(connection)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_S
                self._send(self._hub.tick(now))
            if self._must_end.is_set() and ends_at is None:
                ends_at = now + linger_s
                silent_ends_at = now + min(linger_s, _SILENT_LINGER_S)
            # Who is gone is connected until it has taken leave of the coordination service.
            if (self._hub.is_over or ends_at is not None) and not self._numbers:
                return
            if ends_at is not None and now > (silent_ends_at if self._are_silent() else ends_at):
                return

    def _are_silent(self) -> bool:
        """Whether all who are connected still have gone silent."""
        return all(self._hub.is_silent(number) for number in self._sockets)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoders[connection] = Decoder()
        self._unsent[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._decoders:
            return
        try:
            data = connection.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            for message in self._decoders[connection].feed(data):
                self._receive(connection, message)
        except (FrameError, LookupError, TypeError, ValueError):
            self._drop(connection)  # somebody else is talking

    def _receive(self, connection: socket.socket, message: dict[str, Any]) -> None:
        now = time.monotonic()
        number = self._numbers.get(connection)
        if number is not None:
            self._send(self._hub.receive(number, message, now))
            return
        if message["kind"] == "ping":  # of `replicax doctor`, and of worker 0 of the next run
            is_ending = self._hub.is_broken or self._must_end.is_set()
            self._write(connection, {"kind": "pong", "cluster": self._cluster, "is_ending": is_ending})
            return
        if (
            message["kind"] == "failed" and message["fingerprint"] == self._fingerprint
        ):  # of `replicax launch`
            self._send(self._hub.fail(int(message["member"]), str(message["text"])))
            self._write(connection, {"kind": "noted"})
            return
        refusal = self._refusal(message, now)
        if refusal is not None:
            answer = {"kind": "refused", "text": refusal.text, "is_temporary": refusal.is_temporary}
            self._write(connection, answer)
            return
        number = int(message["member"])
        self._numbers[connection], self._sockets[number] = number, connection
        self._write(connection, {"kind": "welcome", **self._welcome})

    def _refusal(self, message: dict[str, Any], now: float) -> Refusal | None:
        if message["kind"] != "hello":
            raise FrameError("the first message is not a hello")
        if message["fingerprint"] != self._fingerprint:
            return Refusal(
                f"it belongs to another cluster, {self._cluster}. All tasks need the same cluster in TF_CONFIG."
            )
        return self._hub.join(int(message["member"]), now)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._decoders[connection]
        del self._unsent[connection]
        number = self._numbers.pop(connection, None)
        if number is not None:
            del self._sockets[number]
            self._send(self._hub.disconnect(number, time.monotonic()))

    def _send(self, outbox: Outbox) -> None:
        for number, message in outbox:
            connection = self._sockets.get(number)
            if connection is not None:
                self._write(connection, message)

    def _write(self, connection: socket.socket, message: Any) -> None:
        unsent = self._unsent[connection]
        if len(unsent) > _MOST_UNSENT_BYTES:
            return  # it has stopped reading: it will count as silent
        unsent += encode(message)
        self._flush(connection)

    def _flush(self, connection: socket.socket) -> None:
        unsent = self._unsent.get(connection)
        if unsent is None:
            return
        try:
            sent = connection.send(unsent) if unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # reading will find that it has ended
        del unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
        self._selector.modify(connection, events)


def main() -> None:
    """The process: see above."""
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # who takes a machine away may tell all its processes: the tasks say when
    settings = json.loads(sys.stdin.readline())
    try:
        listener = listen(settings["address"], backlog=len(settings["names"]) + 8)
    except OSError as error:
        _answer({"error": error.strerror or str(error), "errno": error.errno})
        return
    # After the port is ours: it loads jaxlib.
    from replicax._src.coordination import start_coordination_service

    host, _ = split_address(settings["address"])
    with bind_shared(join_address(host, 0)) as held:
        port = held.getsockname()[1]
        _service = start_coordination_service(join_address(bind_host(host), port), len(settings["names"]))
    coordinator = join_address(host, port)
    _answer({"coordinator": coordinator})
    must_end = threading.Event()
    threading.Thread(target=_wait_for_end_of_stdin, args=(must_end,), daemon=True).start()
    hub = Hub(settings["names"], **settings["limits"])
    server = HubServer(
        hub, listener, settings["fingerprint"], settings["cluster"], {"coordinator": coordinator}
    )
    server.run(must_end, settings["linger_s"])
    os._exit(0)  # freed in order, the coordination service would wait for its clients, and send them an error


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _wait_for_end_of_stdin(must_end: threading.Event) -> None:
    sys.stdin.read()
    must_end.set()


if __name__ == "__main__":
    main()
