"""``HostBuffers``: memory on the host for the copies of saves, kept from one save to the next.

The first use of new memory takes several times longer than a copy into used memory, because the system clears each
page. A manager that saves continuously prepares the memory in a thread before its first save.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Final, final

import numpy as np

from replicax._src.checkpoint.background import Background
from replicax._src.cluster.turns import turns

Key = tuple[str, tuple[int, ...]]
"""The folder of an array, and where the copied part begins."""

_TOUCH_BYTES: Final = 2 << 20  # a save waits so long for the thread


@final
class HostBuffers:
    """Memory for one copy of what this process writes, by keys that name the copies."""

    def __init__(self) -> None:
        self._buffers: dict[Key, np.ndarray] = {}
        self._wanted: dict[bool, set[Key]] = {}
        self._in_use = threading.Lock()
        self._preparing = Background()
        self._is_needed = False  # a save begins, or nobody saves any more

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def prepare(self, shapes: Mapping[Key, tuple[tuple[int, ...], np.dtype]]) -> None:
        """Allocates memory in a thread for the copies that the next save will make. When that save begins, the thread
        ends, and the save allocates the rest.

        Args:
          shapes: The shapes and dtypes of the copies by key.
        """
        self._end_preparing()
        lacking = {key: about for key, about in shapes.items() if key not in self._buffers}
        if lacking:
            self._is_needed = False
            self._preparing.start(lambda: self._allocate(lacking))

    def _allocate(self, shapes: Mapping[Key, tuple[tuple[int, ...], np.dtype]]) -> None:
        try:
            for key, (shape, dtype) in shapes.items():
                buffer = np.empty(shape, dtype)
                self._buffers[key] = buffer
                pages = buffer.reshape(-1).view(np.uint8)
                for start in range(0, pages.size, _TOUCH_BYTES):
                    if self._is_needed:
                        return
                    pages[start : start + _TOUCH_BYTES] = 0
        except MemoryError:  # the save raises it, if there is still no memory
            pass

    def _end_preparing(self) -> None:
        self._is_needed = True
        self._preparing.wait()

    def reserve(self) -> None:
        """Waits until no save uses the memory, and reserves it for the next one."""
        self._end_preparing()
        for turn_s in turns():
            if self._in_use.acquire(timeout=-1 if turn_s is None else turn_s):
                return

    def free(self) -> None:
        """Ends the use by a save, in any thread."""
        self._in_use.release()

    def copy(self, key: Key, value: np.ndarray) -> np.ndarray:
        """Returns a copy of an array, which stays unchanged until the next copy under this key."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = self._buffers[key] = np.empty(value.shape, value.dtype)
        np.copyto(buffer, value)
        return buffer

    def clear(self) -> None:
        """Frees the memory."""
        self._end_preparing()
        self._buffers.clear()

    def keep_only(self, tier: bool, keys: Iterable[Key]) -> None:
        """Frees the memory of keys that the last copy did not use, of this tier or of the other one."""
        self._wanted[tier] = set(keys)
        wanted = set().union(*self._wanted.values())
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in wanted}
