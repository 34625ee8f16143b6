"""Prefetcher, which runs an iterator in a thread ahead of its consumer."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, final

from replicax._src.cluster.turns import turns

log = logging.getLogger("replicax")

_CLOSE_TIMEOUT_S: Final = 5.0
_DROP_TIMEOUT_S: Final = 0.2
_END: Final = object()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


class Prefetcher:
    """An iterator whose items one thread prefetches.

    An error of the source is raised in place of its item, with the source's traceback. The next call continues if the
    source can. The thread ends with the items, or when the Prefetcher is closed or garbage-collected. If it is then
    inside the source's ``next``, it completes this call first. Only one thread may take items at a time.

    Args:
      items: The source. Only the thread reads it.
      limit: Returns the largest number of waiting items, at least 1. It is called whenever an item is taken. The thread
        wakes when half of the items are gone and makes several at a time, which is cheaper for small items because its
        caches stay warm.
      is_stopped: Set when the thread must end, so that ``items`` can end early too.
      scope: A context manager that the thread enters.
    """

    def __init__(
        self,
        items: Iterator[Any],
        limit: Callable[[], int],
        is_stopped: threading.Event | None = None,
        scope: contextlib.AbstractContextManager[Any] | None = None,
    ):
        self._limit = limit
        self._is_over = False
        self._shared = shared = _Shared(is_stopped or threading.Event())
        thread = threading.Thread(
            target=shared.produce, args=(items, limit, scope), name="replicax-prefetch", daemon=True
        )
        self._stop = weakref.finalize(self, shared.stop, thread, _DROP_TIMEOUT_S)
        shared.wake.put(None)
        thread.start()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        item = self._take()
        if item is _END:
            self._is_over = True
            raise StopIteration
        if self._shared.ready.qsize() <= self._limit() // 2 and self._shared.wake.empty():
            self._shared.wake.put(None)
        if type(item) is _Failure:
            raise item.error
        return item

    def _take(self) -> Any:
        """Waits for the next item. The thread that makes it may need an agreement of all processes."""
        for turn_s in turns():
            with contextlib.suppress(queue.Empty):
                return self._shared.ready.get(timeout=turn_s)
        raise AssertionError("a wait without a limit has ended")

    @property
    def is_ready(self) -> bool:
        """True if ``next`` returns or raises without a wait."""
        return self._is_over or not self._shared.ready.empty()

    def close(self) -> None:
        """Ends the thread and waits for it at most 5 s. Drops the items that were not taken."""
        self._stop()
        if not self._shared.has_ended.wait(_CLOSE_TIMEOUT_S):
            log.warning(
                "Input: the dataset has not returned its next element within %.0f s, so its prefetching thread is "
                "still running. The thread ends when the dataset returns.",
                _CLOSE_TIMEOUT_S,
            )


@final
class _Shared:
    """The state that the thread and a Prefetcher share. It has no reference to the Prefetcher, which can then be
    garbage-collected.
    """

    def __init__(self, is_stopped: threading.Event):
        self.ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.is_stopped, self.has_ended = is_stopped, threading.Event()

    def produce(
        self,
        items: Iterator[Any],
        limit: Callable[[], int],
        scope: contextlib.AbstractContextManager[Any] | None,
    ) -> None:
        """Runs in the thread."""
        try:
            with scope or contextlib.nullcontext():
                while True:
                    self.wake.get()
                    while self.ready.qsize() < limit():
                        if self.is_stopped.is_set():
                            return
                        try:
                            item = next(items, _END)
                        except BaseException as error:  # the consumer handles it
                            self.ready.put(_Failure(error))
                            break  # continues when the consumer has taken it
                        self.ready.put(item)
                        if item is _END:
                            return
                        del item  # otherwise the last item would stay in memory during the wait
                    if self.is_stopped.is_set():
                        return
        finally:
            self.ready.put(_END)  # so that no consumer waits without end
            self.has_ended.set()

    def stop(self, thread: threading.Thread, timeout_s: float) -> None:
        """Ends the thread."""
        self.is_stopped.set()
        self.wake.put(None)
        if thread is not threading.current_thread():
            self.has_ended.wait(timeout_s)
