"""Memory that messages are received into: aligned as JAX adopts it without a copy, and used again. Pure.

A fresh block of 64 MB costs more (its pages are made when they are first touched) than the copy into it. JAX keeps what
it adopts, so a block is used again only when nobody has an array in it any more: then, and not before, it comes back.
"""

from __future__ import annotations

from collections import deque
from typing import Any, final

import numpy as np

ALIGNMENT = 64
_MOST_IDLE = 3


def aligned(num_bytes: int) -> int:
    """The next multiple of 64."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_empty(num_bytes: int) -> np.ndarray:
    """uint8 memory at a multiple of 64."""
    block = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -_address(block) % ALIGNMENT
    return block[start : start + num_bytes]


def _address(block: np.ndarray) -> int:
    return block.__array_interface__["data"][0]  # half of the time of `ctypes.data`


@final
class Buffers:
    """Blocks of memory to receive into, for one stream; three at most are kept while nobody uses them.

    ``take`` is for one thread at a time; blocks come back on any.
    """

    def __init__(self) -> None:
        # That which has been idle longest goes first.
        self._idle: deque[np.ndarray] = deque(maxlen=_MOST_IDLE)

    def take(self, num_bytes: int) -> np.ndarray:
        """uint8 memory of that size or up to twice as much, at a multiple of 64, with anything in it."""
        found = None
        others = []
        while self._idle:
            block = self._idle.pop()
            if found is None and num_bytes <= len(block) <= 2 * num_bytes:
                found = block
            else:
                others.append(block)
        self._idle.extend(reversed(others))
        return aligned_empty(num_bytes) if found is None else found

    def lend(self, memory: np.ndarray) -> np.ndarray:
        """Returns this memory, read-only. It comes back here when the array and all views of it are gone."""
        return np.asarray(_Lease(memory, self._idle))


@final
class _Lease:
    """The last base of the arrays of a message."""

    __slots__ = ("_idle", "_memory")

    def __init__(self, memory: np.ndarray, idle: deque[np.ndarray]):
        self._memory = memory
        self._idle = idle

    @property
    def __array_interface__(self) -> dict[str, Any]:
        is_read_only = True
        return {
            "shape": self._memory.shape,
            "typestr": "|u1",
            "data": (_address(self._memory), is_read_only),
            "version": 3,
        }

    def __del__(self) -> None:
        self._idle.append(self._memory)  # one step, without a lock: it may run at any moment, on any thread
