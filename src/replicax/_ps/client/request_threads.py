"""``RequestThreads``: threads for what waits for a task. Each does one thing at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, final

_IDLE_S: Final = 3.0  # longer than the pause between heartbeats


@final
class RequestThreads:
    """Threads that call functions. An idle one takes the next function; one that is idle for a while ends.

    Args:
      name: The name of the threads.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []  # the last one was used last
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def call(self, function: Callable[[], None]) -> bool:
        """Calls a function in a thread. It must not raise. Returns False if the system has no more threads."""
        with self._lock:
            if self._is_closed:
                return True
            if self._idle:
                self._idle.pop().put(function)
                return True
            thread = threading.Thread(target=self._live, args=(function,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._threads.add(thread)
            return True

    def close(self) -> None:
        """Ends the idle threads. Later calls do nothing."""
        with self._lock:
            self._is_closed = True
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()

    def join(self, until: float) -> None:
        """Waits until all threads have ended, or until that time on the clock of ``time.monotonic``."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _live(self, function: Callable[[], None]) -> None:
        inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        following: Callable[[], None] | None = function
        while following is not None:
            following()
            following = self._next(inbox)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self, inbox: queue.SimpleQueue[Callable[[], None] | None]) -> Callable[[], None] | None:
        """Waits for the next function; None if the thread shall end."""
        with self._lock:
            if self._is_closed:
                return None
            self._idle.append(inbox)
        try:
            return inbox.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    return None
            return inbox.get()  # it was taken just now
