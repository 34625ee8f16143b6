"""One thing at a time done in a thread; what goes wrong there is raised at the next call."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, final

from replicax._src.checkpoint.errors import CheckpointError

log = logging.getLogger("replicax")

_busy: weakref.WeakSet[Background] = weakref.WeakSet()


@final
class Background:
    """Runs one task at a time. Python waits for it when it ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, task: Callable[[], Any]) -> None:
        """Runs a task, once the one before has ended.

        Raises:
          CheckpointError: That one has failed.
        """
        self.wait()
        _finish_at_exit()
        _busy.add(self)
        self._thread = threading.Thread(target=self._run, args=(task,), name="replicax-checkpoint")
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until nothing runs.

        Raises:
          CheckpointError: What ran has failed; raised once.
          TimeoutError: It still runs.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"A checkpoint is still being written after {timeout_s} s.")
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Waits until nothing runs, and raises nothing: what failed is raised by the next ``wait``."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, task: Callable[[], Any]) -> None:
        try:
            task()
        except CheckpointError as error:
            self._failure = error
        except BaseException as error:
            self._failure = CheckpointError(f"Writing a checkpoint failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error


@functools.cache
def _finish_at_exit() -> None:
    """Has Python wait, when the program ends, before it closes the thread pools that the tasks need.

    There is no public way: ``atexit`` comes after, and with it the threads of ``concurrent.futures`` take nothing any more.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_finish)


def _finish() -> None:
    for background in list(_busy):
        try:
            background.wait()
        except CheckpointError as error:
            log.error("The last checkpoint was not written: %s", error)
