"""Reads the status file of a task for the launcher: its step and its speed."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replicax._src.untrusted.strict_json import read_json

_WINDOW_S: Final = 10.0
_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Status:
    """One reading of a task's status file, JSON with the names below: ``{"step": 12, "time": 1.5e9, ...}``.

    Attributes:
      step: The number of steps that it has run.
      time: The time of writing, in seconds of ``time.time``.
      state: Its state in one word.
      left_at: The time at which it began to end, in seconds of ``time.monotonic``; None if it is not known.
      tolerates_failures: True if the other tasks continue without it when it dies; None if the file does not say so.
    """

    step: int
    time: float
    state: str
    left_at: float | None = None
    tolerates_failures: bool | None = None


def read_status(path: Path) -> Status | None:
    """Returns the status of a task; None if the file is missing or malformed."""
    try:
        content = read_json(path.read_text(), most_bytes=_MOST_BYTES)
        left_at, tolerates_failures = content.get("left_at"), content.get("tolerates_failures")
        return Status(
            int(content["step"]),
            float(content["time"]),
            str(content.get("state", "")),
            None if left_at is None else float(left_at),
            tolerates_failures if isinstance(tolerates_failures, bool) else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


class Speed:
    """Computes the steps per second over the last 10 s from readings of a status file."""

    def __init__(self) -> None:
        self._readings: collections.deque[Status] = collections.deque()

    def add(self, status: Status) -> None:
        """Adds a reading. A repeated reading changes nothing."""
        readings = self._readings
        if readings and status.step < readings[-1].step:  # the task has restarted
            readings.clear()
        if not readings or status.time > readings[-1].time:
            readings.append(status)
        while len(readings) > 2 and readings[-1].time - readings[0].time > _WINDOW_S:
            readings.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """The steps per second; None until two readings differ."""
        if len(self._readings) < 2:
            return None
        first, last = self._readings[0], self._readings[-1]
        return (last.step - first.step) / (last.time - first.time)
