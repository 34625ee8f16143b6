"""``Entry``: a client's message in the order of a group, as the log keeps it and the backup receives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from replicax._ps.store.log import Position
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message
from replicax._src.program_kit.errors import ReplicaxError

_READS: Final = frozenset({"find"})
_DUPLICATE: Final = "duplicate"
ENTRY_BYTES: Final = 4 << 10
"""The number of bytes that an entry counts for in a log, besides its arrays."""


@final
class Entry:
    """A message in the order of a group. A message that changes nothing is kept as its number only.

    For a step the backup reads nothing, but it refuses the reads that the primary refuses.

    Attributes:
      position: Its place in the order.
      header: The header of the message; None if there is nothing to execute.
      outcome: The result, as ``applied`` returns it. Both servers must get the same one. None until it is known.
      is_refused: True if the primary has refused the message, which has changed nothing. A backup that gets it later
        does not execute it: it may have what the primary lacked then.
    """

    __slots__ = ("_is_owned", "arrays", "header", "is_refused", "outcome", "position")

    def __init__(self, position: Position, message: Message | None):
        self.position = position
        self.outcome: str | None = None
        self.header: Mapping[str, Any] | None = None
        self.arrays: Sequence[np.ndarray] = ()
        self.is_refused = self._is_owned = False
        if message is None:
            return
        self.header, self.arrays = message.header, message.arrays
        if message.header.get("op") == "step":
            self.arrays = _with_no_row_numbers(message)
            self.header = {**message.header, "used": [], "only_apply": True}

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the entry counts for in a log."""
        return sum(array.nbytes for array in self.arrays) + ENTRY_BYTES

    def own(self) -> None:
        """Copies the arrays, because the memory of a message is reused."""
        if self._is_owned:
            return
        self._is_owned = True
        if self._changes_nothing:  # a waiting client may send it many times
            self.header, self.arrays = None, ()
        else:
            self.arrays = [np.array(array) for array in self.arrays]

    def agrees(self, outcome: str) -> bool:
        """True if the backup's result is compatible with the primary's."""
        is_empty = self._is_owned and self._changes_nothing and not outcome
        return is_empty or self.outcome in (None, outcome)

    @property
    def _changes_nothing(self) -> bool:
        return self.outcome == _DUPLICATE or self.is_refused


def is_change(header: Mapping[str, Any]) -> bool:
    """True if a message can change the store. Messages that only read are not sent to the backup."""
    op = header.get("op")
    if op == "step":
        return header.get("program") is not None or header.get("gradients") is not None
    return op not in _READS


def is_snapshot(header: Mapping[str, Any] | None) -> bool:
    """True if a message orders a snapshot on both servers."""
    return header is not None and header.get("op") == "snapshot"


def is_refusal(header: Mapping[str, Any], error: Exception | None) -> bool:
    """True if an error says that a message has changed nothing. A refused round has lost some gradients."""
    return isinstance(error, ReplicaxError) and header.get("op") != "apply"


def applied(store: Store, message: Message) -> tuple[Message | None, Exception | None, str]:
    """Applies a message. Returns the answer or the error, and an outcome that must be equal on both servers."""
    try:
        answer = store.answer(message)
    except Exception as error:
        return None, error, type(error).__name__
    header = answer.header
    return answer, None, str(header.get("checksum") or (_DUPLICATE if header.get("duplicate") else ""))


def _with_no_row_numbers(message: Message) -> Sequence[np.ndarray]:
    """Returns the arrays of a step, with empty arrays of row numbers."""
    rows = message.header.get("rows")
    first = len(message.arrays) - len(rows) if isinstance(rows, list) else len(message.arrays)
    if first < 0:
        return message.arrays
    numbers = [array[:0] if array.ndim else array for array in message.arrays[first:]]
    return [*message.arrays[:first], *numbers]
