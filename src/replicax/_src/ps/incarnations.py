"""``Incarnations``: for which coordinator a store works, and for which it has. Pure; the caller has the lock."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, final

from replicax._src.ps.errors import UnavailableError, stale

_MAX_TAKEN_OVER: Final = 64


@final
class Incarnations:
    """One at a time: the last that has said hello.

    Attributes:
      now: Its; None while there is none.
    """

    def __init__(self) -> None:
        self.now: str | None = None
        self._taken_over: deque[str] = deque(maxlen=_MAX_TAKEN_OVER)
        self._left: str | None = None

    def hello(self, incarnation: str) -> bool:
        """Begins the time of a coordinator. Returns whether it had not begun.

        Raises:
          StaleCoordinatorError: Another one has taken over from it since.
        """
        if incarnation == self.now:
            return False
        if incarnation in self._taken_over:
            raise stale(incarnation, self.now)
        if self.now is not None:
            self._taken_over.append(self.now)
        self.now = incarnation
        return True

    def leave(self, incarnation: str) -> None:
        """Ends the time of a coordinator, which may say hello again."""
        self.check(incarnation)
        self.now, self._left = None, incarnation

    def check(self, incarnation: Any) -> None:
        """Refuses what another one than the present coordinator asks.

        Raises:
          StaleCoordinatorError: It has been followed by another one, or has left.
          UnavailableError: There is none, and never was this one: the server has started anew.
        """
        if incarnation == self.now and incarnation is not None:
            return
        if self.now is None and incarnation != self._left and incarnation not in self._taken_over:
            raise UnavailableError(
                f"The parameter server has started anew: it knows nothing of coordinator {incarnation}, which has not "
                "said hello, and what it held before is gone."
            )
        raise stale(incarnation, self.now)
