"""``TaskService``: answers the messages of a task, of any type, and knows whose messages it answers.

The task's service to a coordinator is its ``Work``. It is made at the coordinator's ``hello``, and closed when the
session ends.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

from replicax._ps.task.lease import Lease
from replicax._ps.transport.messages import Message
from replicax._src.program_kit.cluster_tasks import Task
from replicax._src.program_kit.errors import InvalidArgumentError

_log = logging.getLogger(__name__)


Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Work(Protocol):
    """The work of a task for one coordinator. Thread-safe."""

    def answer(self, message: Message) -> Message:
        """Executes a request."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Returns the statistics that the coordinator gets with each heartbeat."""
        ...

    def close(self) -> None:
        """Drops all data of the coordinator."""
        ...


class Host(Protocol):
    """The parts of a task that do not depend on its coordinator.

    Attributes:
      asks: The requests that a coordinator may send besides those that every task answers.
    """

    asks: Mapping[str, Ask]

    @property
    def instance(self) -> str:
        """A random id, which changes when the task's data is lost."""
        ...

    @property
    def snapshots(self) -> Mapping[str, Any] | None:
        """The snapshot interval; None if it writes no snapshots, so that a restarted task has no data."""
        ...

    @property
    def restored(self) -> Mapping[str, Any] | None:
        """A description of the data restored from an earlier process; None if there is none."""
        ...

    def begin(self, incarnation: str, ps: Sequence[str]) -> Work:
        """Makes the work for a coordinator."""
        ...

    def close(self) -> None:
        """Ends the host, while the coordinator's data still exists."""
        ...


@final
class TaskService:
    """Answers requests and messages, from any thread. ``transport.TaskServer`` calls it.

    Args:
      task: The name of the task.
      host: The host, which makes the work for a coordinator.
      about: The description of this process that ``hello`` returns.
      lease: The rule that says whose messages are answered.
      measure: Returns the state of the process for the heartbeats, as JSON.
    """

    def __init__(
        self,
        task: Task,
        host: Host,
        about: Mapping[str, Any],
        lease: Lease,
        measure: Callable[[], Mapping[str, Any]] = dict,
    ):
        self._task, self._host, self._about, self._measure = task, host, about, measure
        self._lease = lease
        self._work: Work | None = None
        self._lock = threading.RLock()
        self._is_to_stop = threading.Event()
        self._asks: dict[str, Ask] = {
            "hello": self._hello,
            "heartbeat": self._heartbeat,
            "leave": self._leave,
            "status": self._status,
            "stop": self._stop,
            **{what: functools.partial(self._ask_host, ask) for what, ask in host.asks.items()},
        }
        if host.restored is not None:  # the coordinator of these snapshots may resume
            self._begin(host.restored["incarnation"], ())

    @property
    def is_to_stop(self) -> threading.Event:
        """An event that is set when a client has asked the task to end."""
        return self._is_to_stop

    def ask(self, what: str, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answers one of the small requests that every task answers.

        Raises:
          InvalidArgumentError: There is no such request.
          StaleCoordinatorError: The coordinator's session on this task has ended.
        """
        if what not in self._asks:
            raise InvalidArgumentError(
                f"{self._task} was asked {what!r}, but it answers only {', '.join(self._asks)}. Use the same "
                "version of replicax for all tasks."
            )
        return self._asks[what](header)

    def answer(self, message: Message) -> Message:
        """Answers a request, or a message of the coordinator or of one of its workers.

        Raises:
          InvalidArgumentError: There is no such request.
          StaleCoordinatorError: The coordinator's session on this task has ended.
        """
        if "ask" in message.header:
            return Message(self.ask(str(message.header["ask"]), message.header))
        with self._lock:
            self._lease.check(message.header.get("incarnation"))
            work = self._work
        assert work is not None
        return work.answer(message)

    def watch(self, now: float) -> None:
        """Ends the session of a coordinator that is silent for too long."""
        with self._lock:
            if self._lease.is_silent(now):
                _log.warning(
                    "%s: its coordinator %s is silent; its session ends.", self._task, self._lease.incarnation
                )
                self._lease.give_up(now)
                self._drop()

    @property
    def incarnation(self) -> str | None:
        """The session id of the coordinator; None while there is none."""
        return self._lease.incarnation

    @property
    def has_lost_coordinator(self) -> bool:
        """True if there was a coordinator, and is none now."""
        with self._lock:
            return self._lease.has_ended

    def waited_s(self, now: float) -> float:
        """Returns how long there has been no coordinator."""
        return self._lease.waited_s(now)

    def close(self) -> None:
        """Drops all data of the coordinator."""
        with self._lock:
            self._drop()

    def statistics(self) -> dict[str, Any]:
        """Returns its coordinator, the statistics of its work, and the state of its process."""
        with self._lock:
            work = self._work
        counts = {} if work is None else work.statistics()
        return {"incarnation": self._lease.incarnation, "process": self._measure(), **counts}

    # --- requests -----------------------------------------------------------------------------------------

    def _hello(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            self._begin(
                header["incarnation"], header["ps"], header.get("member"), again=bool(header.get("again"))
            )
        return self._described()

    def _begin(
        self, incarnation: str, ps: Sequence[str], member: str | None = None, *, again: bool = False
    ) -> None:
        if self._lease.hello(incarnation, time.monotonic(), member, again=again):
            self._drop()
            try:
                self._work = self._host.begin(incarnation, ps)
            except BaseException:
                self._lease.withdraw()
                raise

    def _described(self) -> dict[str, Any]:
        return {
            "instance": self._host.instance,
            "task": str(self._task),
            "restored": self._host.restored,
            "snapshots": self._host.snapshots,
            **self._about,
        }

    def _ask_host(self, ask: Ask, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            self._lease.check(header["incarnation"])
        return ask(header)

    def _heartbeat(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            self._lease.heartbeat(header["incarnation"], time.monotonic())
        return {"instance": self._host.instance, "statistics": self.statistics()}

    def _leave(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            member, members = header.get("member"), header.get("members", ())
            if self._lease.leave(header["incarnation"], time.monotonic(), member, members):
                self._drop()
        return {}

    def _status(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Describes the task to any client. Changes nothing."""
        told = {"incarnation": self._lease.incarnation, "statistics": self.statistics()}
        return {**self._described(), **told}

    def _stop(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        self._is_to_stop.set()
        return {}

    def _drop(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.close()
