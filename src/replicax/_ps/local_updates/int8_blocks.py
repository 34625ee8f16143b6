"""Pushes as 8-bit integers with a scale for each block of 256 values.

A scale is a power of two, so ``integers * scales`` is exact: the group and its server get the same bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

BLOCK: Final = 256
_LARGEST: Final = 127


def num_blocks(size: int) -> int:
    """Returns the number of scales of so many values."""
    return -(-size // BLOCK)


def encoded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns int8 [n] and the scales, float32 [blocks]. The scale of a block that is not finite is NaN.

    Args:
      values: float32 [n].
    """
    padded = np.zeros((num_blocks(values.size), BLOCK), np.float32)
    padded.reshape(-1)[: values.size] = values
    with np.errstate(invalid="ignore"):
        largest = np.abs(padded).max(axis=1)
        _, exponents = np.frexp(largest / np.float32(_LARGEST))
        scales = np.where(np.isfinite(largest), np.ldexp(np.float32(1), exponents), np.nan).astype(np.float32)
        integers = np.rint(padded / scales[:, None])
    integers = np.nan_to_num(integers, copy=False).clip(-_LARGEST, _LARGEST)
    return integers.astype(np.int8).reshape(-1)[: values.size], scales


def decoded(integers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the float32 [n] that the server adds."""
    return integers.astype(np.float32) * np.repeat(scales, BLOCK)[: integers.size]
