"""``BackupWay``: the connection from a primary to its backup, for one epoch. ``AckPatience``: its limit of silence."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, final

from replicax._src.parameter_servers.client.server_client import Connector
from replicax._src.parameter_servers.errors import UnavailableError
from replicax._src.parameter_servers.store.store_snapshots import LONGEST_WAIT_S
from replicax._src.parameter_servers.transport.messages import Message

ACK_S: Final = 5.0
"""For the backup's word, after the primary has done the same: longer, and it cannot be reached."""
_TIMES_AS_LONG: Final = 4.0
"""The backup may take so many times as long as the primary: it may have to compile, on a busy machine."""
_COPY_S: Final = 120.0
_SEND_BYTES_PER_S: Final = 50 << 20


@final
class BackupWay:
    """A link, and its client.

    Args:
      client: A client of the backup; it is closed with the link.

    Raises:
      UnavailableError: It cannot be reached.
    """

    def __init__(self, epoch: int, client: Connector):
        self.epoch = epoch
        self._client = client
        try:
            self._link = client.open()
        except BaseException:
            client.close()
            raise

    def send(self, message: Message, timeout_s: float = ACK_S) -> None:
        """Not for ever: who is cut off takes nothing, and says nothing. Arrays have more time."""
        num_bytes = sum(array.nbytes for array in message.arrays)
        self._link.send(message, timeout_s + num_bytes / _SEND_BYTES_PER_S)

    def receive(self, timeout_s: float) -> Mapping[str, Any]:
        """Returns the header of its next answer."""
        return self._link.receive(timeout_s).header

    def bring(self, message: Message) -> Mapping[str, Any]:
        """Sends something, and returns what it says when it has it.

        Raises:
          UnavailableError: It does not take it.
        """
        self.send(message)
        said = self.receive(_COPY_S)
        if "refused" in said:
            raise UnavailableError(f"It refuses what it is sent: {said['refused']}.")
        return said

    def close(self) -> None:
        """Closes the link. A thread that waits at it raises UnavailableError. May be called again, from any thread."""
        self._link.close()
        self._client.close()


@final
class AckPatience:
    """Tells for how long the backup may say nothing: longer after slow updates, and while it writes a snapshot."""

    def __init__(self) -> None:
        self._slow_until = self._writes_until = 0.0
        self._snapshot_seq = 0

    def took(self, seconds: float) -> None:
        """The primary needed so long for what the backup does now."""
        if seconds > ACK_S / _TIMES_AS_LONG:
            self._slow_until = max(self._slow_until, time.monotonic() + ACK_S + _TIMES_AS_LONG * seconds)

    def order_snapshot(self, seq: int) -> None:
        """Update ``seq`` orders a snapshot, which the backup may write from now on."""
        self._snapshot_seq, self._writes_until = seq, time.monotonic() + LONGEST_WAIT_S

    def said(self, seq: int, *, writes: bool) -> None:
        """The backup has applied update ``seq``, and says whether it writes a snapshot."""
        if seq >= self._snapshot_seq:
            self._writes_until = time.monotonic() + LONGEST_WAIT_S if writes else 0.0

    def ack_s(self) -> float:
        """Returns the seconds that the backup may be silent from now on."""
        now = time.monotonic()
        return max(ACK_S, self._slow_until - now, self._writes_until + ACK_S - now)
