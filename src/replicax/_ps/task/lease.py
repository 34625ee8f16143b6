"""``Lease``: the coordinator whose session a task serves, and the one rule that says whose messages are answered.

Pure: the caller has the clock. A coordinator's session is known by its *incarnation*. ``hello`` starts a session on a
task. ``leave`` ends it. So do another coordinator's ``hello``, and silence: no ``hello`` and no ``heartbeat`` within
the allowed time. A session that has ended does not come back, because its data is dropped and the coordinator must know
that. A coordinator that was silent, and knows it, says so in its ``hello``.

Several programs may share one incarnation. Each is then a *member*, and names all members when it leaves. The session
ends with the last member.
"""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Final, final

from replicax._src.program_kit.errors import StaleCoordinatorError, UnavailableError

_NUM_PAST: Final = 1000


@final
class Lease:
    """The rule that says whose messages a task answers. Not thread-safe.

    Args:
      task: The name of the task in messages: ``"ps 0"``.
      silence_timeout_s: The longest time for which a coordinator may be silent.
      now: The time in seconds, of the clock that all methods use.

    >>> lease = Lease("ps 0", silence_timeout_s=60.0, now=0.0)
    >>> lease.hello("a", now=1.0), lease.hello("a", now=2.0), lease.is_silent(now=63.0)
    (True, False, True)
    """

    def __init__(self, task: str, silence_timeout_s: float, now: float):
        self._task, self._silence_timeout_s = task, silence_timeout_s
        self._incarnation: str | None = None
        self._past: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._last_heard = now
        self._has_ended = False
        self._left: set[str] = set()
        self._silent: str | None = None

    @property
    def has_ended(self) -> bool:
        """True if it has served a session, and serves none now."""
        return self._has_ended and self._incarnation is None

    @property
    def incarnation(self) -> str | None:
        """The incarnation of the coordinator that it serves; None while it waits for one."""
        return self._incarnation

    def hello(self, incarnation: str, now: float, member: str | None = None, *, again: bool = False) -> bool:
        """Starts the session of a coordinator. Returns True if it is new.

        A member that has left and says hello again is back.

        Args:
          incarnation: The session id of the coordinator.
          now: The time.
          member: The name of the program, if several share the session.
          again: True if the coordinator knows that its data is lost when its session ended by silence. It then starts
            again,
            unless another coordinator has come.

        Raises:
          StaleCoordinatorError: Its session has ended before.
        """
        if again and incarnation == self._silent:
            self._past.pop(incarnation, None)
        self._refuse_past(incarnation)
        is_new = incarnation != self._incarnation
        if is_new:
            self._end("another coordinator has taken over")
        self._silent = None
        self._incarnation, self._last_heard = incarnation, now
        self._left.discard(member or "")
        return is_new

    def withdraw(self) -> None:
        """Reverts a hello, because the session could not be set up. The coordinator may say hello again."""
        self._incarnation = None

    def heartbeat(self, incarnation: str, now: float) -> None:
        """Records that the coordinator is alive. A task that restarted, and knows no coordinator, ignores it.

        Raises:
          StaleCoordinatorError: The task serves another coordinator.
        """
        if incarnation == self._incarnation:
            self._last_heard = now
        elif self._incarnation is not None or incarnation in self._past:
            self.check(incarnation)

    def leave(
        self, incarnation: str, now: float, member: str | None = None, members: Collection[str] = ()
    ) -> bool:
        """Ends the session of a coordinator. A shared session ends once all members have left.

        Returns True if it ended.
        """
        if incarnation != self._incarnation:
            return False
        self._last_heard = now
        if member is not None:
            self._left.add(member)
            if not self._left.issuperset(members):
                return False
        self._end("it has left")
        return True

    def give_up(self, now: float) -> None:
        """Ends the session of a coordinator that ``is_silent``."""
        self._silent = self._incarnation
        self._end(f"it was silent for {self._silence_timeout_s:g} s")
        self._last_heard = now

    def is_silent(self, now: float) -> bool:
        """True if it serves a coordinator that has been silent for too long."""
        return self._incarnation is not None and now - self._last_heard > self._silence_timeout_s

    def waited_s(self, now: float) -> float:
        """Returns how long it has waited for a coordinator; 0 if it has one."""
        return 0.0 if self._incarnation is not None else now - self._last_heard

    def check(self, incarnation: str | None) -> None:
        """Refuses a coordinator whose session this is not.

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

    def _end(self, why: str) -> None:
        if self._incarnation is not None:
            self._past[self._incarnation] = why
            self._incarnation = None
            self._has_ended = True
            self._left.clear()
        while len(self._past) > _NUM_PAST:
            self._past.popitem(last=False)
