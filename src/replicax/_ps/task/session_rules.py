"""``TaskSession``: the coordinator that a task serves, and the rules that say whose messages it answers.

Pure: events go in, actions come out, and the caller has the clock. A coordinator's session is known by its
*incarnation*. ``hello`` starts a session on a task. ``leave`` ends it. So do another coordinator's ``hello``, and
silence: no ``hello`` and no ``heartbeat`` within the allowed time. A session that has ended does not come back, because
its data is dropped and the coordinator must know that. A coordinator that was silent, and knows it, says so in its
``hello``.

Several programs may share one incarnation. Each is then a *member*, and names all members when it leaves. The session
ends with the last member.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, final

from replicax._src.program_kit.errors import StaleCoordinatorError, UnavailableError

_NUM_PAST: Final = 1000


@final
@dataclass(frozen=True)
class BeginWork:
    """Make the work for a coordinator. If that fails, call ``work_failed``."""

    incarnation: str


@final
@dataclass(frozen=True)
class DropWork:
    """Drop the work for a coordinator, with all its data."""

    incarnation: str
    why: str


@final
@dataclass(frozen=True)
class EndTask:
    """End the task."""

    why: str


Action = BeginWork | DropWork | EndTask


@final
class TaskSession:
    """The session of a task with its coordinator. Not thread-safe.

    Args:
      task: The name of the task in messages: ``"ps 0"``.
      silence_timeout_s: The longest time for which a coordinator may be silent.
      now: The time in seconds, of the clock that all methods use.
      wait_timeout_s: The longest time for which the task waits for a coordinator.
      ends_with_coordinator: True if the task ends when a session has ended and no other has begun.

    >>> session = TaskSession("ps 0", silence_timeout_s=60.0, now=0.0)
    >>> session.hello("a", now=1.0), session.hello("a", now=2.0)
    ((BeginWork(incarnation='a'),), ())
    >>> session.time_passed(now=63.0)
    (DropWork(incarnation='a', why='it was silent for 60 s'),)
    """

    def __init__(
        self,
        task: str,
        silence_timeout_s: float,
        now: float,
        wait_timeout_s: float = math.inf,
        *,
        ends_with_coordinator: bool = False,
    ):
        self._task, self._silence_timeout_s = task, silence_timeout_s
        self._wait_timeout_s, self._ends_with_coordinator = wait_timeout_s, ends_with_coordinator
        self._incarnation: str | None = None
        self._past: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._last_heard = now
        self._has_served = False
        self._left: set[str] = set()
        self._may_begin_again: str | None = None

    @property
    def incarnation(self) -> str | None:
        """The incarnation of the coordinator that it serves; None while it waits for one."""
        return self._incarnation

    # --- events ---------------------------------------------------------------------------------------

    def hello(
        self, incarnation: str, now: float, member: str | None = None, *, again: bool = False
    ) -> tuple[Action, ...]:
        """A coordinator says hello. Its session starts, unless it has already.

        A member that has left and says hello again is back.

        Args:
          incarnation: The session id of the coordinator.
          now: The time.
          member: The name of the program, if several share the session.
          again: True if the coordinator knows that its data is lost when its session ended by silence, or when all
            programs that share it have left. It then starts again, unless another coordinator has come.

        Raises:
          StaleCoordinatorError: Its session has ended before.
        """
        if again and incarnation == self._may_begin_again:
            self._past.pop(incarnation, None)
        self._refuse_past(incarnation)
        is_new = incarnation != self._incarnation
        dropped = self._end("another coordinator has taken over") if is_new else ()
        self._may_begin_again = None
        self._incarnation, self._last_heard = incarnation, now
        self._left.discard(member or "")
        return (*dropped, BeginWork(incarnation)) if is_new else ()

    def work_failed(self) -> None:
        """The work for the coordinator could not be made. The coordinator may say hello again."""
        self._incarnation = None

    def heartbeat(self, incarnation: str, now: float) -> None:
        """A coordinator is alive. A task that restarted, and knows no coordinator, ignores it.

        Raises:
          StaleCoordinatorError: The task serves another coordinator.
        """
        if incarnation == self._incarnation:
            self._last_heard = now
        elif self._incarnation is not None or incarnation in self._past:
            self.check(incarnation)

    def leave(
        self, incarnation: str, now: float, member: str | None = None, members: Collection[str] = ()
    ) -> tuple[Action, ...]:
        """A coordinator, or one of the programs that share its session, leaves. All members must have left."""
        if incarnation != self._incarnation:
            return ()
        self._last_heard = now
        if member is not None:
            self._left.add(member)
            if not self._left.issuperset(members):
                return ()
            self._may_begin_again = incarnation
        return self._end("it has left")

    def time_passed(self, now: float) -> tuple[Action, ...]:
        """Ends the session of a coordinator that is silent for too long, and the task if it waits for nobody."""
        dropped: tuple[Action, ...] = ()
        if self._incarnation is not None and now - self._last_heard > self._silence_timeout_s:
            self._may_begin_again = self._incarnation
            dropped = self._end(f"it was silent for {self._silence_timeout_s:g} s")
            self._last_heard = now
        if self._incarnation is not None:
            return ()
        if self._ends_with_coordinator and self._has_served:
            return (*dropped, EndTask("lost its coordinator"))
        if now - self._last_heard > self._wait_timeout_s:
            return (*dropped, EndTask(f"no coordinator has connected for {self._wait_timeout_s:g} s"))
        return dropped

    # --- questions ------------------------------------------------------------------------------------

    def check(self, incarnation: str | None) -> None:
        """Refuses a message of a coordinator whose session this is not.

        Raises:
          StaleCoordinatorError: The task serves another coordinator.
          UnavailableError: The task serves none and does not know this one, for example because the task has
            restarted.
        """
        if incarnation is not None:
            if incarnation == self._incarnation:
                return
            self._refuse_past(incarnation)
        if self._incarnation is not None:
            raise StaleCoordinatorError(
                f"{self._task} serves the coordinator {self._incarnation}, not {incarnation}. A cluster has one "
                "coordinator at a time; the next one takes over with its hello."
            )
        raise UnavailableError(
            f"{self._task} does not know the coordinator {incarnation or 'of a message'}: the task has "
            "restarted, or no coordinator has said hello to it.",
            self._task,
        )

    def _refuse_past(self, incarnation: str) -> None:
        if incarnation in self._past:
            raise StaleCoordinatorError(
                f"{self._task} no longer serves the coordinator {incarnation}: {self._past[incarnation]}, and "
                "its data was dropped. Make a new strategy and a new coordinator, in a new process."
            )

    def _end(self, why: str) -> tuple[Action, ...]:
        incarnation, self._incarnation = self._incarnation, None
        if incarnation is None:
            return ()
        self._past[incarnation] = why
        while len(self._past) > _NUM_PAST:
            self._past.popitem(last=False)
        self._has_served = True
        self._left.clear()
        return (DropWork(incarnation, why),)
