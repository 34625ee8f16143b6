"""``WritingThread``: fetches summaries and writes them in the order in which they were added."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

from replicax._src.summaries.events import EventFile
from replicax._src.vocabulary.errors import InvalidArgumentError, SummaryError

# The longest time for which ``add`` waits while the queue is full.
ADD_LIMIT_S: Final = 300.0


@dataclass(frozen=True)
class PendingSummary:
    """A summary to write.

    Attributes:
      what: The name in messages.
      write: Fetches the summary, which may wait, and writes it to the file.
    """

    what: str
    write: Callable[[EventFile], None]


@final
class WritingThread:
    """Writes to one file, and closes it.

    Args:
      file: The file.
      max_in_flight: The number of entries that may wait. A caller that adds more blocks.
      flush_every_s: The seconds after which a written entry is on the disk.
    """

    def __init__(self, file: EventFile, max_in_flight: int, flush_every_s: float):
        self._file, self._flush_every_s = file, flush_every_s
        # An event asks for a flush, and is set after it. ``_has_ended`` is the last one.
        self._queue: queue.Queue[PendingSummary | threading.Event] = queue.Queue(max_in_flight)
        self._has_ended, self._end_is_queued, self._is_asked_to_end = threading.Event(), False, False
        self._error: Exception | None = None
        self._num_written, self._waited_s = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="replicax summaries", daemon=True)
        self._thread.start()

    def add(self, entry: PendingSummary, timeout_s: float = ADD_LIMIT_S) -> None:
        """Adds an entry. Raises the error of an earlier entry, or a ``SummaryError`` if the queue stays full."""
        self.check()
        before = time.monotonic() if self._queue.full() else None
        try:
            self._queue.put(entry, timeout=timeout_s)
        except queue.Full:
            raise self._late(timeout_s) from None
        finally:
            self._waited_s += 0.0 if before is None else time.monotonic() - before

    def check(self) -> None:
        """Raises the first error since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def flush(self, timeout_s: float) -> None:
        """Waits until all entries are on the disk."""
        self._wait_for(self._has_ended if self._end_is_queued else threading.Event(), timeout_s)
        self.check()

    def stop(self, timeout_s: float) -> None:
        """Waits until all entries are on the disk and the thread has ended. After a timeout it may be called again."""
        self._is_asked_to_end = True
        self._wait_for(self._has_ended, timeout_s)

    def stop_if_running(self, timeout_s: float) -> None:
        """Stops the thread when Python exits, unless ``stop`` was called before."""
        if not self._is_asked_to_end:
            self.stop(timeout_s)

    def statistics(self) -> dict[str, float]:
        return {
            "num_written": self._num_written,
            "num_waiting": self._queue.qsize(),
            "waited_s": self._waited_s,
        }

    def _wait_for(self, is_done: threading.Event, timeout_s: float) -> None:
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return  # all is written, or the caller is the thread itself
        until = time.monotonic() + timeout_s
        try:
            if not self._end_is_queued:
                self._queue.put(is_done, timeout=timeout_s)
                self._end_is_queued = is_done is self._has_ended
        except queue.Full:
            raise self._late(timeout_s) from None
        if not is_done.wait(max(until - time.monotonic(), 0)):
            raise self._late(timeout_s)

    def _late(self, timeout_s: float) -> SummaryError:
        return SummaryError(
            f"The summaries were not written after {timeout_s:g} s: {self._queue.qsize()} are waiting. One may need a "
            "scheduled function that has not run, or the disk is slow. flush() and close() wait longer with timeout_s."
        )

    # --- in the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        flush_at: float | None = None
        while not self._has_ended.is_set():
            asked = self._next(flush_at)
            if isinstance(asked, PendingSummary):
                self._guarded(asked.what, self._write, asked)
                flush_at = flush_at or time.monotonic() + self._flush_every_s
                continue
            flush_at = None
            self._guarded("the file", self._file.close if asked is self._has_ended else self._file.flush)
            if asked is not None:
                asked.set()

    def _next(self, flush_at: float | None) -> PendingSummary | threading.Event | None:
        """Returns the next item of the queue; None when it is time to flush."""
        try:
            return self._queue.get(timeout=None if flush_at is None else max(flush_at - time.monotonic(), 0))
        except queue.Empty:
            return None

    def _write(self, entry: PendingSummary) -> None:
        entry.write(self._file)
        self._num_written += 1

    def _guarded(self, what: str, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except InvalidArgumentError as error:
            self._error = self._error or error
        except Exception as error:
            failure = SummaryError(f"A summary could not be written, {what}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._error = self._error or failure
