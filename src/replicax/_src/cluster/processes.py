"""``Process``: a watched command for one task on this machine, which ends with this process.

POSIX only. A process guard, ``process_guard.py``, starts each command and ends when either side ends.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from replicax._src.vocabulary.errors import ReplicaxError

_GUARD: Final = str(Path(__file__).with_name("process_guard.py"))
_START_TIMEOUT_S: Final = 60.0  # a process guard takes 30 ms on an idle machine
_CLOSE_TIMEOUT_S: Final = 10.0
_MAX_LINE_BYTES: Final = 1 << 16
# The pauses between two calls of ``is_held`` while output is held.
_SHORTEST_HOLD_S: Final = 0.001
_LONGEST_HOLD_S: Final = 0.1
_LINE_END: Final = re.compile(rb"(\r\n|\n|\r(?!\Z))")


class ProcessStartError(ReplicaxError, RuntimeError):
    """The process of a task could not be started."""


class ProcessTimeoutError(ReplicaxError, TimeoutError):
    """The process of a task did not end in time, or did not write the expected output in time."""


@dataclass(frozen=True)
class Ending:
    """The end of a process: it exited with ``code``, or ``signal`` killed it. The other one is None.

    Attributes:
      code: The exit code.
      signal: The number of the signal.
      time: The time of the end on the clock of ``time.monotonic``, which all processes of a machine share.
    """

    code: int | None
    signal: int | None
    time: float

    @property
    def is_success(self) -> bool:
        return self.code == 0

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: the code, or 128 plus the signal."""
        return 128 + self.signal if self.signal is not None else self.code or 0

    def __str__(self) -> str:
        if self.signal is None:
            return f"exited with code {self.code}"
        return f"was killed by {signal_name(self.signal)}"


class Process:
    """A command that runs as a process in its own session. The constructor starts it.

    It ends at ``close``, or with this process, even if ``kill -9`` kills this process. All processes that it has
    started end with it, on Linux without exception. Its number stays reserved until ``close``, so that no signal can
    reach another process. It does not read this process's standard input. Any thread may call the methods.

    Args:
      command: The program and its arguments.
      environment: All its variables; None: those of this process.
      name: Its name in messages: ``"worker 0"``.
      directory: Its working directory; None: that of this process.
      own_folder: A folder with files only for this command. It is removed at ``close``, or when this process ends.
      num_lines_kept: The number of its last lines in ``lines``.
      on_line: Called in a separate thread with each line of its output, standard error included. If it raises, it is
        not called again, and ``wait`` or ``close`` raises the error. While it runs, no end is noticed.
      is_held: Called in that thread. While it returns True, no output is read, so that the command has to wait once
        its pipe is full. The end of the command is noticed at once, and what the pipe held then is read.
      on_end: Called in that thread when the command has ended and ``ending`` is set.

    Raises:
      ProcessStartError: The program or directory does not exist, or no process could be created.
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
        is_held: Callable[[], bool] = lambda: False,
        on_end: Callable[[], None] = lambda: None,
    ):
        self.name = name
        self._on_line, self._is_held, self._on_end = on_line, is_held, on_end
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
        self._control, of_guard = socket.socketpair()
        with of_guard:
            try:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), self._own_folder, *command],
                    stdin=of_guard.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=None if environment is None else dict(environment),
                    cwd=directory,
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                self._control.close()
                self._remove_folder()
                raise ProcessStartError(f"{name} could not be started: {error}.") from error
        self._thread = threading.Thread(target=self._watch, name=f"replicax-{name}", daemon=True)
        self._thread.start()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._has_started.wait(_START_TIMEOUT_S)
            if not self.pid:
                raise ProcessStartError(f"{name} could not be started: {self._start_failure}.")
            undo.pop_all()

    @property
    def ending(self) -> Ending | None:
        """The way in which it ended; None while it runs. ``lines`` is then complete."""
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
        """Kills it at once, as ``kill -9`` does. Processes that it has started continue until ``close``."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._send(signal.SIGTERM)

    def stop(self) -> None:
        """Sends SIGSTOP, which halts it until ``resume``."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Sends SIGCONT, which lets it continue."""
        self._send(signal.SIGCONT)

    def kill_group(self) -> None:
        """Kills what has remained of its process group after its end. Processes in sessions of their own continue until
        ``close``. On Linux only, where its number stays reserved.
        """
        with self._lock:
            if self._ending is not None and not self._is_closed and sys.platform == "linux":
                with contextlib.suppress(OSError):  # the group is empty
                    os.killpg(self.pid, signal.SIGKILL)

    def _send(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        with self._lock:
            if self._ending is None and not self._is_closed:
                with contextlib.suppress(ProcessLookupError):  # on systems where an ended process disappears
                    os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> Ending:
        """Waits until it has ended.

        Raises:
          ProcessTimeoutError: It has not ended within ``timeout_s``. It keeps running.
        """
        if not self._has_ended.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            raise ProcessTimeoutError(
                f"{self.name} (pid {self.pid}) still runs after {timeout_s:g} s.{shown_lines(self.lines)}"
            )
        self._raise_error()
        assert self._ending is not None
        return self._ending

    def close(self) -> None:
        """Kills it and all processes that it has started, and waits until they are gone (5 ms; at most 10 s)."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.suppress(OSError):  # the guard has ended
            self._control.shutdown(
                socket.SHUT_WR
            )  # closing is not enough: a fork of this process may keep it open
        try:
            self._guard.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait(_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._remove_folder()
        self._raise_error()

    def _remove_folder(self) -> None:
        if self._own_folder:  # the guard removes it, unless it was killed or did not start the command
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def statistics(self) -> dict[str, Any]:
        """Returns its number, the number of lines that it has written, and the number that is kept."""
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

    def _watch(self) -> None:
        """Reads the output of the command and the reports of its guard, until the guard has ended."""
        output, cutter, reports = self._guard.stdout, _Cutter(), b""
        assert output is not None
        os.set_blocking(output.fileno(), False)
        hold_s = _SHORTEST_HOLD_S
        with selectors.DefaultSelector() as selector, output, self._control as control:
            selector.register(control, selectors.EVENT_READ)
            is_open, is_read = True, False
            while True:
                if is_read != (is_open and not self._is_held()):
                    is_read = not is_read
                    if is_read:
                        selector.register(output, selectors.EVENT_READ)
                    else:
                        selector.unregister(output)
                hold_s = _SHORTEST_HOLD_S if is_read else min(2 * hold_s, _LONGEST_HOLD_S)
                ready = [
                    key.fileobj for key, _ in selector.select(hold_s if is_open and not is_read else None)
                ]
                if output in ready:
                    is_open = self._take(output, cutter, _MAX_LINE_BYTES) != b""
                if control in ready:
                    received = control.recv(4096)
                    *lines, reports = (reports + received).split(b"\n")
                    for line in lines:
                        self._reported(line.decode(), output, cutter)
                    if not received:
                        break
            if self.pid and self._ending is None:  # the guard was killed, and the command with it
                self._reported(f"killed {signal.SIGKILL:d} {time.monotonic()}", output, cutter)
        self._has_started.set()

    def _reported(self, report: str, output: IO[bytes], cutter: _Cutter) -> None:
        """Takes a line of the guard."""
        word, _, rest = report.partition(" ")
        if word == "failed":
            self._start_failure = rest
        elif word == "started":
            self.pid = int(rest)
            self._has_started.set()
        else:
            self._take_held(output, cutter)
            self._deliver(cutter.rest())
            number, ended_at = rest.split()
            code, killer = (int(number), None) if word == "exited" else (None, int(number))
            with self._lock:
                self._ending = Ending(code, killer, float(ended_at))
            self._has_ended.set()
            self._on_end()

    def _take(self, output: IO[bytes], cutter: _Cutter, most_bytes: int) -> bytes | None:
        """Reads some output. Returns b"" at its end, and None if there is none now."""
        read = output.read(most_bytes)
        if read is not None:
            self._deliver(cutter.cut(read) if read else cutter.rest())
        return read

    def _take_held(self, output: IO[bytes], cutter: _Cutter) -> None:
        """Reads what the pipe holds now, and not what a process that outlives the command goes on to write."""
        left = int.from_bytes(fcntl.ioctl(output, termios.FIONREAD, bytes(4)), sys.byteorder)
        while left > 0 and (read := self._take(output, cutter, min(left, _MAX_LINE_BYTES))):
            left -= len(read)

    def _deliver(self, lines: Sequence[str]) -> None:
        for line in lines:
            with self._lock:
                self._lines.append(line)
                self._num_lines += 1
            if self._on_line is not None:
                try:
                    self._on_line(line)
                except BaseException as error:  # wait or close raises it; the output must still be read
                    self._error, self._on_line = error, None


class _Cutter:
    """Cuts a stream of bytes into lines. A lone carriage return, of a progress bar, ends a line too."""

    def __init__(self) -> None:
        self._held = b""

    def cut(self, received: bytes) -> list[str]:
        """Returns the lines that ``received`` completes."""
        *parts, self._held = _LINE_END.split(self._held + received)  # line, its end, line, its end, the rest
        lines = [line for line, end in zip(parts[::2], parts[1::2], strict=True) if line or end != b"\r"]
        if len(self._held) > _MAX_LINE_BYTES:
            lines.append(self._held)
            self._held = b""
        return [line.decode(errors="replace") for line in lines]

    def rest(self) -> list[str]:
        """Returns the text after the last line end, at the end of the stream."""
        rest, self._held = self._held.removesuffix(b"\r"), b""
        return [rest.decode(errors="replace")] if rest else []


def signal_name(number: int) -> str:
    """Returns the name of a signal: ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shown_lines(lines: Sequence[str], num_lines: int = 10) -> str:
    """Returns the last lines of an output as the end of a message."""
    if not lines:
        return " It has written nothing."
    return " Its last lines:\n" + "\n".join(f"    {line}" for line in lines[-num_lines:])


def resident_bytes(pid: int) -> int | None:
    """Returns the resident memory of a process (RSS); None if it has ended, or if /proc does not report it."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _page_bytes()
    except (OSError, ValueError, IndexError):
        return None


@functools.cache
def _page_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE")
