"""Host memory that devices can take over without another copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# Bytes. XLA's CPU client takes aligned NumPy arrays as they are, and accelerators copy them fast.
_ALIGNMENT = 64
_SMALL = 64 * 1024  # up to there the devices' own copy is cheaper than an aligned array


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an aligned array with any contents."""
    dtype = np.dtype(dtype)
    num_bytes = dtype.itemsize * math.prod(shape)
    if not num_bytes:
        return np.empty(shape, dtype)
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def copy(array: np.ndarray) -> np.ndarray:
    """Returns a copy that nobody else writes into, aligned where that pays."""
    if array.nbytes <= _SMALL:
        return array.copy()
    result = empty(array.shape, array.dtype)
    np.copyto(result, array)
    return result


def take(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the rows with the given numbers, aligned where that pays."""
    if not array.flags.c_contiguous:
        return array[rows]  # np.take copies all of such an array
    if array.itemsize * math.prod(array.shape[1:]) * len(rows) <= _SMALL:
        return array.take(rows, axis=0)
    result = empty((len(rows), *array.shape[1:]), array.dtype)
    # Other modes copy once more; the numbers are in range.
    return np.take(array, rows, axis=0, out=result, mode="clip")


def stack(arrays: Sequence[np.ndarray], capacity: int) -> np.ndarray:
    """Returns arrays of one shape joined along a new first dim of size ``capacity``; what is too much is zero."""
    result = empty((capacity, *arrays[0].shape), arrays[0].dtype)
    for number, array in enumerate(arrays):
        result[number] = array
    result[len(arrays) :] = 0
    return result


def concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns arrays ``[n, ...]`` one after the other."""
    result = empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=result)
