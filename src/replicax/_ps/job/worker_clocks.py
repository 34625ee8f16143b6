"""``WorkerClocks``: counts of workers: connected ones, idle ones, and those at each clock. Nothing loops over them."""

from __future__ import annotations

from typing import final


@final
class WorkerClocks:
    """Counts of the connected workers, by their clocks.

    A clock counts the closures that have ended on a worker, so the least of all rises by at most one for each of them.
    """

    def __init__(self) -> None:
        self.num_here = self.num_idle = 0
        self._here: dict[int, int] = {}
        self._idle: dict[int, int] = {}
        self._least = 0

    @property
    def slowest(self) -> int | None:
        """The least clock; None if no worker is connected."""
        if not self.num_here:
            return None
        while self._least not in self._here:
            self._least += 1
        return self._least

    def num_idle_until(self, clock: int) -> int:
        """Returns the number of idle workers whose clocks are at most ``clock``."""
        slowest = self.slowest
        if slowest is None or not self.num_idle:
            return 0
        if clock - slowest > len(self._idle):
            return sum(num for each, num in self._idle.items() if each <= clock)
        return sum(self._idle[each] for each in range(slowest, clock + 1) if each in self._idle)

    def enter(self, clock: int, *, is_idle: bool) -> None:
        """Counts a worker."""
        self._least = min(self._least, clock) if self.num_here else clock
        self.num_here += 1
        self._here[clock] = self._here.get(clock, 0) + 1
        if is_idle:
            self.num_idle += 1
            self._idle[clock] = self._idle.get(clock, 0) + 1

    def took(self, clock: int) -> None:
        """An idle worker has got a closure."""
        self.num_idle -= 1
        _remove(self._idle, clock)

    def ended(self, clock: int, num_ended: int, *, is_idle: bool) -> None:
        """A busy worker has lost a closure: it has ended ``num_ended`` here, 0 or 1. ``clock`` is that of before."""
        if num_ended:
            _remove(self._here, clock)
            clock += num_ended
            self._here[clock] = self._here.get(clock, 0) + 1
        if is_idle:
            self.num_idle += 1
            self._idle[clock] = self._idle.get(clock, 0) + 1

    def leave(self, clock: int, *, is_idle: bool) -> None:
        """Counts a worker no longer."""
        self.num_here -= 1
        _remove(self._here, clock)
        if is_idle:
            self.num_idle -= 1
            _remove(self._idle, clock)


def _remove(counts: dict[int, int], clock: int) -> None:
    left = counts[clock] - 1
    if left:
        counts[clock] = left
    else:
        del counts[clock]
