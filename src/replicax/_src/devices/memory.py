"""Host memory that devices can take over without another copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# In bytes. XLA's CPU client takes aligned NumPy arrays without a copy, and accelerators copy them fast.
_ALIGNMENT = 64
_SMALL = 64 * 1024  # bytes; for smaller arrays the devices' own copy is cheaper than an aligned array


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an aligned array with arbitrary contents."""
    dtype = np.dtype(dtype)
    num_bytes = dtype.itemsize * math.prod(shape)
    if not num_bytes:
        return np.empty(shape, dtype)
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def copy(array: np.ndarray) -> np.ndarray:
    """Returns a copy that nobody else writes into, aligned if that is faster."""
    if array.nbytes <= _SMALL:
        return array.copy()
    result = empty(array.shape, array.dtype)
    np.copyto(result, array)
    return result


def take(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the rows with the given numbers, aligned if that is faster."""
    if not array.flags.c_contiguous:
        return array[rows]  # np.take would copy all of such an array
    if array.nbytes * len(rows) <= _SMALL * len(array):
        return array.take(rows, axis=0)
    result = empty((len(rows), *array.shape[1:]), array.dtype)
    # Other modes copy once more, and the numbers are in range.
    return np.take(array, rows, axis=0, out=result, mode="clip")


def stack(arrays: Sequence[np.ndarray], capacity: int) -> np.ndarray:
    """Returns arrays of one shape stacked along a new first dim of size ``capacity``, filled up with zeros."""
    result = empty((capacity, *arrays[0].shape), arrays[0].dtype)
    for number, array in enumerate(arrays):
        result[number] = array
    result[len(arrays) :] = 0
    return result


def concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns arrays ``[n, ...]`` joined along the first dim."""
    result = empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=result)
