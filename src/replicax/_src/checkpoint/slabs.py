"""Parts of a saved array that are small enough for memory, in the order of its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from replicax._src.checkpoint.saved import SavedValue

SLAB_BYTES: Final = 32 << 20

Index = tuple[slice, ...]


def slabs(array: SavedValue) -> Iterator[tuple[Index, np.ndarray]]:
    """Yields the parts of an array, verified, in C order. Each has its index and at most 32 MiB.

    Raises:
      CorruptCheckpointError: The array is damaged; the message names it.
    """
    try:
        if math.prod(array.shape[1:]) * array.dtype.itemsize > SLAB_BYTES:
            for index in _indices(array.shape, SLAB_BYTES // array.dtype.itemsize):
                yield index, array.read(index)
        else:
            for rows, values in array.slabs(SLAB_BYTES):
                yield (rows,) if array.shape else (), values
    finally:
        array.release()


def _indices(shape: Sequence[int], most: int) -> Iterator[Index]:
    """Yields indices of at most ``most`` elements, which cover a shape in C order."""
    if not shape:
        yield ()
        return
    count, rest = shape[0], tuple(slice(0, size) for size in shape[1:])
    rows = most // max(1, math.prod(shape[1:]))
    if rows:
        for start in range(0, count, rows):
            yield slice(start, min(start + rows, count)), *rest
        return
    for row in range(count):
        for index in _indices(shape[1:], most):
            yield slice(row, row + 1), *index
