"""Prefetcher: what an iterator yields, produced ahead by a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final

_CLOSE_TIMEOUT_S: Final = 5.0
_DROP_TIMEOUT_S: Final = 0.2
_END: Final = object()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


class Prefetcher:
    """An iterator whose items are made ahead by one thread, at most ``depth`` of them.

    An error of the source is raised where its item would have come, with the source's traceback. The thread
    ends with the items, when this is closed, or when nobody holds this any more; it may be in the middle of
    the source's ``next`` then, which it ends first.

    Args:
      items: Read in the thread only.
      depth: At least 1.
      burst: The thread is woken to make this many at a time, which is cheaper for items that are quickly made
        (its caches stay warm); at most ``depth``.
      scope: Entered in the thread.
    """

    def __init__(
        self,
        items: Iterator[Any],
        depth: int,
        burst: int = 1,
        scope: contextlib.AbstractContextManager[Any] | None = None,
    ):
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._permits.put(depth)
        self._burst = burst
        self._num_taken = 0  # since the thread was woken
        is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=_produce,
            args=(items, self._ready, self._permits, is_stopped, scope or contextlib.nullcontext()),
            name="replicax-prefetch",
            daemon=True,
        )
        self._stop = weakref.finalize(self, _stop, self._permits, is_stopped, self._thread, _DROP_TIMEOUT_S)
        self._last: Any = None  # what ended it
        self._thread.start()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        if self._last is not None:
            raise StopIteration
        item = self._ready.get()
        if item is _END or type(item) is _Failure:
            self._last = item
            if item is _END:
                raise StopIteration
            raise item.error
        self._num_taken += 1
        if self._num_taken == self._burst:
            self._num_taken = 0
            self._permits.put(self._burst)
        return item

    def close(self) -> tuple[list[Any], BaseException | None]:
        """Ends the thread; returns the items that nobody has taken, and the error that would have come after them.

        Raises:
          TimeoutError: The source's ``next`` has not returned within 5 s.
        """
        self._stop()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"The dataset has not returned its next element within {_CLOSE_TIMEOUT_S:.0f} s, so its thread could "
                "not be ended; it will end by itself when the dataset returns."
            )
        rest: list[Any] = []
        while not self._ready.empty():
            rest.append(self._ready.get())
        self._last = rest.pop() if rest and (rest[-1] is _END or type(rest[-1]) is _Failure) else _END
        return rest, self._last.error if type(self._last) is _Failure else None


def _produce(
    items: Iterator[Any],
    ready: queue.SimpleQueue[Any],
    permits: queue.SimpleQueue[int],
    is_stopped: threading.Event,
    scope: contextlib.AbstractContextManager[Any],
) -> None:
    """What the thread does. It holds nothing of the Prefetcher itself, so that this can be dropped."""
    try:
        with scope:
            while num_permitted := permits.get():
                for _ in range(num_permitted):
                    if is_stopped.is_set():
                        return
                    item = next(items, _END)
                    ready.put(item)
                    if item is _END:
                        return
                    del item  # or the last one would stay in memory while waiting
    except BaseException as error:  # the consumer's to handle
        ready.put(_Failure(error))


def _stop(
    permits: queue.SimpleQueue[int], is_stopped: threading.Event, thread: threading.Thread, timeout_s: float
) -> None:
    is_stopped.set()
    permits.put(0)
    if thread is not threading.current_thread():
        thread.join(timeout_s)
