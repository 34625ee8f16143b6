"""Combines the arrays of replicas strictly in the order of the replicas' numbers. Pure.

``result[i] = ((r0[i] + r1[i]) + r2[i]) + ...`` for every element, whoever computes it, and wherever an array is cut. So
a change of the process that holds a replica changes no bit. Half precision is added in float32 in the same order, and
rounded once, at the end: a sum in half precision would lose more with each replica.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import ml_dtypes
import numpy as np

from replicax._src.vocabulary.errors import InvalidArgumentError


class HostOp(StrEnum):
    """How elements are combined."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


_FUNCTIONS: Final = {HostOp.SUM: np.add, HostOp.MAX: np.maximum, HostOp.MIN: np.minimum}
_HALF: Final = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_NAMES: Final = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128"
DTYPES: Final = (*map(np.dtype, _NAMES.split()), *_HALF)
"""The dtypes that can be combined. Their places in this tuple are their numbers in messages."""
_BLOCK: Final = 64 * 1024
"""The number of elements that are combined at a time, so that the sum stays in the processor's cache."""


@functools.lru_cache(maxsize=64)
def can_add(dtype: Any) -> bool:
    """True if arrays of a dtype can be added."""
    return dtype in DTYPES and dtype != np.bool_


@functools.lru_cache(maxsize=64)
def check_dtype(op: HostOp, dtype: Any) -> None:
    """Checks that arrays of a dtype can be combined.

    Raises:
      InvalidArgumentError: They cannot.
    """
    if dtype not in DTYPES:
        allowed = ", ".join(each.name for each in DTYPES)
        raise InvalidArgumentError(
            f"An all-reduce on the hosts got the dtype {dtype}; it takes {allowed}. Convert the array."
        )
    if op is HostOp.SUM and dtype == np.bool_:
        raise InvalidArgumentError(
            "An all-reduce on the hosts got the sum of booleans. Convert them to int32 to count them, or take "
            "the maximum to know whether any is true."
        )
    if op is not HostOp.SUM and dtype.kind == "c":
        raise InvalidArgumentError(
            f"An all-reduce on the hosts got the {op}imum of {dtype}: complex numbers have no order. Only sums work."
        )


def combine(op: HostOp, arrays: Sequence[np.ndarray], result: np.ndarray) -> None:
    """Writes the combination of the replicas' arrays [n] to ``result`` [n].

    Args:
      op: The operation.
      arrays: One per replica, in the order of the replicas' numbers.
      result: Memory for the result. It overlaps none of the arrays.
    """
    function, is_half = _FUNCTIONS[op], result.dtype in _HALF
    with np.errstate(all="ignore"):  # infinities are results like others
        if len(result) <= _BLOCK and len(arrays) > 1 and not is_half:
            first, second, *others = arrays
            function(first, second, out=result)
            for other in others:
                function(result, other, out=result)
            return
        for start in range(0, len(result), _BLOCK):
            block = slice(start, start + _BLOCK)
            out = np.empty(len(result[block]), np.float32) if is_half else result[block]
            first, *others = (array[block] for array in arrays)
            if others and not is_half:
                second, *others = others
                function(first, second, out=out)
            else:
                np.copyto(out, first)
            for other in others:
                function(out, other.astype(np.float32) if is_half else other, out=out)
            if is_half:
                np.copyto(result[block], out, casting="unsafe")
