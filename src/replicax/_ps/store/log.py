"""``UpdateLog``: the numbered updates of a store that its backup has not acknowledged. Pure: no clock, no transport.

A store applies updates in one order. An update's *position* is its number and the epoch of the primary that
ordered it. There is one primary per epoch, and a backup applies only the next number. So two stores whose last
updates have the same position have the same contents. This is the log matching property of Raft. Three rules
follow from it:

- A backup whose position the log reaches gets the updates after it.
- Any other backup gets the state at one position, and then the updates after it.
- The log keeps at most ``max_bytes``. Beyond that it is dropped, and the backup gets the state.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar, final

DEFAULT_LOG_BYTES: Final = 256 << 20

T = TypeVar("T")


class Position(NamedTuple):
    """The place of an update in the order. Also the place of a store that has applied it and all earlier updates."""

    epoch: int
    seq: int


START: Final = Position(0, 0)
"""The position of a store that has applied nothing."""


@final
class UpdateLog(Generic[T]):
    """Updates in order, from one position on. Not thread-safe.

    Args:
      max_bytes: The most bytes of kept updates. A single update is kept whatever its size.

    Attributes:
      num_bytes: The number of bytes of the kept updates.

    >>> log = UpdateLog[str](max_bytes=100)
    >>> log.begin(START)
    >>> for seq, update in enumerate("abc", start=1):
    ...     log.append(Position(1, seq), update, 10)
    >>> log.acknowledge(1)
    >>> log.reaches(Position(1, 1)), log.reaches(Position(1, 0)), log.after(2)
    (True, False, [(Position(epoch=1, seq=3), 'c')])
    """

    def __init__(self, max_bytes: int = DEFAULT_LOG_BYTES):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._base: Position | None = None
        self._updates: deque[tuple[Position, T]] = deque()
        self._sizes: dict[int, int] = {}

    @property
    def is_on(self) -> bool:
        """True between ``begin`` and ``end``, while it keeps updates."""
        return self._base is not None

    @property
    def is_half_full(self) -> bool:
        """True if updates should be slowed down."""
        return 2 * self.num_bytes >= self.max_bytes

    def begin(self, position: Position) -> None:
        """Starts to keep the updates after a position."""
        self.end()
        self._base = position

    def end(self) -> None:
        """Drops all updates and stops keeping them until ``begin``."""
        self._base, self.num_bytes = None, 0
        self._updates.clear()
        self._sizes.clear()

    def append(self, position: Position, update: T, num_bytes: int = 0) -> None:
        """Keeps the next update, if the log is on. The log ends if it becomes too large."""
        if self._base is None:
            return
        last = self._updates[-1][0] if self._updates else self._base
        assert position.seq == last.seq + 1, f"update {position.seq} follows {last.seq}"
        assert position.epoch >= last.epoch, f"epoch {position.epoch} follows {last.epoch}"
        self._updates.append((position, update))
        self.charge(position.seq, num_bytes)

    def charge(self, seq: int, num_bytes: int) -> None:
        """Sets the size of a kept update. The log ends if it becomes too large."""
        if self._has(seq):
            self.num_bytes += num_bytes - self._sizes.get(seq, 0)
            self._sizes[seq] = num_bytes
            if self.num_bytes > self.max_bytes and self.num_bytes > num_bytes:
                self.end()

    def acknowledge(self, seq: int) -> None:
        """Drops all updates up to this number, because the backup has them."""
        while self._updates and self._updates[0][0].seq <= seq:
            self._base = self._updates.popleft()[0]
            self.num_bytes -= self._sizes.pop(self._base.seq, 0)

    def get(self, seq: int) -> T | None:
        """Returns the update of this number; None if it is not kept."""
        return self._updates[seq - self._updates[0][0].seq][1] if self._has(seq) else None

    def reaches(self, position: Position) -> bool:
        """True if the updates after this position bring a store from there up to date."""
        if position == self._base:
            return True
        return (
            self._has(position.seq) and self._updates[position.seq - self._updates[0][0].seq][0] == position
        )

    def after(self, seq: int) -> list[tuple[Position, T]]:
        """Returns the updates with higher numbers, in order."""
        return [each for each in self._updates if each[0].seq > seq]

    def _has(self, seq: int) -> bool:
        return bool(self._updates) and self._updates[0][0].seq <= seq <= self._updates[-1][0].seq
