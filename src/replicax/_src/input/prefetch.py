"""Prefetcher: what an iterator yields, produced ahead by a thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, final

log = logging.getLogger("replicax")

_CLOSE_TIMEOUT_S: Final = 5.0
_DROP_TIMEOUT_S: Final = 0.2
_END: Final = object()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


class Prefetcher:
    """An iterator whose items are made ahead by one thread.

    An error of the source is raised where its item would have come, with the source's traceback; the next call
    goes on, if the source does. The thread ends with the items, when this is closed, or when nobody holds this
    any more; it may be in the middle of the source's ``next`` then, which it ends first. One thread takes at a time.

    Args:
      items: Read in the thread only.
      limit: How many items may wait, at least 1; asked again whenever one is taken. The thread is woken when half of
        them are gone, and makes several at a time: for items that are quickly made that is cheaper, for its
        caches stay warm.
      is_stopped: Set when the thread shall end, so that ``items`` may end early too.
      scope: Entered in the thread.
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
        item = self._shared.ready.get()
        if item is _END:
            self._is_over = True
            raise StopIteration
        if self._shared.ready.qsize() <= self._limit() // 2 and self._shared.wake.empty():
            self._shared.wake.put(None)
        if type(item) is _Failure:
            raise item.error
        return item

    @property
    def is_ready(self) -> bool:
        """Whether ``next`` need not wait: an item is there, or the end, or an error."""
        return self._is_over or not self._shared.ready.empty()

    def close(self) -> None:
        """Ends the thread, and waits for it, at most 5 s; the items that nobody has taken are dropped."""
        self._stop()
        if not self._shared.has_ended.wait(_CLOSE_TIMEOUT_S):
            log.warning(
                "Input: the dataset has not returned its next element within %.0f s, so the thread that reads it could not "
                "be ended. It ends by itself when the dataset returns.",
                _CLOSE_TIMEOUT_S,
            )


@final
class _Shared:
    """What the thread and a Prefetcher share. It holds nothing of the Prefetcher itself, so that this can be
    dropped.
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
                        except BaseException as error:  # the consumer's to handle
                            self.ready.put(_Failure(error))
                            break  # go on when it has been taken
                        self.ready.put(item)
                        if item is _END:
                            return
                        del item  # or the last one would stay in memory while waiting
                    if self.is_stopped.is_set():
                        return
        finally:
            self.ready.put(_END)  # whoever waits shall not wait for ever
            self.has_ended.set()

    def stop(self, thread: threading.Thread, timeout_s: float) -> None:
        """Ends the thread."""
        self.is_stopped.set()
        self.wake.put(None)
        if thread is not threading.current_thread():
            self.has_ended.wait(timeout_s)
