"""Says what takes long: one line on standard error after two seconds, and one when it is done. No percentages, no bars.

Work is told of where a program is traced and called for the first time, so that later calls do not come here.
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

VARIABLE: Final = "REPLICAX_PROGRESS"
SILENT_S: Final = 2.0
"""How long something may take before a line says what it is."""


class _Thread(threading.local):
    is_working = False


_here = _Thread()


def compiling(name: str, num_replicas: int | None) -> contextlib.AbstractContextManager[None]:
    """Around the tracing and the first call of a program.

    Args:
      name: Of the function.
      num_replicas: None if that is not known yet.
    """
    what = name.rpartition("<locals>.")[2]
    if num_replicas is not None:
        what += f" for {num_replicas:,} replica{'s' * (num_replicas != 1)}"
    return working(f"compiling {what}", f"compiled {what}")


@contextlib.contextmanager
def working(doing: str, done: str | None) -> Iterator[None]:
    """Around work that may take long. Of work inside work only the outer one is told of.

    A thread waits for the two seconds to pass; it ends with the work. If the work raises, nothing more is said.

    Args:
      doing: "compiling step for 2 replicas".
      done: "compiled step for 2 replicas", which the time follows; None: no line at the end.
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
    """The lines of one piece of work."""

    def __init__(self, doing: str):
        self._doing = doing
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._is_over = self._is_told = False
        self._timer = threading.Timer(SILENT_S, self._tell)
        self._timer.name, self._timer.daemon = "replicax progress", True
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, or has too many threads
            self._timer.start()

    def _tell(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_told = say(f"{self._doing} …")

    def end(self, done: str | None) -> None:
        """Ends the thread; tells how long it took if anything has been told."""
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._is_told and done is not None:
                say(f"{done} in {time.monotonic() - self._start:.1f} s.")


def say(text: str) -> bool:
    """Writes a line on standard error if this process is the chief of its job. Returns whether it did.

    ``REPLICAX_PROGRESS=0`` silences it, as does a level above INFO that somebody has set for the logger "replicax".
    """
    stream = sys.stderr
    if stream is None or not _speaks():
        return False
    with contextlib.suppress(Exception):  # a closed pipe, or an object of the user's that can only write
        stream.write(f"{_fresh_line(stream)}replicax: {text}\n")
        stream.flush()
    return True


def _speaks() -> bool:
    if os.environ.get(VARIABLE) == "0" or logging.getLogger("replicax").level > logging.INFO:
        return False
    try:
        return is_chief()
    except ClusterError:  # which the strategy will raise
        return True


def _fresh_line(stream: TextIO) -> str:
    """What moves a terminal's cursor to an empty line, and nothing where it is on one.

    Progress bars (Keras, tqdm) leave the cursor behind an unfinished line and draw that again from its start. As many
    spaces as the terminal is wide end on the same line only if they began at its first column: as zsh does it before
    its prompt.
    """
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return ""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return "\n"
    return " " * width + "\r"
