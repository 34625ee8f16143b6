"""Detects SIGTERM in a thread within milliseconds, whatever the main thread does.

Python runs signal handlers in the main thread, between two bytecode instructions. A collective or the read of an array
delays them (by 7 s in a trial). The byte that Python writes to the wake-up descriptor arrives at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, final

from replicax._src.vocabulary.errors import ContextError

log = logging.getLogger("replicax")
_FROM_HANDLER = 0  # no signal has this number


@final
class _WakeUp:
    """Owns the descriptor, the handler and the thread of this process. All its methods run in the main thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._earlier_handler = signal.signal(signal.SIGTERM, self._handle)
        self._earlier_fd = -1
        self._earlier_file: tuple[int, int] | None = None
        self.tend()
        threading.Thread(target=self._read, name="replicax-sigterm", daemon=True).start()

    def tend(self) -> None:
        """Takes the wake-up descriptor back if other code, such as asyncio, has replaced it.

        The replaced descriptor still receives all signals.
        """
        found = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if found != self._writer.fileno():
            self._earlier_fd, self._earlier_file = found, _file_of(found)

    def close(self) -> None:
        """Restores the earlier descriptor and handler, unless other code has replaced ours."""
        found = signal.set_wakeup_fd(-1)
        is_ours = found == self._writer.fileno()
        back = self._earlier_fd if is_ours else found
        if back != -1 and (not is_ours or _file_of(back) == self._earlier_file):
            signal.set_wakeup_fd(back, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._earlier_handler or signal.SIG_DFL)
        self._writer.close()  # ends the thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Wakes the thread even if other code has the descriptor. Python calls it late, but always."""
        del frame
        if not _listeners:  # the last one left in another thread, which may not change handlers
            _wake_up.clear()
            self.close()
            os.kill(os.getpid(), number)
            return
        with contextlib.suppress(OSError):
            self._writer.send(bytes([_FROM_HANDLER]))

    def _read(self) -> None:
        with self._reader:
            while numbers := self._reader.recv(4096):
                for number in numbers:
                    if number != _FROM_HANDLER:
                        self._pass_on(number)
                    if number in (signal.SIGTERM, _FROM_HANDLER):
                        _tell_all()

    def _pass_on(self, number: int) -> None:
        """Passes a signal on to the earlier descriptor, if it is still the same file."""
        if self._earlier_fd != -1 and _file_of(self._earlier_fd) == self._earlier_file:
            with contextlib.suppress(OSError):
                os.write(self._earlier_fd, bytes([number]))


def _file_of(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


_lock = threading.RLock()
_listeners: dict[object, Callable[[], Any]] = {}
_wake_up: list[_WakeUp] = []


def _forget() -> None:
    """Removes all listeners in a forked child, such as a data loader: its SIGTERM must not count as the parent's."""
    global _lock
    _lock = threading.RLock()  # another thread may have held it
    _listeners.clear()
    while _wake_up:
        with contextlib.suppress(ValueError, OSError):
            _wake_up.pop().close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)


def _tell_all() -> None:
    with _lock:
        listeners = list(_listeners.values())
    for listener in listeners:
        try:
            listener()
        except Exception:
            log.exception("A SIGTERM listener failed.")


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def tend() -> None:
    """Keeps SIGTERM watched. Call it regularly while there are listeners; it takes a microsecond."""
    if _wake_up and _is_main_thread():
        _wake_up[0].tend()


def listen(on_sigterm: Callable[[], Any]) -> object:
    """Makes SIGTERM call ``on_sigterm`` in a thread instead of ending this process.

    Returns:
      The token to pass to ``ignore``.

    Raises:
      ContextError: This is not the main thread, the only one that may change signal handlers.
    """
    with _lock:
        if not _wake_up:
            if not _is_main_thread():
                raise ContextError(
                    f"SIGTERM can only be watched from the main thread; this is {threading.current_thread().name!r}. Create "
                    "the PreemptionCheckpointHandler or PreemptionWatcher there, or pass a handler "
                    "TerminationConfig(termination_watcher_fn=...)."
                )
            _wake_up.append(_WakeUp())
        token = object()
        _listeners[token] = on_sigterm
        return token


def ignore(token: object) -> None:
    """Removes the listener that ``listen`` added.

    Without listeners, SIGTERM has its former effect again. Call it in the main thread.
    """
    with _lock:
        _listeners.pop(token, None)
        if not _listeners and _wake_up and _is_main_thread():
            _wake_up.pop().close()
