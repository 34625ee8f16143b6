"""The rules for tasks of a job that goes on without them: when a new process takes the place of a dead one.

No processes or clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from replicax._launch.restarts import SHORT_RUN_S, Restarts, waiting_s
from replicax._src.cluster.spec import Task


@final
@dataclass
class _Place:
    """The place of one task.

    Attributes:
      starts_at: The time of the next start; None if none is due.
      num_in_vain: The number of its processes in a row that ended within 30 s, or before they had entered.
    """

    starts_at: float | None = None
    num_in_vain: int = 0


@final
class Replacements:
    """Decides which dead tasks are started again, alone, while the others continue.

    A *replacement* is the new process of such a task. It *enters* when it takes its part among the others. One that
    ends before is no failure of the job. The restarts are those of the job: ``Restarts`` counts them. The first
    replacement starts at once. While the processes of a task end within 30 s, or before they have entered, the next one
    waits, longer each time: 1, 2, 4, ... 30 s.

    Args:
      restarts: The restarts of the job.
    """

    def __init__(self, restarts: Restarts):
        self._restarts = restarts
        self._places: dict[Task, _Place] = {}

    def after(self, task: Task, run_s: float, now: float, *, has_entered: bool) -> str | None:
        """Notes the end of a process, and decides about the next one.

        Args:
          task: Its task.
          run_s: The seconds from its start to its end.
          now: The time.
          has_entered: True if it took part with the others; False for a replacement that ended before.

        Returns:
          A text such as "restart 3 of 20."; None if there is no restart.
        """
        place = self._places.setdefault(task, _Place())
        is_in_vain = not has_entered or run_s < SHORT_RUN_S
        place.num_in_vain = place.num_in_vain + 1 if is_in_vain else 0
        wait_s = waiting_s(place.num_in_vain - 1)
        note = self._restarts.after_death(is_in_vain=is_in_vain)
        place.starts_at = None if note is None else now + wait_s
        return f"{note} It waits {wait_s:g} s." if note is not None and wait_s else note

    def is_due(self, task: Task) -> bool:
        """Returns True if a process of this task is still to be started."""
        place = self._places.get(task)
        return place is not None and place.starts_at is not None

    def start_due(self, now: float, start: Callable[[Task], None]) -> None:
        """Calls ``start`` with each task whose time has come."""
        for task, place in self._places.items():
            if place.starts_at is not None and now >= place.starts_at:
                place.starts_at = None
                start(task)

    def clear(self) -> None:
        """Notes that all tasks start again."""
        self._places.clear()
