"""The points at which a task may save, and what it does there: its side of ``save_rounds.py``, without threads or
clocks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, final


class AtPoint(enum.Enum):
    """What a task does before a step."""

    RUN = "run"
    WAIT = "wait"
    SAVE = "save"


@final
class SavePoints:
    """Counts the steps of a task, all of which lie between two points, and knows what the controller has said.

    Attributes:
      started: How many steps have begun.
      is_final: Whether the task ends after having saved.
    """

    def __init__(self) -> None:
        self.started = 0
        self.is_final = False
        self._paused: int | None = None
        self._stop: tuple[int, int] | None = None  # the number of the round, and after which step

    def begin(self) -> AtPoint:
        """The task is before a step: whether it has begun it, or has to wait or to save first."""
        if self._stop is not None and self.started >= self._stop[1]:
            return AtPoint.SAVE
        if self._stop is None and self._paused is not None:
            return AtPoint.WAIT
        self.started += 1
        return AtPoint.RUN

    def receive(self, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The controller says something; returns the answer, if there is one."""
        match message["kind"]:
            case "pause":
                self._paused = message["round"]
                return {"kind": "paused", "round": message["round"], "started": self.started}
            case "stop":
                self._paused, self._stop = None, (message["round"], message["after"])
                self.is_final = message["is_final"]
            case "resume":
                self._paused = None
        return None

    def save(self) -> Mapping[str, Any]:
        """The task has saved; returns what the controller is told. It goes on, also if that was final and it has not
        ended.
        """
        assert self._stop is not None
        (number, _), self._stop = self._stop, None
        return {"kind": "saved", "round": number}
