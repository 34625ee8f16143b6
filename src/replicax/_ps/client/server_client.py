"""``ServerClient``: the client of one parameter server, or of the two that hold the same group of shards."""

from __future__ import annotations

import threading
import time
from typing import Any, final

import numpy as np

from replicax._ps.client.request_rules import (
    Action,
    EndRequest,
    OpenConnection,
    PauseUntil,
    RequestRules,
    SendRequest,
)
from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import Link, TaskClient


@final
class ServerClient:
    """Sends requests to one parameter server: it connects, and after a failure it reconnects and sends again.

    With replication it is the client of a group of shards, which two servers hold. It asks the primary, and if that
    does not serve the group, the other server. ``request_rules.py`` has the rules.

    A request is a message whose ``op`` names an operation of the store. ``begin`` adds the session id and the
    group, and sends it; ``end`` waits for the answer. So a caller can ask several servers at once. It holds
    ``lock`` from ``begin`` to ``end``.

    Args:
      name: The server's name, such as ``"ps 0"``.
      connector: Connects to it.
      incarnation: The session id of the coordinator.

    Attributes:
      programs: The programs that the server has, by digest. They are sent again to a server that has lost them.
    """

    def __init__(self, name: str, connector: TaskClient, incarnation: Any):
        self.name = name
        self.lock = threading.RLock()
        self.programs: dict[str, UpdateProgram] = {}
        self.num_messages = self.num_opened = 0
        self._connectors = [connector]
        self._addressed = {"incarnation": incarnation}
        self._rules = RequestRules(name, self.programs)
        self._rules_lock = threading.Lock()  # never held during a wait
        self._connection: Link | None = None
        self._next: Action | None = None

    @property
    def returns(self) -> bool:
        """True if the server keeps its data when it restarts. Requests then wait for it."""
        return self._rules.returns

    @returns.setter
    def returns(self, returns: bool) -> None:
        self._rules.returns = returns

    def replicate(self, group: int, other: TaskClient) -> None:
        """Makes it the client of a group, which ``other``'s server holds, too. Call it before the first request."""
        if len(self._connectors) == 1:
            self._connectors.append(other)
            self._addressed["group"] = group
            self._rules.replicated()

    def use_primary(self, primary: int, epoch: int) -> None:
        """Sets the primary of the group: its first server (0) or its second (1). Ignores an epoch that is over.

        It does not take ``lock``, and wakes a thread that waits for the other server.
        """
        with self._rules_lock:
            connection = self._connection  # before that thread opens another one
            is_in_use = self._rules.primary_named(primary, epoch)
        if is_in_use and connection is not None:
            connection.close()

    def begin(self, request: Message, deadline: float, may_repeat: bool = True) -> Message:
        """Sends a request. ``end`` returns failures, so that the other servers get their requests first.

        Args:
          request: The request.
          deadline: The deadline on the clock of ``time.monotonic``.
          may_repeat: True if a request whose answer was lost may be sent again.

        Returns:
          The message that was sent, for ``end``.
        """
        message = Message({**request.header, **self._addressed}, request.arrays)
        with self._rules_lock:
            action = self._rules.asked(deadline, may_repeat)
        self._next = self._sent(message, action)
        return message

    def end(self, message: Message, deadline: float) -> Message | Exception:
        """Waits for the answer to a request, and returns it, or an error.

        Args:
          message: The message that ``begin`` has returned.
          deadline: The deadline that ``begin`` got.
        """
        action, self._next = self._next, None
        answer: Message | None = None
        while not isinstance(action, EndRequest):
            if isinstance(action, SendRequest):
                answer, action = self._received(action.number, deadline)
            else:
                assert isinstance(action, PauseUntil)  # ``_sent`` carries out the others
                action = self._paused(action)
            if not isinstance(action, EndRequest):
                action = self._sent(message, action)
        if action.disconnects:
            self._drop_connection()
        if action.error is not None:
            return action.error
        assert answer is not None
        return answer

    def disconnect(self) -> None:
        """Ends the connection, and the request that waits on it. The next request opens another one."""
        with self._rules_lock:
            self._rules.disconnected()
        self._drop_connection()

    def close(self) -> None:
        """Closes the client, from any thread."""
        with self._rules_lock:
            self._rules.closed()
        connection = self._connection
        if connection is not None:  # it is not removed: a thread that waits on it gets UnavailableError
            connection.close()
        self._connectors[0].close()  # another client closes the other one

    def _sent(self, message: Message, action: Action | None) -> Action:
        """Connects and sends, until an answer, the time or the caller is next."""
        while True:
            if not isinstance(action, (SendRequest, OpenConnection)):
                assert action is not None  # the outcomes of this thread are never late
                return action
            try:
                if isinstance(action, SendRequest):
                    self._send(message if action.program is None else self._program(action.program))
                    return action
                self._connect(action.server)
            except Exception as error:
                action = self._broke(action.number, error)
            else:
                with self._rules_lock:
                    action = self._rules.connected(action.number)

    def _connect(self, server: int) -> None:
        self._drop_connection()
        self._connection = self._connectors[server].open()
        self.num_opened += 1

    def _send(self, message: Message) -> None:
        assert self._connection is not None
        self._connection.send(message)
        self.num_messages += 1

    def _paused(self, pause: PauseUntil) -> Action | None:
        self._drop_connection()
        time.sleep(max(pause.until - time.monotonic(), 0.0))
        with self._rules_lock:
            return self._rules.time_passed(pause.number, time.monotonic())

    def _received(self, number: int, deadline: float) -> tuple[Message | None, Action | None]:
        assert self._connection is not None
        try:
            answer = self._connection.receive(max(deadline - time.monotonic(), 0.0))
        except Exception as error:
            return None, self._broke(number, error)
        with self._rules_lock:
            return answer, self._rules.answered(number)

    def _broke(self, number: int, error: Exception) -> Action | None:
        with self._rules_lock:
            return self._rules.broke(number, error, time.monotonic())

    def _program(self, digest: str) -> Message:
        program = message_of(self.programs[digest])
        return Message({**program.header, **self._addressed}, program.arrays)

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def message_of(program: UpdateProgram) -> Message:
    """Returns the request that gives a server a program."""
    header = {"op": "program", "digest": program.digest, "described": program.described()}
    return Message(header, [np.frombuffer(program.blob, np.uint8)])
