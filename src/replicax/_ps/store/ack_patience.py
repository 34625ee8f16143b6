"""``AckPatience``: how long a backup may be silent before the primary gives it up. Pure: times are arguments."""

from __future__ import annotations

from typing import Final, final

ACK_S: Final = 5.0
"""The longest wait for an acknowledgment after the primary has applied the update. Later, the backup counts as
unreachable.
"""
LONGEST_WRITE_S: Final = 40.0
"""The longest delay of an update by a snapshot, because a client gives up after 60 s."""

_TIMES_AS_LONG: Final = 4.0
"""The backup may take this many times as long as the primary, because it may have to compile on a busy machine."""


@final
class AckPatience:
    """Says how long the backup may be silent: longer after slow updates, and while it writes a snapshot."""

    def __init__(self) -> None:
        self._slow_until = self._writes_until = 0.0
        self._snapshot_seq = 0

    def took(self, seconds: float, now: float) -> None:
        """Records that the primary needed this long for the update that the backup applies now."""
        if seconds > ACK_S / _TIMES_AS_LONG:
            self._slow_until = max(self._slow_until, now + ACK_S + _TIMES_AS_LONG * seconds)

    def order_snapshot(self, seq: int, now: float) -> None:
        """Records that update ``seq`` orders a snapshot. The backup may write from now on."""
        self._snapshot_seq, self._writes_until = seq, now + LONGEST_WRITE_S

    def said(self, seq: int, now: float, *, writes: bool) -> None:
        """Records that the backup has applied update ``seq``, and whether it is writing a snapshot."""
        if seq >= self._snapshot_seq:
            self._writes_until = now + LONGEST_WRITE_S if writes else 0.0

    def ack_s(self, now: float) -> float:
        """Returns the seconds that the backup may be silent from now on."""
        return max(ACK_S, self._slow_until - now, self._writes_until + ACK_S - now)
