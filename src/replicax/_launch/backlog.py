"""``Backlog``: what waits to be shown. The threads that add to it never wait; one thread takes it in batches."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass
from typing import Final, final

from replicax._src.cluster.spec import Task

_HELD_AT: Final = 1 << 18
_DROPPED_AT: Final = 1 << 23
_PER_ENTRY: Final = 100  # its objects, and the name of its task


ShownTask = Task | str
"""A task of the only job, or the name of a task among those of several jobs."""


@final
@dataclass(frozen=True)
class WaitingLine:
    """A line that waits to be shown.

    Attributes:
      text: The line.
      task: The task that wrote it; None for a message of the launcher.
      is_heading: True if it belongs only to the log of the task.
    """

    text: str
    task: ShownTask | None = None
    is_heading: bool = False


@final
class Backlog:
    """A queue of lines with two bounds. Any thread may call it.

    From the first bound on it is full: whoever reads the output of tasks should then let them wait. Lines of tasks that
    must not wait are taken up to the second bound; further ones are counted, and dropped.

    Args:
      held_at: The number of characters at which it is full, about 1 MB of memory.
      dropped_at: The number of characters at which lines of tasks are dropped.
    """

    def __init__(self, held_at: int = _HELD_AT, dropped_at: int = _DROPPED_AT):
        self._held_at, self._dropped_at = held_at, dropped_at
        self._changed = threading.Condition()
        self._entries: collections.deque[WaitingLine] = collections.deque()
        self._size = self._num_dropped = 0
        self._is_changed = self._is_over = False

    @property
    def is_full(self) -> bool:
        """True if the tasks should wait."""
        return self._size >= self._held_at

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: WaitingLine) -> None:
        """Adds a line at the end. Does not wait."""
        size = len(entry.text) + _PER_ENTRY
        with self._changed:
            if entry.task is not None and self._size + size > self._dropped_at:
                self._num_dropped += 1
                return
            self._size += size
            self._entries.append(entry)
            self._changed.notify()

    def wake(self) -> None:
        """Lets a waiting ``take`` return."""
        with self._changed:
            self._is_changed = True
            self._changed.notify()

    def close(self) -> None:
        """Lets ``take`` return None once nothing waits."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def take(self) -> list[WaitingLine] | None:
        """Waits for lines, or for ``wake``, and takes all lines. Returns None after ``close``, once all are taken."""
        with self._changed:
            while not (self._entries or self._is_changed or self._is_over):
                self._changed.wait()
            if not (self._entries or self._is_changed):
                return None
            return self._taken()

    def rest(self) -> list[WaitingLine]:
        """Takes all lines, without waiting."""
        with self._changed:
            return self._taken()

    def _taken(self) -> list[WaitingLine]:
        entries = list(self._entries)
        if self._num_dropped:
            lines = "1 line is" if self._num_dropped == 1 else f"{self._num_dropped} lines are"
            entries.append(
                WaitingLine(f"{lines} missing here: the tasks were ending, and nobody read their output.")
            )
        self._entries.clear()
        self._size = self._num_dropped = 0
        self._is_changed = False
        return entries
