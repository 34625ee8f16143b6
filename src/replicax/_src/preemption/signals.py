"""``PreemptionSignals``: the source of a preemption signal, SIGTERM or a function that is polled once a second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from replicax._src.preemption import sigterm
from replicax._src.preemption.ray_train import watcher_in_ray
from replicax._src.preemption.termination import TerminationConfig

POLL_S = 1.0


def can_watch(config: TerminationConfig) -> bool:
    """True if this thread can watch the source: SIGTERM needs the main thread."""
    is_polled = config.termination_watcher_fn is not None or watcher_in_ray() is not None
    return is_polled or threading.current_thread() is threading.main_thread()


@final
class PreemptionSignals:
    """Calls ``on_signal`` once with the reason, in a thread, when this task is preempted.

    Args:
      config: Names the source to watch.
      on_signal: The callback.

    Raises:
      ContextError: The source is SIGTERM, and this is not the main thread.
    """

    def __init__(self, config: TerminationConfig, on_signal: Callable[[str], None]):
        self._on_signal = on_signal
        self._lock = threading.Lock()
        self._has_come = False
        self._error: BaseException | None = None
        self._must_end = threading.Event()
        self._token: object | None = None
        watcher, text = config.termination_watcher_fn, "termination_watcher_fn"
        if watcher is None:
            watcher, text = watcher_in_ray(), "Ray takes its node away"
        if watcher is None:
            self._token = sigterm.listen(lambda: self._come("SIGTERM"))
        else:
            threading.Thread(
                target=self._poll, args=(watcher, text), name="replicax-termination-watcher", daemon=True
            ).start()

    def check(self) -> None:
        """Raises the watcher's error, if any, and keeps SIGTERM watched. The training calls it before each step.

        Raises:
          Exception: The error that the watcher raised.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._token is not None:
            sigterm.tend()

    def close(self) -> None:
        """Stops watching."""
        self._must_end.set()
        if self._token is not None:
            sigterm.ignore(self._token)

    def _come(self, text: str) -> None:
        with self._lock:
            if self._has_come:
                return
            self._has_come = True
        self._on_signal(text)

    def _poll(self, watcher: Callable[[], bool], text: str) -> None:
        while not self._must_end.is_set() and not self._has_come:
            try:
                if watcher():
                    self._come(text)
            except BaseException as error:
                self._error = error
                return
            self._must_end.wait(POLL_S)
