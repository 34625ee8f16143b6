"""``OwnerThread``: the one thread that owns a state. Other threads hand it work, and get answers; no lock is shared."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast, final

T = TypeVar("T")
_LOOK_S: Final = 1.0  # between two looks at whether the thread has ended


class OwnedState(Protocol):
    """What the thread owns. It calls all methods itself, and none may wait for another process."""

    def tick(self) -> None:
        """Some time has passed."""
        ...

    def publish(self) -> None:
        """Something may have changed: publishes what other threads read, as one immutable object."""
        ...

    def fail(self, error: BaseException) -> None:
        """Work for which nobody waits has failed."""
        ...


@final
@dataclass(frozen=True)
class _Wait:
    is_so: Callable[[], bool]
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]]
    tick_s: float


@final
class OwnerThread:
    """Does work in one thread, in the order in which other threads hand it over, and ticks in between.

    Args:
      name: The name of the thread.
      state: What it owns.
      tick_s: The seconds between two ticks.
    """

    def __init__(self, name: str, state: OwnedState, tick_s: float):
        self._state, self._tick_s = state, tick_s
        self._work: queue.SimpleQueue[
            tuple[Callable[[], Any], queue.SimpleQueue[tuple[Any, BaseException | None]] | None] | None
        ] = queue.SimpleQueue()
        self._waits: list[_Wait] = []
        self._tick_at = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. What was handed over before is done then."""
        self._thread.start()

    def post(self, work: Callable[[], object]) -> None:
        """Hands over work without waiting for it. An error of it goes to ``OwnedState.fail``."""
        self._work.put((work, None))

    def call(self, work: Callable[[], T]) -> T:
        """Hands over work, and returns what it returns or raises. Before the start and after the end it runs here."""
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        if not self._thread.is_alive():
            return work()
        self._work.put((work, answers))
        answer = None
        while answer is None:
            has_ended = not self._thread.is_alive()
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=0.0 if has_ended else _LOOK_S)
            if answer is None and has_ended:  # it ended before this work
                return work()
        value, error = answer
        if error is not None:
            raise error
        return cast(T, value)

    def wait(self, is_so: Callable[[], bool], timeout_s: float, tick_s: float | None = None) -> bool:
        """Waits until ``is_so``, which the thread calls, returns True. Returns False if that takes longer.

        Args:
          is_so: Looks at the state.
          timeout_s: The longest wait.
          tick_s: The seconds between two ticks meanwhile, the first at once; None for as always.
        """
        wait = _Wait(is_so, queue.SimpleQueue(), self._tick_s if tick_s is None else tick_s)

        def begin() -> None:
            self._waits.append(wait)
            if tick_s is not None:
                self._tick_at = time.monotonic()

        self.post(begin)
        try:
            _, error = wait.answers.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            self.post(lambda: self._waits.remove(wait) if wait in self._waits else None)
            return False
        if error is not None:
            raise error
        return True

    def end(self) -> None:
        """Does all work that was handed over, and ends the thread. May be called again."""
        if self._thread.ident is not None:
            self._work.put(None)
            self._thread.join()

    # --- in the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        self._tick_at = time.monotonic()
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Does one piece of work, or a tick. Returns False at the end."""
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] | None = None
        work: Callable[[], Any] = self._tick
        left_s = self._tick_at - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(queue.Empty):
                handed = self._work.get(timeout=left_s)
                if handed is None:
                    return False
                work, answers = handed
        value = error = None
        try:
            value = work()
        except BaseException as raised:
            error = raised
        if error is not None and answers is None:
            self._state.fail(error)
        self._state.publish()
        if answers is not None:
            answers.put((value, error))
        self._answer_waits()
        return True

    def _tick(self) -> None:
        self._tick_at = time.monotonic() + min([self._tick_s, *(each.tick_s for each in self._waits)])
        self._state.tick()

    def _answer_waits(self) -> None:
        for wait in list(self._waits):
            error = None
            try:
                is_over = wait.is_so()
            except BaseException as raised:
                is_over, error = True, raised
            if is_over:
                self._waits.remove(wait)
                wait.answers.put((None, error))
