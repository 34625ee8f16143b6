"""``TaskService``: answers the messages of a task, of any type, and knows whose messages it answers.

The task's service to a coordinator is its ``Work``. It is made at the coordinator's ``hello``, and closed when the
session ends.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

from replicax._ps.task.session_rules import Action, BeginWork, DropWork, EndTask, TaskSession
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
      session: The rules that say whose messages are answered.
      measure: Returns the state of the process for the heartbeats, as JSON.
      clock: Returns the time in seconds, of the clock of ``session``.
    """

    def __init__(
        self,
        task: Task,
        host: Host,
        about: Mapping[str, Any],
        session: TaskSession,
        measure: Callable[[], Mapping[str, Any]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._task, self._host, self._about, self._measure = task, host, about, measure
        self._session, self._clock = session, clock
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
            self._carry_out(session.hello(host.restored["incarnation"], self._clock()), ())

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
            self._session.check(message.header.get("incarnation"))
            work = self._work
        assert work is not None
        return work.answer(message)

    def watch(self, now: float) -> EndTask | None:
        """Ends the session of a coordinator that is silent for too long. Returns the order to end the task, if it
        must.
        """
        with self._lock:
            actions = self._session.time_passed(now)
            for action in actions:
                if isinstance(action, DropWork):
                    _log.warning(
                        "%s: the session of coordinator %s has ended: %s.",
                        self._task,
                        action.incarnation,
                        action.why,
                    )
            self._carry_out(actions, ())
        return next((action for action in actions if isinstance(action, EndTask)), None)

    @property
    def incarnation(self) -> str | None:
        """The session id of the coordinator; None while there is none."""
        return self._session.incarnation

    def close(self) -> None:
        """Drops all data of the coordinator."""
        with self._lock:
            self._drop()

    def statistics(self) -> dict[str, Any]:
        """Returns its coordinator, the statistics of its work, and the state of its process."""
        with self._lock:
            work = self._work
        counts = {} if work is None else work.statistics()
        return {"incarnation": self._session.incarnation, "process": self._measure(), **counts}

    # --- requests -----------------------------------------------------------------------------------------

    def _hello(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            actions = self._session.hello(
                header["incarnation"],
                self._clock(),
                header.get("member"),
                again=bool(header.get("again")),
            )
            self._carry_out(actions, header["ps"])
        return self._described()

    def _carry_out(self, actions: Iterable[Action], ps: Sequence[str]) -> None:
        for action in actions:
            if isinstance(action, DropWork):
                self._drop()
            elif isinstance(action, BeginWork):
                try:
                    self._work = self._host.begin(action.incarnation, ps)
                except BaseException:
                    self._session.work_failed()
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
            self._session.check(header["incarnation"])
        return ask(header)

    def _heartbeat(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            self._session.heartbeat(header["incarnation"], self._clock())
        return {"instance": self._host.instance, "statistics": self.statistics()}

    def _leave(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            member, members = header.get("member"), header.get("members", ())
            actions = self._session.leave(header["incarnation"], self._clock(), member, members)
            self._carry_out(actions, ())
        return {}

    def _status(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Describes the task to any client. Changes nothing."""
        told = {"incarnation": self._session.incarnation, "statistics": self.statistics()}
        return {**self._described(), **told}

    def _stop(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        self._is_to_stop.set()
        return {}

    def _drop(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.close()
