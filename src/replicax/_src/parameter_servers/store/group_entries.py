"""``Entry``: a client's message in the order of a group, as its log keeps it and its backup gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from replicax._src.parameter_servers.store.log import Position
from replicax._src.parameter_servers.store.store import Store
from replicax._src.parameter_servers.transport.messages import Message

_READS: Final = frozenset({"find"})
_DUPLICATE: Final = "duplicate"
ENTRY_BYTES: Final = 4 << 10
"""What an entry counts for in a log, besides its arrays."""


@final
class Entry:
    """A message, or in place of one that changes nothing its number: nothing is read there, but refused what cannot be.

    Attributes:
      position: Its place in the order.
      header: None: there is nothing to do.
      outcome: The result, as ``applied`` says; it has to be the same on both servers. None: it is not known yet.
    """

    __slots__ = ("_is_owned", "arrays", "header", "outcome", "position")

    def __init__(self, position: Position, message: Message | None):
        self.position = position
        self.outcome: str | None = None
        self.header: Mapping[str, Any] | None = None
        self.arrays: Sequence[np.ndarray] = ()
        self._is_owned = False
        if message is None:
            return
        self.header, self.arrays = message.header, message.arrays
        if message.header.get("op") == "step":
            self.arrays = _with_no_row_numbers(message)
            self.header = {**message.header, "used": [], "only_apply": True}

    @property
    def num_bytes(self) -> int:
        """The number of bytes that it counts for in a log."""
        return sum(array.nbytes for array in self.arrays) + ENTRY_BYTES

    def own(self) -> None:
        """Copies its arrays, because the memory of a message is used again."""
        if self._is_owned:
            return
        self._is_owned = True
        if self.outcome == _DUPLICATE:  # it has changed nothing, and a client that waits sends it many times
            self.header, self.arrays = None, ()
        else:
            self.arrays = [np.array(array) for array in self.arrays]

    def agrees(self, outcome: str) -> bool:
        """True if the backup's result may be that of the primary."""
        is_empty = self._is_owned and self.outcome == _DUPLICATE and not outcome
        return is_empty or self.outcome in (None, outcome)


def is_change(header: Mapping[str, Any]) -> bool:
    """True if a message changes anything. Messages that only read are not sent to the backup."""
    op = header.get("op")
    if op == "step":
        return header.get("program") is not None or header.get("gradients") is not None
    return op not in _READS


def is_snapshot(header: Mapping[str, Any] | None) -> bool:
    """True if a message asks both servers for a snapshot."""
    return header is not None and header.get("op") == "snapshot"


def applied(store: Store, message: Message) -> tuple[Message | None, Exception | None, str]:
    """The answer or the error, and in a word what came of it: the same on both servers, or they are not the same."""
    try:
        answer = store.answer(message)
    except Exception as error:
        return None, error, type(error).__name__
    header = answer.header
    return answer, None, str(header.get("checksum") or (_DUPLICATE if header.get("duplicate") else ""))


def _with_no_row_numbers(message: Message) -> Sequence[np.ndarray]:
    """The arrays of a step, of row numbers none, but of the same kind."""
    rows = message.header.get("rows")
    first = len(message.arrays) - len(rows) if isinstance(rows, list) else len(message.arrays)
    if first < 0:
        return message.arrays
    numbers = [array[:0] if array.ndim else array for array in message.arrays[first:]]
    return [*message.arrays[:first], *numbers]
