"""How the launcher shows its tasks: their lines with a prefix, and on a terminal a live table below them."""

from __future__ import annotations

import abc
import contextlib
import importlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO, final

from replicax._src.cluster.spec import Task

_COLOURS: Final = (
    36,
    33,
    35,
    32,
    34,
    96,
    93,
    95,
)  # of ANSI: cyan, yellow, magenta, green, blue, and three bright ones
_COLUMNS: Final = ("task", "state", "pid", "step", "steps/s", "memory", "restarts")


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
        return (
            str(self.task),
            self.state,
            _or_dash(self.pid, "d"),
            _or_dash(self.step, "d"),
            _or_dash(self.steps_per_s, ".1f"),
            "–" if self.resident_bytes is None else f"{self.resident_bytes / 2**20:.0f} MB",
            str(self.num_restarts),
        )


class Display(abc.ABC):
    """Where lines and tables go. Lines come from any thread.

    Attributes:
      is_broken: Nobody reads any more: the pipe behind standard output was closed.
    """

    is_broken: bool = False

    @abc.abstractmethod
    def line(self, task: Task, text: str) -> None:
        """Shows one line of a task's output."""

    def started(self, task: Task, number: int) -> None:  # noqa: B027
        """A task starts, for the first time (0) or again."""

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Shows what the launcher itself has to say."""

    @abc.abstractmethod
    def update(self, rows: Sequence[Row]) -> None:
        """Shows how the tasks are."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the display; what stands there stays."""


class PlainDisplay(Display):
    """Lines only.

    Args:
      tasks: All that will have lines.
      output: Gets the lines of the tasks.
      notes: Gets those of the launcher.
      is_coloured: Whether ``output`` understands colours.
    """

    def __init__(self, tasks: Sequence[Task], output: TextIO, notes: TextIO, *, is_coloured: bool = False):
        self.is_broken = False
        self._output, self._notes = output, notes
        self._prefixes = prefixes_of(tasks, is_coloured=is_coloured)
        self._lock = threading.Lock()

    def line(self, task: Task, text: str) -> None:
        self._write(self._output, f"{self._prefixes[task]}{text}\n")

    def note(self, text: str) -> None:
        self._write(self._notes, f"{text}\n")

    def _write(self, stream: TextIO, text: str) -> None:
        with self._lock:
            try:
                stream.write(text)
                stream.flush()
            except OSError:
                self.is_broken = True
            except UnicodeEncodeError:
                stream.write(text.encode("ascii", "backslashreplace").decode())
                stream.flush()

    def update(self, rows: Sequence[Row]) -> None:
        """Shows nothing: it would scroll away."""

    def close(self) -> None:
        pass


class TableDisplay(Display):
    """Lines that scroll above a table, on a terminal. Needs rich.

    Args:
      tasks: All that will have lines.
      output: The terminal.
    """

    def __init__(self, tasks: Sequence[Task], output: TextIO):
        self.is_broken = False
        self._text: Any = importlib.import_module("rich.text").Text
        self._table: Any = importlib.import_module("rich.table").Table
        self._tasks, self._prefixes = list(tasks), prefixes_of(tasks, is_coloured=True)
        console = importlib.import_module("rich.console").Console(file=output, highlight=False)
        self._live: Any = importlib.import_module("rich.live").Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def line(self, task: Task, text: str) -> None:
        self._print(self._text.from_ansi(self._prefixes[task] + text))

    def note(self, text: str) -> None:
        self._print(self._text(text, style="bold"))

    def _print(self, text: Any) -> None:
        try:
            self._live.console.print(text, soft_wrap=True)
        except OSError:
            self.is_broken = True

    def update(self, rows: Sequence[Row]) -> None:
        table = self._table(box=None, pad_edge=False)
        for number, column in enumerate(_COLUMNS):
            table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
        for row in rows:
            name, *others = row.cells
            coloured = self._text.from_ansi(_in_colour(name, self._tasks.index(row.task)))
            table.add_row(coloured, *map(self._text, others))
        with contextlib.suppress(OSError):
            self._live.update(table, refresh=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()


@final
class LoggedDisplay(Display):
    """Another display; besides, each task's lines go to a file of its own, all of them.

    A disk that is full is told once.

    Args:
      shown: The other display, which is closed with this one.
      folder: Of the files ``worker-0.log``, which are appended to.
      tasks: All that will have lines.
    """

    def __init__(self, shown: Display, folder: Path, tasks: Sequence[Task]):
        self._shown = shown
        self._files = {
            task: (folder / f"{task.type}-{task.index}.log").open("a", encoding="utf-8") for task in tasks
        }
        self._has_failed = False

    @property
    def is_broken(self) -> bool:
        return self._shown.is_broken

    def line(self, task: Task, text: str) -> None:
        self._shown.line(task, text)
        self._write(task, text)

    def started(self, task: Task, number: int) -> None:
        self._write(task, f"--- {task}, start {number + 1}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---")
        self._shown.started(task, number)

    def note(self, text: str) -> None:
        self._shown.note(text)

    def update(self, rows: Sequence[Row]) -> None:
        self._shown.update(rows)

    def close(self) -> None:
        self._shown.close()
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _write(self, task: Task, text: str) -> None:
        file = self._files[task]
        try:
            file.write(f"{text}\n")
            file.flush()
        except (OSError, ValueError) as error:
            if not self._has_failed:
                self._has_failed = True
                self._shown.note(
                    f"{file.name} cannot be written: {error}. Lines are missing there from now on."
                )


def make_display(
    tasks: Sequence[Task], output: TextIO, notes: TextIO, environment: Mapping[str, str], *, is_plain: bool
) -> Display:
    """The best display for where the output goes: a table needs a terminal that can move its cursor, and rich."""
    is_terminal = output.isatty() and environment.get("TERM") != "dumb"
    if is_terminal and not is_plain:
        with contextlib.suppress(ImportError):
            return TableDisplay(tasks, output)
    return PlainDisplay(tasks, output, notes, is_coloured=is_terminal and not environment.get("NO_COLOR"))


def prefixes_of(tasks: Sequence[Task], *, is_coloured: bool) -> dict[Task, str]:
    """``"worker 0    | "``, all of one width, and each with its own colour."""
    width = max(len(str(task)) for task in tasks)
    prefixes = [f"{task!s:{width}} | " for task in tasks]
    return {
        task: _in_colour(prefix, number) if is_coloured else prefix
        for number, (task, prefix) in enumerate(zip(tasks, prefixes, strict=True))
    }


def _in_colour(text: str, number: int) -> str:
    """A text in the colour of the task that has this place in the list of tasks."""
    return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
