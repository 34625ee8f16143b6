"""``ValuesOfChief``: a step whose outputs are arrays of the chief, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np

from replicax._src.fault_tolerance.first_step import StepDigests
from replicax._src.fault_tolerance.stepped_program import CombineRound, RoundArrays

_WORD: Final = np.dtype(np.uint64)


@final
class ValuesOfChief:
    """The bits of all arrays as one array of whole numbers, which is summed: all others add zeros.

    Args:
      arrays: Arrays; those of all members have the same shapes and dtypes.
      is_chief: Returns True in the chief of the epoch.
    """

    def __init__(self, arrays: Sequence[Any], is_chief: Callable[[], bool]):
        self.reductions, self.num_rows = (("sum",),), None
        self._arrays, self._is_chief = [np.asarray(array) for array in arrays], is_chief
        self._num_words = math.ceil(sum(array.nbytes for array in self._arrays) / _WORD.itemsize)

    def digests(self) -> StepDigests:
        """Returns the digest of the shapes and dtypes. The values may differ: all take those of the chief."""
        return StepDigests(f"values {[(array.shape, array.dtype.name) for array in self._arrays]}")

    def sums(self, replicas: Sequence[int], combine: CombineRound) -> list[RoundArrays]:
        own = np.zeros(self._num_words, _WORD)
        others = [np.zeros(self._num_words, _WORD)] * (len(replicas) - 1)
        if self._is_chief():
            memory, at = own.view(np.uint8), 0
            for array in self._arrays:
                memory[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                at += array.nbytes
        return [combine(0, [[own], *([other] for other in others)])]

    def update(self, sums: Sequence[RoundArrays]) -> list[np.ndarray]:
        memory, values, at = sums[0][0].view(np.uint8), [], 0
        for array in self._arrays:
            values.append(memory[at : at + array.nbytes].copy().view(array.dtype).reshape(array.shape))
            at += array.nbytes
        return values
