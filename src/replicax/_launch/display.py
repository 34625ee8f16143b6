"""``Display``: shows the launcher's tasks as prefixed lines, and on a terminal with a live table below them."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TextIO, final

from replicax._launch.backlog import Backlog, ShownTask, WaitingLine
from replicax._launch.standard_streams import full_disk
from replicax._launch.terminal import DirectOutput, coloured, is_terminal, live_table, write_line
from replicax._src.cluster.processes import ProcessStartError
from replicax._src.cluster.spec import Task
from replicax._src.drawing.text import printable

# ANSI codes: cyan, yellow, magenta, green, blue, and three bright colours.
_COLOURS: Final = ("36", "33", "35", "32", "34", "96", "93", "95")
_BOLD: Final = "1"
_COLUMNS: Final = ("task", "state", "pid", "step", "steps/s", "memory", "restarts")
_NUM_TEXT_COLUMNS: Final = 2
# The time for which ``close`` waits until the last lines are shown.
_DRAIN_S: Final = 5.0


@dataclass(frozen=True)
class TaskRow:
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

    task: ShownTask
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


class TaskDisplay(Protocol):
    """What shows the tasks of one job: a ``Display``, or a part of it."""

    @property
    def is_full(self) -> bool: ...

    @property
    def is_broken(self) -> bool: ...

    def line(self, task: Task, text: str) -> None: ...

    def started(self, task: Task, number: int) -> None: ...

    def note(self, text: str) -> None: ...

    def update(self, rows: Sequence[TaskRow]) -> None: ...


@final
class Display:
    """Shows lines with the name of their task, above a live table if rich is installed and the output is a terminal.

    Any thread may call it, and no call waits, except ``close``: a thread of its own shows what the others add.

    Args:
      tasks: All tasks that will have lines.
      output: The stream for the lines of the tasks, and the table.
      notes: The stream for messages of the launcher.
      environment: Describes the terminal.
      is_plain: True for no table.
      log_dir: A folder for logs. Each task's lines are also appended to a file such as ``worker-0.log``. A full disk is
        reported once.

    Attributes:
      is_broken: True once the output cannot be written: the reader has closed the pipe, or the disk is full. Lines are
        then only logged.
      has_full_disk: True if the disk was the reason. A message has said so.

    Raises:
      OSError: A file in ``log_dir`` cannot be opened.
    """

    def __init__(
        self,
        tasks: Sequence[ShownTask],
        output: TextIO,
        notes: TextIO,
        environment: Mapping[str, str],
        *,
        is_plain: bool = False,
        log_dir: Path | None = None,
    ):
        self.is_broken = self.has_full_disk = False
        self._error: Exception | None = None
        self._output, self._notes = DirectOutput(output), DirectOutput(notes)
        self._has_log_failed = False
        self._logs: dict[ShownTask, TextIO] = {}
        if log_dir is not None:
            for task in tasks:
                path = log_dir / f"{str(task).replace(' ', '-')}.log"
                self._logs[task] = path.open("a", encoding="utf-8")
        self._table = None if is_plain else live_table(self._output, environment)
        has_colours = is_terminal(output, environment) and not environment.get("NO_COLOR")
        is_coloured = has_colours or self._table is not None
        self._codes = {
            task: _COLOURS[number % len(_COLOURS)] if is_coloured else "" for number, task in enumerate(tasks)
        }
        self._width = max(len(str(task)) for task in tasks)
        self._backlog, self._num_in_hand = Backlog(), 0
        self._rows: Sequence[TaskRow] | None = None
        self._thread = threading.Thread(target=self._run, name="replicax-display", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """True if many lines wait to be shown, because nobody reads them or they are too many."""
        return self._backlog.is_full

    def line(self, task: ShownTask, text: str) -> None:
        """Shows one line of a task's output."""
        self._backlog.add(WaitingLine(text, task))

    def started(self, task: ShownTask, number: int) -> None:
        """Logs the start of a task: 0 is the first start, other numbers are restarts."""
        heading = f"--- {task}, start {number + 1}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---"
        self._backlog.add(WaitingLine(heading, task, is_heading=True))

    def note(self, text: str) -> None:
        """Shows a message of the launcher."""
        self._backlog.add(WaitingLine(text))

    def update(self, rows: Sequence[TaskRow]) -> None:
        """Shows the states of the tasks in the table; does nothing without a table."""
        if self._table is not None:
            self._rows = rows
            self._backlog.wake()

    def close(self) -> None:
        """Ends the display, once all lines are shown, at the latest after 5 s. Its last content stays visible.

        Raises:
          Exception: A line could not be shown, for another reason than a closed stream.
        """
        self._backlog.close()
        self._thread.join(_DRAIN_S)
        unread = self._backlog.rest()
        if self._thread.is_alive():
            self._log(unread)
            self._note_unread(len(unread) + self._num_in_hand)
        for file in self._logs.values():
            with contextlib.suppress(OSError):
                file.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _note_unread(self, num_lines: int) -> None:
        """Says that lines are lost, if somebody reads that."""
        with contextlib.suppress(OSError, ValueError):
            if self._notes.may_write():
                self._notes.write(
                    f"Nobody has read the output for {_DRAIN_S:g} s. Up to {num_lines} of its last lines are not shown.\n"
                )

    # --- in the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (entries := self._backlog.take()) is not None:
            self._num_in_hand = len(entries)
            self._log(entries)
            if not self.is_broken:
                try:
                    self._show(entries)
                except OSError as error:
                    if full := full_disk(error):
                        self.has_full_disk = True
                        with contextlib.suppress(OSError, ValueError):  # it may be the stream of messages
                            self._notes.write(
                                f"replicax: the output cannot be written: {full}. Lines are missing, and the job ends.\n"
                            )
                    self.is_broken = True
                except Exception as error:  # otherwise this thread would end, and the tasks wait for it
                    self.is_broken, self._error = True, error
            self._num_in_hand = 0
        if self._table is not None:
            with contextlib.suppress(OSError):
                self._table.close()

    def _show(self, entries: Sequence[WaitingLine]) -> None:
        shown = [entry for entry in entries if not entry.is_heading]
        for is_note, group in itertools.groupby(shown, key=lambda entry: entry.task is None):
            lines = [self._shown(entry) for entry in group]
            if self._table is not None:
                self._table.print("\n".join(lines))
            else:
                (self._notes if is_note else self._output).write("".join(f"{line}\n" for line in lines))
        rows, self._rows = self._rows, None
        if self._table is not None and rows is not None:
            cells = [(coloured(str(row.task), self._codes[row.task]), *row.cells) for row in rows]
            self._table.draw((), _COLUMNS, cells, _NUM_TEXT_COLUMNS)

    def _shown(self, entry: WaitingLine) -> str:
        if entry.task is None:
            return entry.text if self._table is None else coloured(entry.text, _BOLD)
        return coloured(f"{entry.task!s:{self._width}} | ", self._codes[entry.task]) + entry.text

    def _log(self, entries: Sequence[WaitingLine]) -> None:
        for entry in entries if self._logs else ():
            file = None if entry.task is None else self._logs[entry.task]
            if file is not None:
                self._log_line(file, entry.text)

    def _log_line(self, file: TextIO, text: str) -> None:
        try:
            write_line(file, text)
        except (OSError, ValueError) as error:
            if not self._has_log_failed:
                self._has_log_failed = True
                self.note(f"{file.name} cannot be written: {error}. Lines are missing there from now on.")


@contextlib.contextmanager
def open_display(tasks: Sequence[ShownTask], options: argparse.Namespace) -> Iterator[Display]:
    """Returns the display of a command with its options, on the standard streams, for the time of the block.

    Raises:
      ProcessStartError: A log cannot be opened.
    """
    try:
        display = Display(
            tasks, sys.stdout, sys.stderr, os.environ, is_plain=options.plain, log_dir=options.log_dir
        )
    except OSError as error:
        raise ProcessStartError(
            f"The log file {error.filename} cannot be opened: {error.strerror}. Choose another --log-dir."
        ) from None
    with contextlib.closing(display):
        yield display


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
