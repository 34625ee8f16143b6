"""Partitioners: the number of shards of a variable, and the rows of each shard. Pure: no jax.

A variable is cut along its first dim only, into contiguous shards whose sizes differ by at most one row, larger first
(TensorFlow's "div" sharding): shard i is the half-open interval of rows ``[start, stop)``.
"""

from __future__ import annotations

import abc
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import SupportsIndex, final

import numpy as np
from numpy.typing import DTypeLike

from replicax._src.devices.split import split_offsets
from replicax._src.values.dtypes import as_dtype
from replicax._src.vocabulary.errors import InvalidArgumentError


class Partitioner(abc.ABC):
    """Returns the number of parts of a variable along each dim. Subclasses define ``__call__``.

    A function of ``shape`` and ``dtype`` is a partitioner, too. For ``ParameterServerStrategy`` all numbers but the
    first must be 1.

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.Partitioner``.
    """

    @abc.abstractmethod
    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of parts along each dim of ``shape``.

        Args:
          shape: The shape of the variable.
          dtype: The dtype of the variable: a NumPy dtype or its name, or "string".
          axis: The dim to cut; negative ones count from the last.
        """


@final
class FixedShardsPartitioner(Partitioner):
    """Cuts a variable into ``num_shards`` parts, but no more than there are rows.

    Args:
      num_shards: At least 1.

    Raises:
      InvalidArgumentError: ``num_shards`` is not positive.

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.FixedShardsPartitioner``.

    >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int):
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        del dtype
        return _along(axis, shape, lambda num_rows: min(self._num_shards, num_rows))

    def __repr__(self) -> str:
        return f"FixedShardsPartitioner({self._num_shards})"


@final
class MinSizePartitioner(Partitioner):
    """Cuts a variable into as many parts of about ``min_shard_bytes`` as possible, but no more than ``max_shards``.

    The number is ceil(bytes of the variable / min_shard_bytes), as in TensorFlow, so parts may be a little smaller.
    With the default ``max_shards`` no variable is cut.

    Args:
      min_shard_bytes: Default: 256 KiB.
      max_shards: Default: 1.
      bytes_per_string: The assumed size of a string.

    Raises:
      InvalidArgumentError: An argument is not positive.

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.MinSizePartitioner``.

    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
    [2, 1]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16):
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        num_bytes = math.prod(shape) * _element_bytes(dtype, self._bytes_per_string)
        enough = math.ceil(num_bytes / self._min_shard_bytes)
        return _along(axis, shape, lambda num_rows: min(num_rows, self._max_shards, enough))

    def __repr__(self) -> str:
        return f"MinSizePartitioner(min_shard_bytes={self._min_shard_bytes}, max_shards={self._max_shards})"


@final
class MaxSizePartitioner(Partitioner):
    """Cuts a variable into as few parts of at most ``max_shard_bytes`` as possible, but no more than ``max_shards``.

    Args:
      max_shard_bytes: The largest size of a part. Parts are larger if ``max_shards`` is reached or one row is larger.
      max_shards: Default: no limit.
      bytes_per_string: The assumed size of a string.

    Raises:
      InvalidArgumentError: An argument is not positive.

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.MaxSizePartitioner``.

    >>> MaxSizePartitioner(max_shard_bytes=10)((6, 1), "float32")
    [3, 1]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16):
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        element_bytes = _element_bytes(dtype, self._bytes_per_string)

        def count(num_rows: int) -> int:
            row_bytes = math.prod(shape) // num_rows * element_bytes if num_rows else 0
            rows_per_shard = max(1, self._max_shard_bytes // row_bytes) if row_bytes else max(1, num_rows)
            needed = math.ceil(num_rows / rows_per_shard)
            return needed if self._max_shards is None else min(self._max_shards, needed)

        return _along(axis, shape, count)

    def __repr__(self) -> str:
        return f"MaxSizePartitioner(max_shard_bytes={self._max_shard_bytes}, max_shards={self._max_shards})"


def partition(
    partitioner: Callable[..., Sequence[int]] | None, shape: Sequence[int], dtype: DTypeLike
) -> list[tuple[int, int]]:
    """Returns the rows ``[start, stop)`` of each shard of a new variable; nothing if it stays in one piece.

    Raises:
      InvalidArgumentError: The partitioner did not return ``[n, 1, 1, ...]`` with n of at least 1.
    """
    num_shards = num_shards_of(partitioner, shape, dtype)
    return shard_rows(shape[0], num_shards) if num_shards > 1 else []


def num_shards_of(
    partitioner: Callable[..., Sequence[int]] | None, shape: Sequence[int], dtype: DTypeLike
) -> int:
    """Returns the number of shards of a new variable, at least 1. A scalar, or a variable without partitioner, has 1.

    Raises:
      InvalidArgumentError: The partitioner did not return ``[n, 1, 1, ...]`` with n of at least 1.
    """
    shape = tuple(shape)
    if partitioner is None or not shape:
        return 1
    counts = partitioner(shape=shape, dtype=dtype)
    is_valid = (
        isinstance(counts, (list, tuple))
        and len(counts) == len(shape)
        and all(isinstance(count, (int, np.integer)) for count in counts)
        and counts[0] >= 1
        and all(count == 1 for count in counts[1:])
    )
    if not is_valid:
        raise InvalidArgumentError(
            f"variable_partitioner must return a list/tuple whose elements are 1 besides the first element (non-zero), "
            f"got: {counts!r}. For a variable of shape {shape} that is {len(shape)} numbers, the first of them at "
            f"least 1: variables are cut along their first dim only."
        )
    return max(1, min(int(counts[0]), shape[0]))


def shard_rows(num_rows: int, num_shards: int) -> list[tuple[int, int]]:
    """Returns the rows ``[start, stop)`` of each shard.

    >>> shard_rows(10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    return list(itertools.pairwise(split_offsets(num_rows, num_shards)))


def _along(axis: int, shape: Sequence[int], count: Callable[[int], int]) -> list[int]:
    """Returns ``count(size)`` for dim ``axis``, at least 1, and 1 for every other dim."""
    num_dims = len(shape)
    if not -num_dims <= axis < num_dims:
        raise InvalidArgumentError(
            f"Cannot partition variable along axis {axis} when shape is only {tuple(shape)}: it has {num_dims} dims."
        )
    counts = [1] * num_dims
    counts[axis] = max(1, count(int(shape[axis])))
    return counts


def _element_bytes(dtype: DTypeLike, bytes_per_string: int) -> int:
    if isinstance(dtype, str) and dtype == "string":
        return bytes_per_string
    dtype = np.dtype(as_dtype(dtype))
    return bytes_per_string if dtype.kind in "SUO" else dtype.itemsize


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < 1:
        raise InvalidArgumentError(
            f"Argument `{name}` must be positive. Received: {value!r}. Give a whole number of at least 1."
        )
    return operator.index(value)
