"""Memory into which messages are received. It is aligned so that JAX adopts it without a copy, and it is reused.
Pure.

A new block of 64 MB costs more than the copy into it, because its pages are made when they are first touched. JAX
keeps
the memory that it adopts, so a block is reused only after all arrays in it are deleted.
"""

from __future__ import annotations

from collections import deque
from typing import Any, final

import numpy as np

ALIGNMENT = 64
_MOST_IDLE = 3


def aligned(num_bytes: int) -> int:
    """Returns the next multiple of 64."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_empty(num_bytes: int) -> np.ndarray:
    """Returns uint8 memory at a multiple of 64."""
    block = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -_address(block) % ALIGNMENT
    return block[start : start + num_bytes]


def _address(block: np.ndarray) -> int:
    return block.__array_interface__["data"][0]  # half of the time of `ctypes.data`


@final
class Buffers:
    """Blocks of memory to receive into, for one connection. It keeps at most three idle blocks.

    One thread at a time may call ``take``; blocks are returned from any thread.
    """

    def __init__(self) -> None:
        # The block that has been idle for longest is dropped first.
        self._idle: deque[np.ndarray] = deque(maxlen=_MOST_IDLE)

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns uninitialized uint8 memory of that size or up to twice as much, at a multiple of 64."""
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
        """Returns this memory, read-only. The block becomes idle again when the array and all its views are deleted."""
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
