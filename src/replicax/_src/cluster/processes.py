"""``Process``: a command that runs on this machine for one task, watched, and gone when this process is.

POSIX only. Each is started by a small process of its own, ``process_guard.py``, which outlives neither side.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replicax._src.errors import ReplicaxError

_GUARD: Final = str(Path(__file__).with_name("process_guard.py"))
_START_TIMEOUT_S: Final = 60.0  # a guard takes 30 ms, if the machine is not busy
_CLOSE_TIMEOUT_S: Final = 10.0
_MAX_LINE_BYTES: Final = 1 << 16
_MAX_REPORT_BYTES: Final = 1 << 12


class ProcessStartError(ReplicaxError, RuntimeError):
    """The process of a task could not be started."""


class ProcessTimeoutError(ReplicaxError, TimeoutError):
    """The process of a task did not end, or did not say what was waited for, in time."""


@dataclass(frozen=True)
class Ending:
    """How a process ended: it exited by itself with ``code``, or ``signal`` killed it; the other is None.

    Attributes:
      code: What it exited with.
      signal: The number of the signal.
      time: When, in seconds of ``time.monotonic``, which all processes of a machine share.
    """

    code: int | None
    signal: int | None
    time: float

    @property
    def is_success(self) -> bool:
        return self.code == 0

    @property
    def exit_code(self) -> int:
        """What a shell would say: the code, or 128 and the signal."""
        return 128 + self.signal if self.signal is not None else self.code or 0

    def __str__(self) -> str:
        if self.signal is None:
            return f"exited with code {self.code}"
        return f"was killed by {signal_name(self.signal)}"


class Process:
    """A command that runs as a process in a session of its own. It is running when this has been made.

    It ends with this process, also if that is killed by ``kill -9``; ``close`` ends it too. So do all processes that
    it has started, on Linux without exception. Until ``close`` it keeps its number, so that no signal can reach
    another process. Nothing is read from this process's standard input. From any thread.

    Args:
      command: The program and its arguments.
      environment: All its variables; None: this process's.
      name: What messages call it: ``"worker 0"``.
      directory: Where it runs; None: where this process does.
      own_folder: A folder of files that are only for it. It is removed when it is closed, or when this process ends.
      num_lines_kept: How many of its last lines ``lines`` has.
      on_line: Called with each line of its output, standard error included, in a thread of its own. If it raises,
        it is not called any more, and ``wait`` or ``close`` raises that.
      on_end: Called in that thread when it has ended, and ``ending`` says how.

    Raises:
      ProcessStartError: There is no such program or directory, or no process could be made.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        name: str = "process",
        directory: str | os.PathLike[str] | None = None,
        own_folder: str | os.PathLike[str] = "",
        num_lines_kept: int = 1000,
        on_line: Callable[[str], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ):
        self.name = name
        self._on_line, self._on_end = on_line, on_end
        self._own_folder = os.fspath(own_folder)
        self._error: BaseException | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=num_lines_kept)
        self._num_lines = 0
        self._lock = threading.RLock()
        self._is_closed = False
        self._ending: Ending | None = None
        self._has_started, self._has_ended = threading.Event(), threading.Event()
        self._start_failure = "its guard did not answer"
        self.pid = 0
        mark = secrets.token_hex(8)  # before what the guard says, in the output of the command
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), self._own_folder, mark, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                cwd=directory,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._remove_folder()
            raise ProcessStartError(f"{name} could not be started: {error}.") from error
        self._thread = threading.Thread(
            target=self._read, args=(mark.encode(),), name=f"replicax-{name}", daemon=True
        )
        self._thread.start()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._has_started.wait(_START_TIMEOUT_S)
            if not self.pid:
                raise ProcessStartError(f"{name} could not be started: {self._start_failure}.")
            undo.pop_all()

    @property
    def ending(self) -> Ending | None:
        """How it ended; None while it runs. All that it has written until then is in ``lines``."""
        return self._ending

    @property
    def is_running(self) -> bool:
        return self._ending is None

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines of its output, without line ends."""
        with self._lock:
            return tuple(self._lines)

    def kill(self) -> None:
        """Ends it at once, as ``kill -9`` does. What it has started goes on until ``close``."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Asks it to end: SIGTERM."""
        self._send(signal.SIGTERM)

    def stop(self) -> None:
        """Halts it, until ``resume``: SIGSTOP."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on: SIGCONT."""
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        """Sends a signal; of a process that has ended nothing is asked."""
        with self._lock:
            if self._ending is None and not self._is_closed:
                with contextlib.suppress(ProcessLookupError):  # where an ended process is not kept
                    os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> Ending:
        """Waits until it has ended.

        Raises:
          ProcessTimeoutError: It has not within ``timeout_s``. It goes on running.
        """
        if not self._has_ended.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            raise ProcessTimeoutError(
                f"{self.name} (pid {self.pid}) still runs after {timeout_s:g} s.{shown_lines(self.lines)}"
            )
        self._raise_error()
        assert self._ending is not None
        return self._ending

    def close(self) -> None:
        """Kills it and all that it has started, if they run, and waits until they are gone (5 ms; at most 10 s)."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError), self._guard.stdin as stdin:  # the guard may have ended
            stdin.write(b"\n")  # closing it is not enough: a fork of this process may hold it
        try:
            self._guard.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait(_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._remove_folder()
        self._raise_error()

    def _remove_folder(self) -> None:
        if self._own_folder:  # the guard has removed it, unless it was killed or has started nothing
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def statistics(self) -> dict[str, Any]:
        """Its number, how many lines it has written, and how many of them are kept."""
        with self._lock:
            return {"pid": self.pid, "num_lines": self._num_lines, "num_lines_kept": len(self._lines)}

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    # --- in the thread ------------------------------------------------------------------------------------

    def _read(self, mark: bytes) -> None:
        """Reads lines, and between them what the guard says, until the guard has ended."""
        output, held, is_over = self._guard.stdout, b"", False
        line_end = re.compile(rb"(\r\n|\n|\r(?!\Z)|" + mark + rb"[^\n]*\n)")  # a lone \r is of a progress bar
        assert output is not None
        with output:
            while not is_over and (piece := output.read(_MAX_LINE_BYTES)):
                *parts, held = line_end.split(held + piece)  # line, its end, line, its end, the rest
                for line, end in zip(parts[::2], parts[1::2], strict=True):
                    if line or end in (b"\n", b"\r\n"):
                        self._deliver(line)
                    if end.startswith(mark):
                        is_over = self._is_last(end.removeprefix(mark).decode())
                if len(held) > _MAX_LINE_BYTES:
                    self._deliver(held[:-_MAX_REPORT_BYTES])
                    held = held[-_MAX_REPORT_BYTES:]
        if rest := held.removesuffix(b"\r"):
            self._deliver(rest)
        if self.pid and self._ending is None:  # the guard was killed, and the command with it
            self._note_end(None, signal.SIGKILL, time.monotonic())
        self._has_started.set()

    def _is_last(self, report: str) -> bool:
        """Takes a line of the guard; returns True if none follows."""
        word, _, rest = report.strip().partition(" ")
        if word == "failed":
            self._start_failure = rest
        elif word == "started":
            self.pid = int(rest)
            self._has_started.set()
        elif word in ("exited", "killed"):
            number, ended_at = rest.split()
            code, killer = (int(number), None) if word == "exited" else (None, int(number))
            self._note_end(code, killer, float(ended_at))
        return word == "gone"

    def _note_end(self, code: int | None, killer: int | None, ended_at: float) -> None:
        with self._lock:
            self._ending = Ending(code, killer, ended_at)
        self._has_ended.set()
        self._on_end()

    def _deliver(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        with self._lock:
            self._lines.append(text)
            self._num_lines += 1
        if self._on_line is not None:
            try:
                self._on_line(text)
            except BaseException as error:  # wait or close raises it; the output must be read all the same
                self._error, self._on_line = error, None


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shown_lines(lines: Sequence[str], num_lines: int = 10) -> str:
    """The last lines of some output as the end of a message."""
    if not lines:
        return " It has written nothing."
    return " Its last lines:\n" + "\n".join(f"    {line}" for line in lines[-num_lines:])


def resident_bytes(pid: int) -> int | None:
    """The memory of a process that is in RAM, RSS; None if it has ended, or where /proc does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _page_bytes()
    except (OSError, ValueError, IndexError):
        return None


@functools.cache
def _page_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE")
