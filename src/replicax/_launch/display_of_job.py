"""``DisplayOfJob``: the part of a display that one of several jobs has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from replicax._launch.backlog import ShownTask
from replicax._launch.display import Display, TaskRow
from replicax._src.cluster.spec import Task


@final
class DisplayOfJob:
    """Shows the tasks of one job beside those of others. Any thread may call it.

    Args:
      display: The display of all jobs.
      job: The name of this one, which its messages begin with.
      names: The name of each of its tasks.
      table: The rows of each job, by its name: all of these displays share it, and it has an entry for each job.
    """

    def __init__(
        self, display: Display, job: str, names: Mapping[ShownTask, str], table: dict[str, Sequence[TaskRow]]
    ):
        self._display, self._job, self._names, self._table = display, job, names, table

    @property
    def is_full(self) -> bool:
        return self._display.is_full

    @property
    def is_broken(self) -> bool:
        return self._display.is_broken

    def line(self, task: Task, text: str) -> None:
        self._display.line(self._names[task], text)

    def started(self, task: Task, number: int) -> None:
        self._display.started(self._names[task], number)

    def note(self, text: str) -> None:
        self._display.note(f"{self._job}: {text}")

    def update(self, rows: Sequence[TaskRow]) -> None:
        self._table[self._job] = [replace(row, task=self._names[row.task]) for row in rows]
        self._display.update([row for rows in self._table.values() for row in rows])
