"""The record of closures that have been applied, which makes each run at most once. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, Final, Self, final

MAX_WINDOWS: Final = 1024


@final
class Window:
    """The numbers of one coordinator's closures that have been applied.

    All closures below the low-water mark have ended, so none of these is applied again. Above it, runs of numbers are
    kept. The memory grows with the number of closures that are unfinished or had nothing to apply here.

    Args:
      low: The low-water mark: the lowest number that has not ended.
    """

    def __init__(self, low: int = 0):
        self._low = low
        self._starts: list[int] = []  # ascending; run i is starts[i] ≤ number < stops[i] < starts[i + 1]
        self._stops: list[int] = []

    @property
    def extent(self) -> tuple[int, int]:
        """Two numbers: below the first, all closures have been applied or had nothing to apply; from the second on,
        none has.
        """
        is_joined = bool(self._starts) and self._starts[0] <= self._low
        return self._stops[0] if is_joined else self._low, max([self._low, *self._stops[-1:]])

    def __contains__(self, number: int) -> bool:
        """True if a closure must not be applied, because it has been applied or has ended."""
        if number < self._low:
            return True
        before = bisect_right(self._starts, number) - 1
        return before >= 0 and number < self._stops[before]

    def add(self, number: int) -> None:
        """Records that a closure has been applied."""
        if number in self:
            return
        after = bisect_right(self._starts, number)
        joins_before = after > 0 and self._stops[after - 1] == number
        joins_after = after < len(self._starts) and self._starts[after] == number + 1
        if joins_before and joins_after:
            self._stops[after - 1] = self._stops.pop(after)
            del self._starts[after]
        elif joins_before:
            self._stops[after - 1] = number + 1
        elif joins_after:
            self._starts[after] = number
        else:
            self._starts.insert(after, number)
            self._stops.insert(after, number + 1)

    def raise_low(self, low: int) -> None:
        """Records that all closures below ``low`` have ended. A lower mark than the current one is late, and is
        ignored.
        """
        if low <= self._low:
            return
        self._low = low
        ended = bisect_right(self._stops, low)
        del self._starts[:ended], self._stops[:ended]

    def end(self, stop: int, unfinished: Collection[int]) -> None:
        """Records that all closures below ``stop`` have ended, besides these."""
        self.raise_low(min([stop, *unfinished]))
        for number in range(self._low, stop):
            if number not in unfinished:
                self.add(number)

    def described(self) -> dict[str, Any]:
        """Returns the window as JSON."""
        return {"low": self._low, "runs": [list(run) for run in zip(self._starts, self._stops)]}

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Self:
        """Makes the window that ``described`` returned."""
        window = cls(described["low"])
        window._starts = [start for start, _ in described["runs"]]
        window._stops = [stop for _, stop in described["runs"]]
        return window


@final
class Windows:
    """The windows of several clients. Beyond ``MAX_WINDOWS``, the window of the longest silent client is dropped."""

    def __init__(self) -> None:
        self._windows: OrderedDict[str, Window] = OrderedDict()

    def window_of(self, incarnation: str) -> Window:
        """Returns the window of a client, and makes it at the first call."""
        window = self._windows.get(incarnation)
        if window is None:
            window = self._windows[incarnation] = Window()
            while len(self._windows) > MAX_WINDOWS:
                self._windows.popitem(last=False)
        self._windows.move_to_end(incarnation)
        return window

    def described(self) -> dict[str, Any]:
        """Returns the windows as JSON."""
        return {name: window.described() for name, window in self._windows.items()}

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Self:
        """Makes the windows that ``described`` returned."""
        windows = cls()
        windows._windows.update((name, Window.of(window)) for name, window in described.items())
        return windows
