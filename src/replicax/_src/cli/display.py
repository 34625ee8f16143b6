"""``Display``: shows the launcher's tasks as prefixed lines, and on a terminal with a live table below them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO, final

from replicax._src.cli.terminal import coloured, is_terminal, live_table, write_line
from replicax._src.cluster.spec import Task
from replicax._src.drawing.text import printable

# ANSI codes: cyan, yellow, magenta, green, blue, and three bright colours.
_COLOURS: Final = ("36", "33", "35", "32", "34", "96", "93", "95")
_BOLD: Final = "1"
_COLUMNS: Final = ("task", "state", "pid", "step", "steps/s", "memory", "restarts")
_NUM_TEXT_COLUMNS: Final = 2


@dataclass(frozen=True)
class Row:
    """A task in the table. None is shown as –.

    Attributes:
      task: The task.
      state: Its state in a few words: "running", "exited with code 1".
      pid: The number of its process.
      step: The number of steps that it has run.
      steps_per_s: Its recent speed.
      resident_bytes: Its memory, without that of processes that it has started.
      num_restarts: The number of its restarts.
    """

    task: Task
    state: str
    pid: int | None = None
    step: int | None = None
    steps_per_s: float | None = None
    resident_bytes: int | None = None
    num_restarts: int = 0

    @property
    def cells(self) -> tuple[str, ...]:
        """Returns the texts of all columns except the task."""
        return (
            printable(self.state),
            _or_dash(self.pid, "d"),
            _or_dash(self.step, "d"),
            _or_dash(self.steps_per_s, ".1f"),
            "–" if self.resident_bytes is None else f"{self.resident_bytes / 2**20:.0f} MB",
            str(self.num_restarts),
        )


@final
class Display:
    """Shows lines with the name of their task, above a live table if rich is installed and the output is a terminal.
    Any thread may call it.

    Args:
      tasks: All tasks that will have lines.
      output: The stream for the lines of the tasks, and the table.
      notes: The stream for messages of the launcher.
      environment: Describes the terminal.
      is_plain: True for no table.
      log_dir: A folder for logs. Each task's lines are also appended to a file such as ``worker-0.log``. A full disk is
        reported once.

    Attributes:
      is_broken: True once the reader has closed the pipe behind standard output.

    Raises:
      OSError: A file in ``log_dir`` cannot be opened.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        output: TextIO,
        notes: TextIO,
        environment: Mapping[str, str],
        *,
        is_plain: bool = False,
        log_dir: Path | None = None,
    ):
        self.is_broken = False
        self._output, self._notes, self._lock = output, notes, threading.Lock()
        self._has_log_failed = False
        self._logs: dict[Task, TextIO] = {}
        if log_dir is not None:
            for task in tasks:
                path = log_dir / f"{task.type}-{task.index}.log"
                self._logs[task] = path.open("a", encoding="utf-8")
        self._table = None if is_plain else live_table(output, environment)
        has_colours = is_terminal(output, environment) and not environment.get("NO_COLOR")
        is_coloured = has_colours or self._table is not None
        self._codes = {
            task: _COLOURS[number % len(_COLOURS)] if is_coloured else "" for number, task in enumerate(tasks)
        }
        self._width = max(len(str(task)) for task in tasks)

    def line(self, task: Task, text: str) -> None:
        """Shows one line of a task's output."""
        prefix = coloured(f"{task!s:{self._width}} | ", self._codes[task])
        self._show(self._output, prefix + text)
        self._log(task, text)

    def started(self, task: Task, number: int) -> None:
        """Logs the start of a task: 0 is the first start, other numbers are restarts."""
        self._log(task, f"--- {task}, start {number + 1}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---")

    def note(self, text: str) -> None:
        """Shows a message of the launcher."""
        self._show(self._notes, text if self._table is None else coloured(text, _BOLD))

    def update(self, rows: Sequence[Row]) -> None:
        """Shows the states of the tasks in the table; does nothing without a table."""
        if self._table is not None:
            cells = [(coloured(str(row.task), self._codes[row.task]), *row.cells) for row in rows]
            with contextlib.suppress(OSError):
                self._table.draw((), _COLUMNS, cells, _NUM_TEXT_COLUMNS)

    def close(self) -> None:
        """Ends the display. Its last content stays visible."""
        if self._table is not None:
            self._table.close()
        for file in self._logs.values():
            with contextlib.suppress(OSError):
                file.close()

    def _show(self, stream: TextIO, text: str) -> None:
        try:
            if self._table is not None:
                self._table.print(text)
            else:
                with self._lock:
                    write_line(stream, text)
        except OSError:
            self.is_broken = True

    def _log(self, task: Task, text: str) -> None:
        file = self._logs.get(task)
        if file is None:
            return
        try:
            write_line(file, text)
        except (OSError, ValueError) as error:
            if not self._has_log_failed:
                self._has_log_failed = True
                self.note(f"{file.name} cannot be written: {error}. Lines are missing there from now on.")


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
