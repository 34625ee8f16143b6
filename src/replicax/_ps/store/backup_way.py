"""``BackupWay``: the primary's connection to its backup, for one epoch. ``AckPatience``: how long the backup may
be silent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, final

from replicax._ps.store.store_snapshots import LONGEST_WAIT_S
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import UnavailableError

ACK_S: Final = 5.0
"""The longest wait for an acknowledgment after the primary has applied the update. Later, the backup counts as
unreachable.
"""
_TIMES_AS_LONG: Final = 4.0
"""The backup may take this many times as long as the primary, because it may have to compile on a busy machine."""
_COPY_S: Final = 120.0
_SEND_BYTES_PER_S: Final = 50 << 20


@final
class BackupWay:
    """A connection to a backup, and its client.

    Args:
      epoch: The epoch of the view that the connection belongs to.
      client: A client of the backup; ``close`` closes it with the connection.

    Raises:
      UnavailableError: The backup cannot be reached.
    """

    def __init__(self, epoch: int, client: TaskClient):
        self.epoch = epoch
        self._client = client
        try:
            self._link = client.open()
        except BaseException:
            client.close()
            raise

    def send(self, message: Message, timeout_s: float = ACK_S) -> None:
        """Sends a message within ``timeout_s``, or longer if it has arrays: a backup that is cut off would block
        it forever.
        """
        num_bytes = sum(array.nbytes for array in message.arrays)
        self._link.send(message, timeout_s + num_bytes / _SEND_BYTES_PER_S)

    def receive(self, timeout_s: float) -> Mapping[str, Any]:
        """Returns the header of the backup's next answer."""
        return self._link.receive(timeout_s).header

    def bring(self, message: Message) -> Mapping[str, Any]:
        """Sends a message. Returns the header of the answer, which says that the backup has it.

        Raises:
          UnavailableError: The backup refuses the message.
        """
        self.send(message)
        said = self.receive(_COPY_S)
        if "refused" in said:
            raise UnavailableError(f"The backup refuses what it is sent: {said['refused']}.")
        return said

    def close(self) -> None:
        """Closes the connection. A thread that waits on it raises UnavailableError. Safe to call again, from any
        thread.
        """
        self._link.close()
        self._client.close()


@final
class AckPatience:
    """Says how long the backup may be silent: longer after slow updates, and while it writes a snapshot."""

    def __init__(self) -> None:
        self._slow_until = self._writes_until = 0.0
        self._snapshot_seq = 0

    def took(self, seconds: float) -> None:
        """Records that the primary needed this long for the update that the backup applies now."""
        if seconds > ACK_S / _TIMES_AS_LONG:
            self._slow_until = max(self._slow_until, time.monotonic() + ACK_S + _TIMES_AS_LONG * seconds)

    def order_snapshot(self, seq: int) -> None:
        """Records that update ``seq`` orders a snapshot. The backup may write from now on."""
        self._snapshot_seq, self._writes_until = seq, time.monotonic() + LONGEST_WAIT_S

    def said(self, seq: int, *, writes: bool) -> None:
        """Records that the backup has applied update ``seq``, and whether it is writing a snapshot."""
        if seq >= self._snapshot_seq:
            self._writes_until = time.monotonic() + LONGEST_WAIT_S if writes else 0.0

    def ack_s(self) -> float:
        """Returns the seconds that the backup may be silent from now on."""
        now = time.monotonic()
        return max(ACK_S, self._slow_until - now, self._writes_until + ACK_S - now)
