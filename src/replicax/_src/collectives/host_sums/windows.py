"""The cut of an array: windows, which are exchanged one after the other, and each member's part of a window. Pure."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Final, final

from replicax._src.wire.buffers import ALIGNMENT, aligned

WINDOW_BYTES: Final = 4 * 2**20
"""The bytes of each replica in one window."""


@final
@dataclass(frozen=True)
class Window:
    """Elements ``start`` to ``stop`` of an array, without ``stop``.

    Attributes:
      index: The index of the window in the array.
      parts: The slice of each member, in elements of the array. Small windows have empty ones.
    """

    index: int
    start: int
    stop: int
    parts: tuple[slice, ...]


@functools.lru_cache(maxsize=256)
def windows_of(length: int, item_bytes: int, num_members: int) -> tuple[Window, ...]:
    """Returns the windows of an array. Each begins, and each part of it begins, at a multiple of 64 bytes.

    Args:
      length: The number of elements, at least 1.
      item_bytes: The bytes of an element.
      num_members: The number of members.
    """
    per_window, per_line = WINDOW_BYTES // item_bytes, ALIGNMENT // item_bytes
    windows = []
    for index, start in enumerate(range(0, length, per_window)):
        stop = min(start + per_window, length)
        lines = -(-(stop - start) // per_line)
        per_member = -(-lines // num_members) * per_line
        cuts = [min(start + place * per_member, stop) for place in range(num_members + 1)]
        parts = tuple(slice(low, high) for low, high in itertools.pairwise(cuts))
        windows.append(Window(index, start, stop, parts))
    return tuple(windows)


def part_bytes(num_members: int) -> int:
    """Returns the most bytes of a part, a multiple of 64."""
    return aligned(-(-WINDOW_BYTES // num_members))
