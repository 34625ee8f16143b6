"""``BackupWay``: the primary's connection to its backup, for one epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from replicax._ps.store.ack_patience import ACK_S
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import UnavailableError

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
