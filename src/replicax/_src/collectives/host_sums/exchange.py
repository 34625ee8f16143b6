"""The description of one exchange, which all members must share, and the heads of its frames. Pure.

A head has the description, the content of the frame and the index of its window. So each frame is compared with what
is expected, and members that run different programs are found at their first different exchange.
"""

from __future__ import annotations

import functools
import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple, Self

from replicax._src.collectives.host_sums.ordered_addition import DTYPES, HostOp

_EXCHANGE: Final = struct.Struct("<QQQQIBB2x")
_FRAME: Final = struct.Struct("<II")
HEAD_BYTES: Final = _EXCHANGE.size + _FRAME.size
_OPS: Final = tuple(HostOp)


class Content(IntEnum):
    """The content of a frame."""

    WHOLE = 1  # the sender's whole arrays, after the head
    SLICES = 2  # the sender's slices of the part that the receiver owns
    RESULT = 3  # the result of the part that the sender owns


class Exchange(NamedTuple):
    """One all-reduce. All members must give the same.

    Attributes:
      epoch: The epoch of the world.
      step: The number of the step.
      round: The number of the exchange in the step.
      rows: The number of rows of all replicas that the step uses.
      op: The operation.
      dtype: The dtype of the arrays.
      length: The number of elements of each array.
    """

    epoch: int
    step: int
    round: int
    rows: int
    op: HostOp
    dtype: Any
    length: int

    def __str__(self) -> str:
        return (
            f"the {self.op} of {self.length:,} {self.dtype.name} in round {self.round} of step {self.step:,}, for "
            f"{self.rows:,} rows"
        )

    def packed(self) -> bytes:
        """Returns the description as bytes, with which every head begins."""
        return _EXCHANGE.pack(
            self.epoch, self.step, self.rows, self.length, self.round, *_codes_of(self.op, self.dtype)
        )

    @classmethod
    def unpacked(cls, head: bytes) -> Self | None:
        """Reads the description from the start of a head. Returns None if it is none."""
        if len(head) < HEAD_BYTES:
            return None
        epoch, step, rows, length, round_, op, dtype = _EXCHANGE.unpack_from(head)
        if op >= len(_OPS) or dtype >= len(DTYPES):
            return None
        return cls(epoch, step, round_, rows, _OPS[op], DTYPES[dtype], length)


@functools.lru_cache(maxsize=64)
def _codes_of(op: HostOp, dtype: Any) -> tuple[int, int]:
    return _OPS.index(op), DTYPES.index(dtype)


def head_of(packed: bytes, content: Content, window_index: int = 0) -> bytes:
    """Returns the head of a frame.

    Args:
      packed: The description of the exchange, as ``Exchange.packed`` returns it.
      content: The content of the frame.
      window_index: The index of the window.
    """
    return packed + _FRAME.pack(content, window_index)
