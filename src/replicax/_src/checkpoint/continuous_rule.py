"""``ContinuousRule``: at which boundaries a manager without an interval begins its saves.

It counts boundaries, and knows no clock, thread or disk.

The processes of a cluster pass the same boundaries, but not at the same time, and learn at different times that a save
has ended. All begin the next save at the same boundary if each follows two rules:

- After a save has ended, each process tells how many boundaries it has passed. The next save begins after the largest
  of these numbers.
- A process that has told its number passes one more boundary only when it has the numbers of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

MOST_SKIPPED: Final = 1024
"""The most boundaries between a failed save and the next attempt."""


@final
class ContinuousRule:
    """Counts boundaries. A save begins at the first one after the last save has ended.

    After failed saves it waits 2, 4, 8 boundaries and so on, so that copies for a full disk do not slow training down.
    A disk that was full for some boundaries is tried again within as many.

    Attributes:
      num_passed: The number of boundaries that were passed, the present one included.
    """

    def __init__(self) -> None:
        self.num_passed = 0
        self._next: int | None = 1  # None while a save is running
        self._num_failures = 0  # since the last durable save

    @property
    def is_due(self) -> bool:
        """True if a save begins at the present boundary."""
        return self._next is not None and self.num_passed >= self._next

    def pass_boundary(self) -> None:
        """Notes the next boundary."""
        self.num_passed += 1

    def begin(self) -> None:
        """Notes that a save begins, due or not."""
        self._next = None

    def end(self, passed: Iterable[int], *, is_durable: bool) -> None:
        """Notes that the save has ended.

        Args:
          passed: The numbers of boundaries that the processes have passed.
          is_durable: False if it has failed.
        """
        self._num_failures = 0 if is_durable else self._num_failures + 1
        self._next = max(passed) + min(2**self._num_failures, MOST_SKIPPED)

    def counts(self) -> list[int | None]:
        """Returns the state as JSON, for a replacement."""
        return [self.num_passed, self._next, self._num_failures]

    def take_counts(self, counts: list[int | None]) -> None:
        """Takes such a state."""
        num_passed, self._next, num_failures = counts
        self.num_passed, self._num_failures = num_passed or 0, num_failures or 0
