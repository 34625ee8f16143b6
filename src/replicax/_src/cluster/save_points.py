"""``SavePoints``: the task's side of ``save_rounds.py``, which tells the task when to save. No threads or clocks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, final

from replicax._src.control.dates import first_at


class AtPoint(enum.Enum):
    """The action of a task before a step."""

    RUN = "run"
    WAIT = "wait"
    SAVE = "save"


@final
class SavePoints:
    """Counts the steps of a task and applies the controller's messages. A task may save only between two steps.

    With fault tolerance the count is dated, in the form of a position (``control/dates.py``): so the count of a task
    that replaces a dead one is that of the others, which have made more steps.

    Attributes:
      started: The number of steps that have started.
      is_final: True if the task ends after it has saved.
    """

    def __init__(self) -> None:
        self.started = 0
        self.is_final = False
        self._paused: int | None = None
        self._stop: tuple[int, int] | None = (
            None  # the number of the round, and the last step before the save
        )

    def begin(self, date: int = 0) -> AtPoint:
        """Starts the next step, unless the task must wait or save first.

        Args:
          date: The date; 0 if failures are not tolerated.
        """
        self._pass(date)
        if self._stop is not None and self.started >= self._stop[1]:
            return AtPoint.SAVE
        if self._stop is None and self._paused is not None:
            return AtPoint.WAIT
        self.started += 1
        return AtPoint.RUN

    def receive(self, message: Mapping[str, Any], date: int = 0) -> Mapping[str, Any] | None:
        """Takes a message of the controller, at a date. Returns the answer, if there is one."""
        match message["kind"]:
            case "pause":
                self._pass(date)
                self._paused = message["round"]
                return {"kind": "paused", "round": message["round"], "started": self.started}
            case "stop":
                self._paused, self._stop = None, (message["round"], message["after"])
                self.is_final = message["is_final"]
            case "resume":
                self._paused = None
        return None

    def save(self) -> Mapping[str, Any]:
        """Notes that the task has saved. Returns the message for the controller. The task may start steps again."""
        assert self._stop is not None
        (number, _), self._stop = self._stop, None
        return {"kind": "saved", "round": number}

    def _pass(self, date: int) -> None:
        """Counts all steps before a date as started."""
        self.started = max(self.started, first_at(date) - 1)
