"""The process guard: a script that runs a command for a parent process, and ends it and its children with the parent.

``process_guard.py PARENT_PID FOLDER COMMAND...`` runs COMMAND in its own session. Its standard input is a socket of the
parent. The guard writes ``started PID`` or ``failed REASON`` to it, and later ``exited CODE TIME`` or ``killed SIGNAL
TIME``. When the parent closes the socket, or is gone (``kill -9`` included), the guard kills all remaining processes,
removes FOLDER and its files (unless FOLDER is an empty string), and exits. On Linux no process can escape: orphans of
the command become children of the guard, and the command dies if the guard is killed. On other systems a process that
leaves the command's process group escapes. The script uses only the standard library, so that it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

_IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CONTROL = 0  # the socket
_POLL_MS = 250
_SWEEP_TIMEOUT_S = 5.0
_SWEEP_PAUSE_S = 0.005
# The parent gets these signals too, and decides whether the command ends.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    parent, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    wake, guard = _wake_at_child_signals(), os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prepare_command(guard),
        )
    except OSError as error:
        _tell(f"failed {error.strerror}: {error.filename!r}")
        return
    _tell(f"started {started.pid}")
    _sweep(started.pid, _watch(started.pid, parent, wake))
    if folder:
        _remove(folder)
    os._exit(0)  # otherwise Popen would try to find the command again


def _prepare_command(guard: int) -> None:
    """Prepares the command's process before the command runs: restores signals, and makes it die with the guard."""
    for number in (*_IGNORED, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # the guard died before prctl
        os._exit(127)


def _watch(pid: int, parent: int, wake: int) -> bool:
    """Waits until the parent closes the socket or is gone. Returns True if the command has ended by then."""
    poller = select.poll()
    for descriptor in (_CONTROL, wake):
        poller.register(descriptor, select.POLLIN)
    has_ended = False
    while os.getppid() == parent:
        has_ended = has_ended or _tell_if_ended(pid)
        ready = dict(poller.poll(_POLL_MS))
        if _CONTROL in ready:
            break
        if wake in ready:
            os.read(wake, 4096)
    return has_ended


def _tell_if_ended(pid: int) -> bool:
    """Returns True if the command has ended, and tells the parent."""
    ending = _ending(pid)
    if ending is not None:
        _tell(f"{ending} {time.monotonic()}")
    return ending is not None


def _ending(pid: int) -> str | None:
    """Returns how the command ended; None while it runs. On Linux it stays a zombie, so its number is not reused."""
    if _IS_LINUX:
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return f"{'exited' if seen.si_code == os.CLD_EXITED else 'killed'} {seen.si_status}"
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        return None
    code = os.waitstatus_to_exitcode(status)
    return f"exited {code}" if code >= 0 else f"killed {-code}"


def _sweep(pid: int, has_ended: bool) -> None:
    """Kills the command's process group and all remaining descendants."""
    deadline = time.monotonic() + _SWEEP_TIMEOUT_S
    if _IS_LINUX or not has_ended:
        with contextlib.suppress(OSError):  # the group is empty
            os.killpg(pid, signal.SIGKILL)
    while not has_ended and time.monotonic() < deadline:
        has_ended = _tell_if_ended(pid)
        time.sleep(0 if has_ended else _SWEEP_PAUSE_S)
    _sweep_children(deadline)


def _sweep_children(deadline: float) -> None:
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            os.kill(child, signal.SIGKILL)  # not reaped yet, so it still exists
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            if not _children():
                return
        time.sleep(_SWEEP_PAUSE_S)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):  # the parent may have removed it
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _children() -> list[int]:
    """Returns this process's children, which include orphaned descendants. Returns none on systems other than Linux."""
    if not _IS_LINUX:
        return []
    found, here = [], str(os.getpid())
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:  # it may end meanwhile
            if stat.read().decode(errors="replace").rpartition(")")[2].split()[1] == here:
                found.append(int(entry))
    return found


def _wake_at_child_signals() -> int:
    """Returns a descriptor that becomes readable when a child ends."""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return wake


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        os.write(_CONTROL, f"{line}\n".encode())


if __name__ == "__main__":
    main()
