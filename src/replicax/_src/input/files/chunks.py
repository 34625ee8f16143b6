"""Chunks: adjacent rows of a dataset, as a list of elements or as columns, and how they are cut and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replicax._src.input import memory
from replicax._src.input.arrays import batch_of_rows

Chunk = list[Any] | Mapping[str, np.ndarray]
"""A list of rows, or columns ``{name: [num_rows, ...]}``. No rows at all may be an empty list in both cases."""


def num_rows_of(chunk: Chunk) -> int:
    """Returns how many rows a chunk has."""
    return len(chunk) if isinstance(chunk, list) else len(next(iter(chunk.values())))


def rows_of(chunk: Chunk) -> list[Any]:
    """Returns the rows one by one; a row of columns is a dict of numbers or arrays."""
    if isinstance(chunk, list):
        return chunk
    return [{name: column[row] for name, column in chunk.items()} for row in range(num_rows_of(chunk))]


def cut(chunk: Chunk, rows: slice) -> Chunk:
    """Returns some adjacent rows, or every k-th, without copying columns."""
    if isinstance(chunk, list):
        return chunk[rows]
    return {name: column[rows] for name, column in chunk.items()}


def take(chunk: Chunk, rows: np.ndarray) -> Chunk:
    """Returns the rows with the given numbers."""
    if isinstance(chunk, list):
        return [chunk[row] for row in rows]
    return {name: memory.take(column, rows) for name, column in chunk.items()}


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Returns chunks of one dataset one after the other; columns are copied only if there are several."""
    filled = [chunk for chunk in chunks if num_rows_of(chunk)]
    if len(filled) <= 1:
        return filled[0] if filled else []
    if isinstance(filled[0], list):
        return [row for chunk in filled for row in rows_of(chunk)]
    return {name: _concatenate([chunk[name] for chunk in filled]) for name in filled[0]}  # type: ignore[index]


def batch_of(chunk: Chunk) -> Any:
    """Returns a nest of arrays ``[num_rows, ...]``: see ``batch_of_rows``."""
    return batch_of_rows(chunk) if isinstance(chunk, list) else chunk


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    result = memory.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=result)
