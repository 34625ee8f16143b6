"""``TaskService``: what a task answers, whatever its type: who its coordinator is, and the messages of that one.

What it does for a coordinator is its ``Work``, made at the coordinator's ``hello`` and closed when its time is over.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

from replicax._src.cluster.spec import Task
from replicax._src.errors import InvalidArgumentError
from replicax._src.parameter_servers.task.lease import Lease
from replicax._src.parameter_servers.transport.messages import Message

_log = logging.getLogger(__name__)


Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Work(Protocol):
    """The work of a task for one coordinator. Several threads may call it."""

    def answer(self, message: Message) -> Message:
        """Does what a message asks."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Returns what the coordinator is told with each beat."""
        ...

    def close(self) -> None:
        """Drops all that was made for the coordinator."""
        ...


class Host(Protocol):
    """The parts of a task that do not depend on its coordinator.

    Attributes:
      asks: What a coordinator may ask besides what every task answers.
    """

    asks: Mapping[str, Ask]

    @property
    def instance(self) -> str:
        """Random; another one if what was here is gone."""
        ...

    @property
    def snapshots(self) -> Mapping[str, Any] | None:
        """Tells how often it writes snapshots; None if it does not, so that a restarted task has nothing."""
        ...

    @property
    def restored(self) -> Mapping[str, Any] | None:
        """Tells what it has restored from a process before it; None if nothing."""
        ...

    def begin(self, incarnation: str, ps: Sequence[str]) -> Work:
        """Makes the work for a coordinator."""
        ...

    def close(self) -> None:
        """Ends it, while what was made for the coordinator is still there."""
        ...


@final
class TaskService:
    """Answers asks and messages, from any thread. ``transport.TaskServer`` calls it.

    Args:
      task: Which one this is.
      host: What it has; it makes the work for a coordinator.
      about: What ``hello`` tells of this process.
      lease: Whose messages are answered.
      measure: How the process is now, for the beats: JSON.
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
            "beat": self._beat,
            "leave": self._leave,
            "status": self._status,
            "stop": self._stop,
            **{what: functools.partial(self._ask_host, ask) for what, ask in host.asks.items()},
        }
        if host.restored is not None:  # whoever made that may go on
            self._begin(host.restored["incarnation"], ())

    @property
    def is_to_stop(self) -> threading.Event:
        """Is set when somebody has asked the task to end."""
        return self._is_to_stop

    def ask(self, what: str, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answers one of the small questions that every task is asked.

        Raises:
          InvalidArgumentError: There is no such question.
          StaleCoordinatorError: The coordinator's time at this task is over.
        """
        if what not in self._asks:
            raise InvalidArgumentError(
                f"{self._task} was asked {what!r}; it answers {', '.join(self._asks)}. Are all tasks of the same version of "
                "replicax?"
            )
        return self._asks[what](header)

    def answer(self, message: Message) -> Message:
        """Answers an ask, or a message of the coordinator or of one of its workers.

        Raises:
          InvalidArgumentError: There is no such ask.
          StaleCoordinatorError: The coordinator's time at this task is over.
        """
        if "ask" in message.header:
            return Message(self.ask(str(message.header["ask"]), message.header))
        with self._lock:
            self._lease.check(message.header.get("incarnation"))
            work = self._work
        assert work is not None
        return work.answer(message)

    def watch(self, now: float) -> None:
        """Gives up a coordinator that is silent."""
        with self._lock:
            if self._lease.is_silent(now):
                _log.warning(
                    "%s: its coordinator %s is silent and is given up.", self._task, self._lease.incarnation
                )
                self._lease.give_up(now)
                self._drop()

    @property
    def incarnation(self) -> str | None:
        """The incarnation of the coordinator; None while there is none."""
        return self._lease.incarnation

    @property
    def has_lost_coordinator(self) -> bool:
        """True if there was one, and is none now."""
        with self._lock:
            return self._lease.has_ended

    def waited_s(self, now: float) -> float:
        """Returns for how long there has been no coordinator."""
        return self._lease.waited_s(now)

    def close(self) -> None:
        """Drops what was made for the coordinator."""
        with self._lock:
            self._drop()

    def statistics(self) -> dict[str, Any]:
        """Which coordinator it works for, what its work counts, and how its process is."""
        with self._lock:
            work = self._work
        counts = {} if work is None else work.statistics()
        return {"incarnation": self._lease.incarnation, "process": self._measure(), **counts}

    # --- the asks -----------------------------------------------------------------------------------------

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

    def _beat(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            self._lease.beat(header["incarnation"], time.monotonic())
        return {"instance": self._host.instance, "statistics": self.statistics()}

    def _leave(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            member, members = header.get("member"), header.get("members", ())
            if self._lease.leave(header["incarnation"], time.monotonic(), member, members):
                self._drop()
        return {}

    def _status(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Tells anybody what it does. Nothing changes."""
        told = {"incarnation": self._lease.incarnation, "statistics": self.statistics()}
        return {**self._described(), **told}

    def _stop(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        self._is_to_stop.set()
        return {}

    def _drop(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.close()
