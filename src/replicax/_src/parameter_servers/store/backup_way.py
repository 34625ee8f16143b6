"""``BackupWay``: from the primary of a group to its backup, for one epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from replicax._src.parameter_servers.client.server_stream import PsClient
from replicax._src.parameter_servers.errors import UnavailableError
from replicax._src.parameter_servers.transport.messages import Message

ACK_S: Final = 5.0
"""For the backup's word, after the primary has done the same: longer, and it cannot be reached."""
_COPY_S: Final = 120.0
_SEND_BYTES_PER_S: Final = 50 << 20


@final
class BackupWay:
    """A link, and its client.

    Args:
      client: Of the backup; closed with the link.

    Raises:
      UnavailableError: It cannot be reached.
    """

    def __init__(self, epoch: int, client: PsClient):
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
