"""The process beside worker 0 that outlives it: the controller of the control channel, and JAX's coordination service.

With the coordination service in worker 0 itself the death of that worker aborts all others, without a Python error.
``python -m replicax._src.cluster.service`` reads its settings from stdin, one line of JSON, and answers with a line:
``{"coordinator": "host:port"}`` or ``{"error": "..."}``. It ends when all who were there have gone; and when stdin has
ended, which is worker 0's end, at the latest after ``linger_s``.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, final

from replicax._src.cluster.controller import Controller, Outbox, Refusal
from replicax._src.cluster.frames import receive, security_of, send
from replicax._src.cluster.spec import join_address, split_address
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import ForeignPeerError
from replicax._src.wire.listener import Listener
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import bind_host, bind_shared, listen

_TICK_S = 1.0
# How long who has gone silent may take to find that out, and to leave.
_SILENT_LINGER_S = 2.0
# Until then a connection says what it is for.
_FIRST_MESSAGE_S = 60.0
# A member that does not read for so long, with the buffers of the system full, is given up.
_TAKE_MESSAGE_S = 2.0


@final
class ControllerServer:
    """Runs a controller on a listener. The rules are called under one lock, from the threads of the members and of
    ``run``.

    Args:
      controller: The rules.
      listening: Where members connect.
      security: What they must know.
      cluster: In words; who is of another one is refused.
      welcome: What each member is told.
    """

    def __init__(
        self,
        controller: Controller,
        listening: socket.socket,
        security: Security,
        cluster: str,
        welcome: dict[str, Any],
    ):
        self._controller, self._listening, self._security = controller, listening, security
        self._cluster, self._welcome = cluster, welcome
        self._members: dict[int, Connection] = {}
        self._changed = threading.Condition()  # a member has gone; its lock is that of the rules
        self._must_end = threading.Event()
        self._next_tick = time.monotonic() + _TICK_S

    def run(self, must_end: threading.Event, linger_s: float) -> None:
        """Serves until all members are gone.

        Args:
          must_end: Set when who started the controller has ended: then it goes on for ``linger_s`` at most.
        """
        self._must_end = must_end
        listener = Listener(self._listening, self._security, self._serve)
        try:
            self._watch(linger_s)
        finally:
            listener.close()
            with self._changed:
                for connection in self._members.values():
                    connection.cancel()

    def _watch(self, linger_s: float) -> None:
        ends_at: float | None = None
        silent_ends_at = 0.0
        while True:
            with self._changed:
                self._changed.wait(_TICK_S)
                now = time.monotonic()
                if now >= self._next_tick:
                    self._next_tick = now + _TICK_S
                    self._send(self._controller.tick(now))
                if self._must_end.is_set() and ends_at is None:
                    ends_at = now + linger_s
                    silent_ends_at = now + min(linger_s, _SILENT_LINGER_S)
                # Who is gone is connected until it has taken leave of the coordination service.
                if (self._controller.is_over or ends_at is not None) and not self._members:
                    return
                if ends_at is not None and now > (silent_ends_at if self._are_silent() else ends_at):
                    return

    def _are_silent(self) -> bool:
        """Whether all who are connected still have gone silent."""
        return all(self._controller.is_silent(number) for number in self._members)

    # --- on the thread of a connection ---------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        try:
            number = None
            while number is None:  # `replicax doctor` and the launcher ask, and do not join
                number = self._met(connection, receive(connection, time.monotonic() + _FIRST_MESSAGE_S))
            try:
                while True:
                    message = receive(connection, math.inf)
                    with self._changed:
                        self._send(self._controller.receive(number, message, time.monotonic()))
            finally:
                self._leave(number)
        except (LookupError, TypeError, ValueError):
            return  # somebody else is talking

    def _met(self, connection: Connection, message: dict[str, Any]) -> int | None:
        """Answers somebody who has not joined; returns the number of the member that joins."""
        with self._changed:
            now = time.monotonic()
            if message["kind"] == "ping":  # of `replicax doctor`, and of worker 0 of the next run
                is_ending = self._controller.is_broken or self._must_end.is_set()
                self._write(connection, {"kind": "pong", "cluster": self._cluster, "is_ending": is_ending})
                return None
            if message["kind"] == "failed" and message["cluster"] == self._cluster:
                self._send(
                    self._controller.fail(int(message["member"]), str(message["text"]))
                )  # of `replicax launch`
                self._write(connection, {"kind": "noted"})
                return None
            refusal = self._refusal(message, now)
            if refusal is not None:
                answer = {"kind": "refused", "text": refusal.text, "is_temporary": refusal.is_temporary}
                self._write(connection, answer)
                return None
            number = int(message["member"])
            self._members[number] = connection
            self._write(connection, {"kind": "welcome", **self._welcome})
            return number

    def _refusal(self, message: dict[str, Any], now: float) -> Refusal | None:
        if message["kind"] != "hello":
            raise ForeignPeerError("the first message is not a hello")
        if message["cluster"] != self._cluster:
            return Refusal(
                f"it belongs to another cluster, {self._cluster}. All tasks need the same cluster in TF_CONFIG."
            )
        return self._controller.join(int(message["member"]), now)

    def _leave(self, number: int) -> None:
        with self._changed:
            del self._members[number]
            self._send(self._controller.disconnect(number, time.monotonic()))
            self._changed.notify()

    # --- under the lock ------------------------------------------------------------------------------------

    def _send(self, outbox: Outbox) -> None:
        for number, message in outbox:
            connection = self._members.get(number)
            if connection is not None:
                self._write(connection, message)

    def _write(self, connection: Connection, message: Any) -> None:
        try:
            send(connection, message, time.monotonic() + _TAKE_MESSAGE_S)
        except OSError:
            connection.cancel()  # its thread finds that it has ended


def main() -> None:
    """The process: see above."""
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # who takes a machine away may tell all its processes: the tasks say when
    settings = json.loads(sys.stdin.readline())
    host, own_port = split_address(settings["address"])
    try:
        listening = listen(host, own_port)
    except OSError as error:
        _answer({"error": error.strerror or str(error), "errno": error.errno})
        return
    # After the port is ours: it loads jaxlib.
    from replicax._src.coordination import start_coordination_service

    with bind_shared(host, 0) as held:
        port = held.getsockname()[1]
        _service = start_coordination_service(join_address(bind_host(host), port), len(settings["names"]))
    coordinator = join_address(host, port)
    _answer({"coordinator": coordinator})
    must_end = threading.Event()
    threading.Thread(target=_wait_for_end_of_stdin, args=(must_end,), daemon=True).start()
    controller = Controller(settings["names"], **settings["limits"])
    server = ControllerServer(
        controller,
        listening,
        security_of(),
        settings["cluster"],
        {"coordinator": coordinator},
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
