"""How the launcher shows its tasks: their lines with a prefix, and on a terminal a live table below them."""

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

# Of ANSI: cyan, yellow, magenta, green, blue, and three bright ones.
_COLOURS: Final = ("36", "33", "35", "32", "34", "96", "93", "95")
_BOLD: Final = "1"
_COLUMNS: Final = ("task", "state", "pid", "step", "steps/s", "memory", "restarts")
_NUM_TEXT_COLUMNS: Final = 2


@dataclass(frozen=True)
class Row:
    """What the table says of a task now; what is None is shown as –.

    Attributes:
      task: Which one.
      state: In a word or three: "running", "exited with code 1".
      pid: Of its process.
      step: How many steps it has made.
      steps_per_s: Of late.
      resident_bytes: Its memory, without that of processes that it has started.
      num_restarts: How often it has been started again.
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
        """All but the task."""
        return (
            self.state,
            _or_dash(self.pid, "d"),
            _or_dash(self.step, "d"),
            _or_dash(self.steps_per_s, ".1f"),
            "–" if self.resident_bytes is None else f"{self.resident_bytes / 2**20:.0f} MB",
            str(self.num_restarts),
        )


@final
class Display:
    """Shows lines with the name of their task, from any thread; on a terminal, if rich is there, above a live table.

    Args:
      tasks: All that will have lines.
      output: Gets the lines of the tasks, and the table.
      notes: Gets what the launcher itself has to say.
      environment: Says what the terminal can do.
      is_plain: There is no table.
      log_dir: A folder where each task's lines go too, to files ``worker-0.log`` that are appended to. A disk that is
        full is told once.

    Attributes:
      is_broken: Nobody reads any more: the pipe behind standard output was closed.

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
        """A task starts, for the first time (0) or again."""
        self._log(task, f"--- {task}, start {number + 1}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---")

    def note(self, text: str) -> None:
        """Shows what the launcher itself has to say."""
        self._show(self._notes, text if self._table is None else coloured(text, _BOLD))

    def update(self, rows: Sequence[Row]) -> None:
        """Shows how the tasks are, if there is a table: lines would scroll away."""
        if self._table is not None:
            cells = [(coloured(str(row.task), self._codes[row.task]), *row.cells) for row in rows]
            with contextlib.suppress(OSError):
                self._table.draw((), _COLUMNS, cells, _NUM_TEXT_COLUMNS)

    def close(self) -> None:
        """Ends the display; what stands there stays."""
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
