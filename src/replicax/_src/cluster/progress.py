"""Reports slow work: one line on standard error after two seconds, and one at the end. No percentages, no bars.

Only the trace and the first call of a program report; later calls do not enter this file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final, TextIO, final

from replicax._src.cluster.chief import is_chief
from replicax._src.cluster.errors import ClusterError
from replicax._src.drawing.text import printable

VARIABLE: Final = "REPLICAX_PROGRESS"
SILENT_S: Final = 2.0
"""The time that work may take before a line reports it."""


class _Thread(threading.local):
    is_working = False


_here = _Thread()


def compiling(
    name: str, num_replicas: int | None, again: str = ""
) -> contextlib.AbstractContextManager[None]:
    """Reports the tracing and the first call of a program, which run in the block.

    Args:
      name: The name of the function.
      num_replicas: The number of replicas; None if it is not known yet.
      again: The reason, if the function was compiled before: "for a smaller batch, 4 rows after 16".
    """
    what = name.rpartition("<locals>.")[2]
    if num_replicas is not None:
        what += f" for {num_replicas:,} replica{'s' * (num_replicas != 1)}"
    return working(f"compiling {what}{again and f' again, {again}'}", f"compiled {what}")


def batch_of_other_size(rows: int, rows_before: int) -> str:
    """Returns the reason to compile again for another number of rows; empty if they are equal."""
    if rows == rows_before:
        return ""
    return f"for a {'smaller' if rows < rows_before else 'larger'} batch, {rows:,} rows after {rows_before:,}"


@contextlib.contextmanager
def working(doing: str, done: str | None) -> Iterator[None]:
    """Reports slow work in the block. In nested blocks only the outermost reports.

    A thread waits for two seconds, and ends with the work. If the work raises, there is no line at the end.

    Args:
      doing: "compiling step for 2 replicas".
      done: "compiled step for 2 replicas"; the line ends with the time. None: no line at the end.
    """
    if _here.is_working:
        yield
        return
    notice = _Notice(doing)
    _here.is_working = True
    try:
        yield
    except BaseException:
        notice.end(None)
        raise
    else:
        notice.end(done)
    finally:
        _here.is_working = False


@final
class _Notice:
    """Writes the lines of one piece of work."""

    def __init__(self, doing: str):
        self._doing = doing
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._is_over = self._is_told = False
        self._timer = threading.Timer(SILENT_S, self._tell)
        self._timer.name, self._timer.daemon = "replicax progress", True
        with contextlib.suppress(RuntimeError):  # Python is exiting, or has too many threads
            self._timer.start()

    def _tell(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_told = say(f"{self._doing} …")

    def end(self, done: str | None) -> None:
        """Ends the thread. Writes the duration if the first line was written."""
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._is_told and done is not None:
                say(f"{done} in {time.monotonic() - self._start:.1f} s.")


def say(text: str) -> bool:
    """Writes a line on standard error if this process is the chief of its job. Returns True if it has.

    ``REPLICAX_PROGRESS=0`` silences it, and so does a level above INFO of the logger "replicax".
    """
    stream, text = sys.stderr, printable(text)
    if stream is None or not _speaks():
        return False
    with contextlib.suppress(Exception):  # a closed pipe, or a user's object that only has `write`
        stream.write(f"{_fresh_line(stream)}replicax: {text}\n")
        stream.flush()
    return True


def _speaks() -> bool:
    if os.environ.get(VARIABLE) == "0" or logging.getLogger("replicax").level > logging.INFO:
        return False
    try:
        return is_chief()
    except ClusterError:  # the strategy will raise it
        return True


def _fresh_line(stream: TextIO) -> str:
    """Returns the text that moves a terminal's cursor to an empty line, if it is not on one.

    Progress bars (Keras, tqdm) leave the cursor at the end of an unfinished line and later redraw that line. The text
    has as many spaces as the terminal is wide. They stay on one line only if the cursor was in the first column. zsh
    uses the same method before its prompt.
    """
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return ""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return "\n"
    return " " * width + "\r"
