"""A process that outlives worker 0: it runs the controller of the control channel and JAX's coordination service.

If worker 0 ran the coordination service, its death would abort all other workers without a Python error. ``python -m
replicax._src.cluster.controller_process`` reads one line of JSON, its settings, from stdin. It answers with one line:
``{"coordinator": "host:port"}`` or ``{"error": "..."}``. It ends when all members are gone. After the end of stdin,
which means the end of worker 0, it ends within ``linger_s``.

If the members tolerate failures (``is_tolerant`` in the settings), there is no coordination service: the answer is
``{"coordinator": null}``. After the end of stdin it serves on while members are there, and ends within ``linger_s`` of
the end of the run.
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

from replicax._src.cluster.control_messages import receive, security_of, send_text, text_of
from replicax._src.cluster.spec import join_address, split_address
from replicax._src.control.controller import Controller, JoinRefusal, Outbox
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import ForeignPeerError
from replicax._src.wire.listener import Listener
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import bind_host, bind_shared, listen

_TICK_S = 1.0
# The time that silent members get to find out that they count as gone, and to leave.
_SILENT_LINGER_S = 2.0
# The time within which a connection must send its first message.
_FIRST_MESSAGE_S = 60.0
# A member whose system buffers stay full for this time counts as gone.
_TAKE_MESSAGE_S = 2.0


@final
class ControllerServer:
    """Runs a controller on a listener. The threads of the members and of ``run`` call the controller under one lock.

    Args:
      controller: The rules.
      listening: The socket that members connect to.
      security: The secrets that members must present.
      cluster: The cluster in words. Members of a different cluster are refused.
      welcome: The message to each member that joins.
      is_tolerant: True if the members continue after the end of the process that started the controller.
    """

    def __init__(
        self,
        controller: Controller,
        listening: socket.socket,
        security: Security,
        cluster: str,
        welcome: dict[str, Any],
        *,
        is_tolerant: bool = False,
    ):
        self._controller, self._listening, self._security = controller, listening, security
        self._cluster, self._welcome = cluster, welcome
        self._is_tolerant = is_tolerant
        self._members: dict[int, Connection] = {}  # a member that was given up is in it no more
        self._connections: set[Connection] = set()  # of all processes that have joined
        self._changed = (
            threading.Condition()
        )  # notified when a member is gone; its lock guards the controller
        self._must_end = threading.Event()
        self._next_tick = time.monotonic() + _TICK_S

    def run(self, must_end: threading.Event, linger_s: float) -> None:
        """Serves until all members are gone.

        Args:
          must_end: Set when the process that started the controller has ended. The server then ends within
            ``linger_s``; if it is tolerant, within that time of the end of the run, or at once if no member is there.
        """
        self._must_end = must_end
        listener = Listener(self._listening, self._security, self._serve)
        try:
            self._watch(linger_s)
        finally:
            listener.close()
            with self._changed:
                for connection in self._connections:
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
                if ends_at is None and self._must_end.is_set() and not self._serves_on:
                    ends_at = now + linger_s
                    silent_ends_at = now + min(linger_s, _SILENT_LINGER_S)
                # A member stays connected until it has left the coordination service.
                if (self._controller.is_over or ends_at is not None) and not self._members:
                    return
                if self._controller.is_saving:
                    continue
                if ends_at is not None and now > (silent_ends_at if self._are_silent() else ends_at):
                    return

    @property
    def _serves_on(self) -> bool:
        """True while members continue without the process that started the controller."""
        is_ending = self._controller.is_broken or self._controller.is_over
        return self._is_tolerant and bool(self._members) and not is_ending

    def _are_silent(self) -> bool:
        """Returns True if all connected members count as silent."""
        return all(self._controller.is_silent(number) for number in self._members)

    # --- on the thread of a connection ---------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        try:
            joined = None
            while joined is None:  # `replicax doctor` and the launcher send requests and do not join
                joined = self._met(connection, receive(connection, time.monotonic() + _FIRST_MESSAGE_S))
            number, incarnation = joined
            try:
                while True:
                    message = receive(connection, math.inf)
                    with self._changed:
                        now = time.monotonic()
                        self._send(self._controller.receive(number, message, now, incarnation))
            finally:
                self._leave(connection, number, incarnation)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return  # the peer does not speak this protocol

    def _met(self, connection: Connection, message: dict[str, Any]) -> tuple[int, int] | None:
        """Answers a peer that has not joined. Returns the number and the incarnation of the member if it joins."""
        with self._changed:
            now = time.monotonic()
            if message["kind"] == "ping":  # sent by `replicax doctor`, and by worker 0 of the next run
                is_ending = self._controller.is_broken or (self._must_end.is_set() and not self._serves_on)
                pong = {"kind": "pong", "cluster": self._cluster, "is_ending": is_ending}
                run = {"epoch": self._controller.epoch, "members": sorted(self._members)}
                self._write(connection, {**pong, **run})
                return None
            if message["kind"] == "twin" and message["cluster"] == self._cluster:
                self._controller.note_twin(int(message["member"]))  # its own service could not listen here
                self._write(connection, {"kind": "noted"})
                return None
            if message["kind"] == "failed" and message["cluster"] == self._cluster:
                self._send(
                    self._controller.fail(int(message["member"]), str(message["text"]))
                )  # sent by `replicax launch`
                self._write(connection, {"kind": "noted"})
                return None
            refusal = self._refusal(message, now)
            if refusal is not None:
                answer = {"kind": "refused", "text": refusal.text, "is_temporary": refusal.is_temporary}
                self._write(connection, answer)
                return None
            number = int(message["member"])
            self._members[number] = connection
            self._connections.add(connection)
            self._write(connection, {"kind": "welcome", "epoch": self._controller.epoch, **self._welcome})
            return number, self._controller.incarnation(number)

    def _refusal(self, message: dict[str, Any], now: float) -> JoinRefusal | None:
        if message["kind"] != "hello":
            raise ForeignPeerError("the first message is not a hello")
        if message["cluster"] != self._cluster:
            return JoinRefusal(
                f"it belongs to another cluster, {self._cluster}. All tasks need the same cluster in TF_CONFIG."
            )
        return self._controller.join(int(message["member"]), now, message.get("min_workers"))

    def _leave(self, connection: Connection, number: int, incarnation: int) -> None:
        with self._changed:
            self._connections.discard(connection)
            if self._members.get(number) is connection:  # otherwise another process has its place
                del self._members[number]
            self._send(self._controller.disconnect(number, time.monotonic(), incarnation))
            self._changed.notify()

    # --- under the lock ------------------------------------------------------------------------------------

    def _send(self, outbox: Outbox) -> None:
        last, text = None, b""  # a message to all is written once
        for number, message in outbox:
            connection = self._members.get(number)
            if connection is not None:
                if message is not last:
                    last, text = message, text_of(message)
                self._write_text(connection, text)
            if message["kind"] == "given_up":
                self._members.pop(number, None)  # it may wake when another process has its place
                self._changed.notify()

    def _write(self, connection: Connection, message: Any) -> None:
        self._write_text(connection, text_of(message))

    def _write_text(self, connection: Connection, text: bytes) -> None:
        try:
            send_text(connection, text, time.monotonic() + _TAKE_MESSAGE_S)
        except OSError:
            connection.cancel()  # its thread sees the end of the connection


def main() -> None:
    """Runs the process that the module's docstring describes."""
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # a preemption may signal all processes of the machine; the tasks decide when this one ends
    settings = json.loads(sys.stdin.readline())
    host, own_port = split_address(settings["address"])
    try:
        listening = listen(host, own_port)
    except OSError as error:
        _answer({"error": error.strerror or str(error), "errno": error.errno})
        return
    coordinator, is_tolerant = None, settings["is_tolerant"]
    if not is_tolerant:
        # Imported only after the port is bound, because it loads jaxlib.
        from replicax._src.jax_internals.coordination import start_coordination_service

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
        is_tolerant=is_tolerant,
    )
    server.run(must_end, settings["linger_s"])
    os._exit(
        0
    )  # an orderly end of the coordination service would wait for its clients, and send them an error


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _wait_for_end_of_stdin(must_end: threading.Event) -> None:
    sys.stdin.read()
    must_end.set()


if __name__ == "__main__":
    main()
