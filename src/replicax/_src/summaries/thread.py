"""The thread that fetches summaries and writes them, in the order in which they were added."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np

from replicax._src.errors import InvalidArgumentError, SummaryError
from replicax._src.summaries.events import EventFile

Check = Callable[[tuple[int, ...], Any], None]
Make = Callable[[np.ndarray], Any]

# How long who adds one waits while as many as may be are in flight.
ADD_LIMIT_S: Final = 300.0


@dataclass(frozen=True)
class Entry:
    """A summary to be written.

    Attributes:
      what: For people.
      step, data: Give them, and may wait.
      check: Of the shape and dtype of the data: raises if they are of another kind.
      make: The data as a record.
      wall_time: When it was given.
    """

    what: str
    step: Callable[[], int]
    data: Callable[[], np.ndarray]
    check: Check
    make: Make
    wall_time: float = field(default_factory=time.time)

    def write_to(self, file: EventFile) -> None:
        data = self.data()
        self.check(data.shape, data.dtype)
        file.add(self.make(data), self.step(), self.wall_time)


class _Request:
    """To flush, or to end; and its answer."""

    def __init__(self, *, is_last: bool):
        self.is_last, self.is_in_queue = is_last, False
        self.is_done = threading.Event()


@final
class WritingThread:
    """Writes to one file.

    Args:
      file: It closes it.
      max_in_flight: How many entries may wait; whoever adds more, waits.
      flush_every_s: After how many seconds what was written is on the disk.
    """

    def __init__(self, file: EventFile, max_in_flight: int, flush_every_s: float):
        self._file, self._flush_every_s = file, flush_every_s
        self._queue: queue.Queue[Entry | _Request] = queue.Queue(max_in_flight)
        self._error: Exception | None = None
        self._num_written, self._waited_s = 0, 0.0
        self._end, self._is_asked_to_end = _Request(is_last=True), False
        self._thread = threading.Thread(target=self._run, name="replicax summaries", daemon=True)
        self._thread.start()

    def add(self, entry: Entry, timeout_s: float = ADD_LIMIT_S) -> None:
        """Raises what went wrong with an earlier one, or a ``SummaryError`` where there is no room for it in time."""
        self.check()
        before = time.monotonic() if self._queue.full() else None
        try:
            self._queue.put(entry, timeout=timeout_s)
        except queue.Full:
            raise self._late(timeout_s) from None
        finally:
            self._waited_s += 0.0 if before is None else time.monotonic() - before

    def check(self) -> None:
        """Raises what went wrong since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def flush(self, timeout_s: float) -> None:
        """Waits until all is on the disk."""
        self._ask(self._end if self._end.is_in_queue else _Request(is_last=False), timeout_s)
        self.check()

    def stop(self, timeout_s: float) -> None:
        """Waits until all is on the disk, and the thread has ended. Who has waited in vain may wait again."""
        self._is_asked_to_end = True
        self._ask(self._end, timeout_s)

    def stop_unless_asked(self, timeout_s: float) -> None:
        """The same, but when Python ends: who has waited in vain does not wait again."""
        if not self._is_asked_to_end:
            self.stop(timeout_s)

    def statistics(self) -> dict[str, float]:
        return {
            "num_written": self._num_written,
            "num_waiting": self._queue.qsize(),
            "waited_s": self._waited_s,
        }

    def _ask(self, request: _Request, timeout_s: float) -> None:
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return  # all is written, or who asks would wait for itself
        until = time.monotonic() + timeout_s
        try:
            if not request.is_in_queue:
                self._queue.put(request, timeout=timeout_s)
                request.is_in_queue = True
            is_done = request.is_done.wait(max(until - time.monotonic(), 0))
        except queue.Full:
            is_done = False
        if not is_done:
            raise self._late(timeout_s)

    def _late(self, timeout_s: float) -> SummaryError:
        return SummaryError(
            f"The summaries were not written after {timeout_s:g} s: {self._queue.qsize()} are waiting. One may be of a "
            "scheduled function that has not run, or the disk is slow; flush() and close() wait longer with timeout_s."
        )

    # --- in the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        flush_at: float | None = None
        while True:
            asked = self._next(flush_at)
            if isinstance(asked, Entry):
                self._guarded(asked.what, self._write, asked)
                flush_at = flush_at or time.monotonic() + self._flush_every_s
                continue
            flush_at = None
            is_last = asked is not None and asked.is_last
            self._guarded("the file", self._file.close if is_last else self._file.flush)
            if asked is not None:
                asked.is_done.set()
            if is_last:
                return

    def _next(self, flush_at: float | None) -> Entry | _Request | None:
        """None when it is time to flush."""
        try:
            return self._queue.get(timeout=None if flush_at is None else max(flush_at - time.monotonic(), 0))
        except queue.Empty:
            return None

    def _write(self, entry: Entry) -> None:
        entry.write_to(self._file)
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
