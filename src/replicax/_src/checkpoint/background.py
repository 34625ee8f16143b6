"""Saves that this process has started: each runs in a thread, and is found by its directory until it has been waited
for.

The next call raises an error of the thread.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, final

from replicax._src.checkpoint.errors import CheckpointError
from replicax._src.cluster.failures import ClusterFailureError
from replicax._src.cluster.turns import turns

log = logging.getLogger("replicax")

_unheard: dict[Background, str | None] = {}
"""Maps each save that has not been waited for to the real path of its directory."""


@final
class Background:
    """Runs one task at a time. Python waits for it at exit.

    Args:
      directory: The directory to which the tasks write checkpoints; None for other tasks.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, task: Callable[[], Any]) -> None:
        """Runs a task, once the previous one has ended. If there can be no more threads, the caller runs it.

        Raises:
          CheckpointError: The previous task has failed.
        """
        self.wait()
        _unheard[self] = None if self._directory is None else os.path.realpath(self._directory)
        self._thread = threading.Thread(target=self._run, args=(task,), name="replicax-checkpoint")
        try:
            _finish_at_exit()
            self._thread.start()
        except RuntimeError:
            self._thread = None
            self._run(task)

    @property
    def is_running(self) -> bool:
        """True while a task runs."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None, *, keeps_failure: bool = False) -> None:
        """Waits until no task runs. In the thread of the task it does nothing.

        Args:
          timeout_s: The longest wait in seconds; None for no limit.
          keeps_failure: True if the next call must raise a failure again.

        Raises:
          CheckpointError: The task has failed; raised once.
          ClusterFailureError: Another process is lost.
          TimeoutError: The task is still running.
        """
        thread = self._thread
        if thread is threading.current_thread():
            return
        if thread is not None:
            for turn_s in turns(timeout_s):
                thread.join(turn_s)
                if not thread.is_alive():
                    break
            else:
                raise TimeoutError(f"A checkpoint is still being written after {timeout_s} s.")
            self._thread = None if self._thread is thread else self._thread
        failure = self._failure
        if self._thread is None and (failure is None or not keeps_failure):
            self._failure = None
            _unheard.pop(self, None)
        if failure is not None:
            raise failure

    def _run(self, task: Callable[[], Any]) -> None:
        try:
            task()
        except (CheckpointError, ClusterFailureError) as error:
            self._failure = error
        except BaseException as error:
            self._failure = CheckpointError(f"Writing a checkpoint failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error


@functools.cache
def _finish_at_exit() -> None:
    """Makes Python wait at exit before it closes the thread pools that the tasks need."""
    call_at_exit(_finish)


def call_at_exit(function: Callable[[], Any]) -> None:
    """Calls a function when Python ends, while thread pools still accept tasks.

    There is no public way: ``atexit`` runs later, when ``concurrent.futures`` no longer accepts tasks.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(function)


def saves_under(path: str) -> list[Background]:
    """Returns the saves into a directory that have not been waited for.

    Args:
      path: The directory, or a checkpoint in it.
    """
    path = os.path.realpath(path)
    return [save for save, directory in list(_unheard.items()) if directory in (path, os.path.dirname(path))]


def _finish() -> None:
    for background in list(_unheard):
        try:
            background.wait()
        except (CheckpointError, ClusterFailureError) as error:
            log.error("The last checkpoint was not written: %s", error)
