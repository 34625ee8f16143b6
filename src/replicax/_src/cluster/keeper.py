"""Run as a script between a process and a command that it starts: the command, and all that it starts, end with it.

``keeper.py PARENT_PID REPORT_FD FOLDER COMMAND...`` runs COMMAND in a session of its own. It writes ``started PID`` or
``failed REASON``, and later ``exited CODE TIME`` or ``killed SIGNAL TIME``, to REPORT_FD. When its standard input is
closed, or its parent is gone (``kill -9`` included), it kills what is left, removes FOLDER with the files in it (if it
is not an empty text), and exits. On Linux nothing can escape:
orphans of the command become children of this process, and the command dies if this process is killed. Elsewhere
what has left the command's process group does escape. Standard library only: it starts in 10 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

_IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_MS = 250
_SWEEP_TIMEOUT_S = 5.0
_SWEEP_PAUSE_S = 0.005
# What the parent gets when it is to end; it says itself what shall become of the command.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Ignored here or by Python; a command starts with none ignored.
_RESTORED = (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)


def main() -> None:
    parent, report, folder, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    os.set_inheritable(report, False)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    control, wake = os.dup(0), _wake_at_child_signals()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    pid = _start(command, report)
    has_ended = _keep(pid, parent, control, wake, report)
    _sweep(pid, report, has_ended)
    if folder:
        _remove(folder)


def _start(command: list[str], report: int) -> int:
    keeper = os.getpid()
    failure, has_failed = os.pipe()  # closed by exec
    pid = os.fork()
    if pid == 0:
        try:
            _become(command, keeper)
        except OSError as error:
            os.write(has_failed, f"{error.strerror}: {error.filename or command[0]!r}".encode())
        finally:
            os._exit(127)
    os.close(has_failed)
    reason = os.read(failure, 4096)
    if reason:
        os.waitpid(pid, 0)
        _tell(report, f"failed {reason.decode()}")
        sys.exit(1)
    _tell(report, f"started {pid}")
    return pid


def _become(command: list[str], keeper: int) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in _RESTORED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it died before prctl
        os._exit(127)
    os.execvp(command[0], command)


def _keep(pid: int, parent: int, control: int, wake: int, report: int) -> bool:
    """Waits until the parent closes the control pipe or is gone; whether the command has ended by then."""
    poller = select.poll()
    for descriptor in (control, wake):
        poller.register(descriptor, select.POLLIN)
    has_ended = False
    while os.getppid() == parent:  # another child of the parent's may hold the pipe open
        has_ended = has_ended or _tell_if_ended(pid, report)
        ready = dict(poller.poll(_POLL_MS))
        if control in ready:
            break
        if wake in ready:
            os.read(wake, 4096)
    return has_ended


def _tell_if_ended(pid: int, report: int) -> bool:
    ending = _ending(pid)
    if ending is not None:
        _tell(report, f"{ending} {time.monotonic()}")
    return ending is not None


def _ending(pid: int) -> str | None:
    """How the command ended; on Linux it stays a zombie, so that its number cannot become another process's."""
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


def _sweep(pid: int, report: int, has_ended: bool) -> None:
    """Kills the command's group, and whatever of its descendants are left."""
    deadline = time.monotonic() + _SWEEP_TIMEOUT_S
    if _IS_LINUX or not has_ended:
        with contextlib.suppress(OSError):  # nobody is left in it
            os.killpg(pid, signal.SIGKILL)
    while not has_ended and time.monotonic() < deadline:
        has_ended = _tell_if_ended(pid, report)
        time.sleep(0 if has_ended else _SWEEP_PAUSE_S)
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            os.kill(child, signal.SIGKILL)  # not reaped yet, so it is there
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            if not _children():
                return
        time.sleep(_SWEEP_PAUSE_S)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):  # its maker may have removed it
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _children() -> list[int]:
    """This process's children, which after a death are also its descendants; Linux only, else none."""
    if not _IS_LINUX:
        return []
    found, here = [], str(os.getpid())
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as stat:
                    fields = stat.read().decode(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            if fields[1] == here:
                found.append(int(entry))
    return found


def _wake_at_child_signals() -> int:
    """A descriptor that becomes readable when a child ends."""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return wake


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _tell(report: int, line: str) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        os.write(report, f"{line}\n".encode())


if __name__ == "__main__":
    main()
