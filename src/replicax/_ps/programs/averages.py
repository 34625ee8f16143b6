"""The mean of the gradients of several closures. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from replicax._ps.programs.programs import Averaging
from replicax._ps.store.held_values import Spec
from replicax._src.program_kit.errors import InvalidArgumentError

NO_ROW: Final = -1
"""A row number that stands for padding."""


def takes(kinds: Sequence[Averaging], specs: Sequence[Spec], arrays: Sequence[np.ndarray]) -> bool:
    """True if an update of averaged gradients accepts these arrays.

    Args:
      kinds: The averaging of each operand.
      specs: The shapes and dtypes of the update's operands. Those of rows have room for several closures' rows.
      arrays: The gradients of one closure.
    """
    have_rows = [kind == "rows" for kind in kinds for _ in range(2 if kind == "rows" else 1)]
    return len(arrays) == len(specs) == len(have_rows) and all(
        array.dtype == dtype and (array.shape == shape or (rows and _is_part(array.shape, shape)))
        for array, (shape, dtype), rows in zip(arrays, specs, have_rows)
    )


def averaged(
    kinds: Sequence[Averaging], specs: Sequence[Spec], gradients: Sequence[Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Returns the averaged operands of one update.

    Args:
      kinds: The averaging of each operand.
      specs: The shapes and dtypes of the update's operands.
      gradients: The gradients of each closure. They stay as they are, for an update that fails and is tried again.
    """
    means: list[np.ndarray] = []
    for kind in kinds:
        at = len(means)
        parts = [each[at] for each in gradients]
        if kind == "rows":
            means += _mean_of_rows(parts, [each[at + 1] for each in gradients], specs[at + 1])
        elif kind == "all":
            means.append(np.logical_and.reduce(parts))
        else:
            means.append(_mean(parts))
    return means


def _mean(parts: Sequence[np.ndarray]) -> np.ndarray:
    total = np.array(parts[0], _dtype_of_sum(parts[0].dtype))
    for part in parts[1:]:
        total += part
    total /= len(parts)
    return total.astype(parts[0].dtype, copy=False)


def _mean_of_rows(
    numbers: Sequence[np.ndarray], parts: Sequence[np.ndarray], spec: Spec
) -> tuple[np.ndarray, np.ndarray]:
    """Returns each row that any closure has, once. A closure without that row counts as a gradient of 0."""
    shape, dtype = spec
    unique, positions = np.unique(np.concatenate(numbers), return_inverse=True)
    if len(unique) > shape[0]:
        raise InvalidArgumentError(
            f"An update needs {len(unique)} rows of a table, but its program has room for {shape[0]}. Give "
            "the functions of a round elements of the same shapes."
        )
    rows = np.zeros(shape, _dtype_of_sum(dtype))
    ends = np.cumsum([len(each) for each in numbers])
    for part, ours in zip(parts, np.split(positions.reshape(-1), ends[:-1]), strict=True):
        rows[ours] += part  # (no row appears twice, except padding)
    rows /= len(parts)
    padded = np.full(shape[0], NO_ROW, np.int32)
    padded[: len(unique)] = unique
    return padded, rows.astype(dtype, copy=False)


def _dtype_of_sum(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns float32 for half precision, because a sum of many terms needs more bits; else the dtype itself."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def _is_part(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(shape) == len(whole) and shape[0] <= whole[0] and tuple(shape[1:]) == tuple(whole[1:])
