"""``WorkerConnector``: connects to one worker, reconnects after it was lost, and notices its loss."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, final

from replicax._ps.client.session import Session
from replicax._ps.coordinator.limits import Limits
from replicax._ps.coordinator.worker_connection import WorkerConnection
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import StaleCoordinatorError, UnavailableError

if TYPE_CHECKING:
    from replicax._ps.coordinator.pool import WorkerPool

log = logging.getLogger("replicax")

_HELLO_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


@final
class WorkerConnector:
    """Connects to a worker, and has its last statistics. Starts no thread.

    Args:
      name: The name of the worker.
      index: The number of the worker.
      session: The session with the tasks.
      pool: The pool, which learns when the worker is given up or belongs to another coordinator.
      limits: The timeouts.
      closing: An event that is set when no more connections should be made.
    """

    def __init__(
        self,
        name: str,
        index: int,
        session: Session,
        pool: WorkerPool,
        limits: Limits,
        closing: threading.Event,
    ):
        self._name, self._index, self._session, self._limits = name, index, session, limits
        self._pool, self._closing = pool, closing
        self._num_connections = self._num_restarts = 0
        self._told: dict[str, Any] = {}
        self._heartbeat: dict[str, Any] = {}

    def statistics(self) -> dict[str, Any]:
        """Returns how often the worker was connected and restarted, and its last statistics."""
        return {
            "connections": self._num_connections,
            "restarts": self._num_restarts,
            "task": dict(self._told),
            "statistics": dict(self._heartbeat),
        }

    def connect(self) -> WorkerConnection | None:
        """Tries to connect until the worker answers. Returns None if it is given up, or the pool is closed."""
        until = time.monotonic() + self._limits.reconnect_s
        pause_s = _PAUSE_S
        while not self._closing.is_set():
            try:
                return self._open()
            except UnavailableError as error:
                if time.monotonic() > until:
                    self._pool.given_up(self._name, self._unreachable(error))
                    return None
            except Exception as error:
                self._pool.given_up(self._name, error)
                return None
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    def send_primaries(self, connection: WorkerConnection) -> None:
        """Tells the worker which parameter servers serve which variables."""
        try:
            self._tell_primaries(connection.client)
        except Exception as error:
            log.debug("%s: %s", self._name, error)  # a server that is not the primary says so itself

    def watch(self, connection: WorkerConnection) -> None:
        """Sends heartbeats until the connection has ended, and ends it if the worker does not answer.

        The worker answers them while it runs or compiles a closure, so a closure may take any time.
        """
        limits, missed = self._limits, 0
        header = {"incarnation": self._session.incarnation}
        while not connection.over.wait(limits.heartbeat_s):
            try:
                answer = connection.client.ask("heartbeat", header, limits.heartbeat_timeout_s)
            except StaleCoordinatorError as error:
                self._pool.broke(error)
                connection.end(error)
            except Exception as error:
                missed += 1
                if missed >= limits.missed_heartbeats:
                    connection.end(error)
            else:
                missed = 0
                self._heartbeat = dict(answer.get("statistics") or {})
                if answer.get("instance") != connection.instance:
                    text = f"{self._name} is another process than before."
                    connection.end(UnavailableError(text, self._name))

    def _open(self) -> WorkerConnection:
        client = self._session.connect("worker", self._index)
        try:
            header = {"incarnation": self._session.incarnation, "ps": list(self._session.ps_addresses)}
            told = dict(client.ask("hello", header, _HELLO_S))
            if self._told and self._told.get("instance") != told.get("instance"):
                self._num_restarts += 1
                self._heartbeat = {}
            self._told = told
            self._session.meet_worker(self._name, told)
            self._tell_primaries(client)
            link = client.open()
        except BaseException:
            client.close()
            raise
        self._num_connections += 1
        instance, resources = told.get("instance"), self._pool.resources
        return WorkerConnection(self._name, client, link, instance, self._session, resources)

    def _tell_primaries(self, client: TaskClient) -> None:
        groups = self._session.groups
        if groups is not None:
            views = [view.described() for view in groups.views]
            header = {"incarnation": self._session.incarnation, "views": views}
            client.ask("primaries", header, _HELLO_S)

    def _unreachable(self, error: UnavailableError) -> UnavailableError:
        return UnavailableError(
            f"Could not reach {self._name} for {self._limits.reconnect_s:g} s, and gave it up: {error}",
            self._name,
        )
