"""``Lease``: for which coordinator a task works, and until when: the one rule for whose messages are answered. Pure:
whoever calls it has the clock.

A coordinator is known by its *incarnation*. ``hello`` begins its time at a task, ``leave`` ends it, and so do another
coordinator's ``hello`` and silence: no ``hello`` and no ``beat`` for as long as is allowed. Who has left, was followed
or was silent does not come back: what was made for it is gone, and it has to know. One that was silent, and knows, says
so with its ``hello``.

Several programs may share one incarnation. Each is a *member* then, and says who all of them are when it leaves: the
time ends with the last one.
"""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Final, final

from replicax._src.parameter_servers.errors import StaleCoordinatorError, UnavailableError

_NUM_PAST: Final = 1000


@final
class Lease:
    """Says whose messages a task answers. Not for several threads at once.

    Args:
      task: What messages call the task: ``"ps 0"``.
      silence_timeout_s: For how long a coordinator may be silent.
      now: Seconds, of the clock that all methods are told.

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
        """True if it has worked for a coordinator, and does for none now."""
        return self._has_ended and self._incarnation is None

    @property
    def incarnation(self) -> str | None:
        """The incarnation of the coordinator that it works for; None while it waits for one."""
        return self._incarnation

    def hello(self, incarnation: str, now: float, member: str | None = None, *, again: bool = False) -> bool:
        """Begins the time of a coordinator; returns whether it has not begun before.

        A member that has left, and says it again, is there again.

        Args:
          again: It knows that all is gone if its time has ended by silence, and begins anew then, unless another one
            has come.

        Raises:
          StaleCoordinatorError: Its time has ended before.
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
        """Takes back a hello: nothing could be begun for that coordinator. It may say hello again."""
        self._incarnation = None

    def beat(self, incarnation: str, now: float) -> None:
        """The coordinator is there. Nothing if the task does not know it, and has no other: it was started again since.

        Raises:
          StaleCoordinatorError: It is not the one that the task works for.
        """
        if incarnation == self._incarnation:
            self._last_heard = now
        elif self._incarnation is not None or incarnation in self._past:
            self.check(incarnation)

    def leave(
        self, incarnation: str, now: float, member: str | None = None, members: Collection[str] = ()
    ) -> bool:
        """Ends the time of a coordinator; of one that several share, once all members have left.

        Returns whether it ended.
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
        """Ends the time of a coordinator that ``is_silent``."""
        self._silent = self._incarnation
        self._end(f"nothing was heard of it for {self._silence_timeout_s:g} s")
        self._last_heard = now

    def is_silent(self, now: float) -> bool:
        """True if it works for a coordinator of which it has heard nothing for too long."""
        return self._incarnation is not None and now - self._last_heard > self._silence_timeout_s

    def waited_s(self, now: float) -> float:
        """Returns for how long it has waited for a coordinator; 0 if it has one."""
        return 0.0 if self._incarnation is not None else now - self._last_heard

    def check(self, incarnation: str | None) -> None:
        """Refuses whoever is not the coordinator that the task works for.

        Raises:
          StaleCoordinatorError: It is another one.
          UnavailableError: There is none, and never was this one: the task was started again since.
        """
        if incarnation is not None:
            if incarnation == self._incarnation:
                return
            self._refuse_past(incarnation)
        if self._incarnation is not None:
            raise StaleCoordinatorError(
                f"{self._task} works for the coordinator {self._incarnation}, not for {incarnation}. One cluster has one "
                "coordinator at a time; the next one takes over with its hello."
            )
        raise UnavailableError(
            f"{self._task} does not know the coordinator {incarnation or 'of a message'}: it was started again since, or nobody has said "
            "hello to it.",
            self._task,
        )

    def _refuse_past(self, incarnation: str) -> None:
        if incarnation in self._past:
            raise StaleCoordinatorError(
                f"{self._task} does not work for the coordinator {incarnation} any more: {self._past[incarnation]}, and "
                "what was made for it is gone. Make the strategy and the coordinator anew, in a new process."
            )

    def _end(self, why: str) -> None:
        if self._incarnation is not None:
            self._past[self._incarnation] = why
            self._incarnation = None
            self._has_ended = True
            self._left.clear()
        while len(self._past) > _NUM_PAST:
            self._past.popitem(last=False)
