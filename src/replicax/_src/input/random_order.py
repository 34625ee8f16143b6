"""Random orders of rows, of which any part can be computed without the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, final

import numpy as np

_NUM_DRAWN: Final = 2**16
"""Up to so many rows an order is drawn as a whole (512 KiB), so that every order is possible."""

_BLOCK: Final = 2**12
_NUM_ROUNDS: Final = 8
# The two multipliers of splitmix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014).
_FIRST_FACTOR: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR: Final = np.uint64(0x94D049BB133111EB)
_THIRD: Final = np.uint64(21)
_HALF: Final = np.uint64(32)


class RandomOrder(Protocol):
    """An order of ``length`` rows."""

    def places(self, start: int, most: int) -> np.ndarray:
        """Returns the old places of one to ``most`` adjacent rows of the new order, from ``start`` on."""
        ...


def random_order(seeds: Sequence[int], length: int) -> RandomOrder:
    """Returns the order that follows from the seeds."""
    return DrawnOrder(seeds, length) if length <= _NUM_DRAWN else CipherOrder(seeds, length)


@final
class DrawnOrder:
    """An order that is drawn as a whole, from all orders. Its memory grows with the rows."""

    def __init__(self, seeds: Sequence[int], length: int):
        self._places = np.random.default_rng(tuple(seeds)).permutation(length)

    def places(self, start: int, most: int) -> np.ndarray:
        return self._places[start : start + most]


@final
class CipherOrder:
    """An order that is computed, a block of rows at a time: the place of a row is its number, encrypted.

    The cipher is a Feistel network over the numbers of ``num_bits`` bits. A result that is no row is encrypted again
    until it is one (cycle walking), which takes less than two encryptions on average. So each row occurs once, and
    memory and the time to any position are the same for every number of rows.
    """

    def __init__(self, seeds: Sequence[int], length: int):
        num_bits = max(2, (length - 1).bit_length())
        self._length = length
        self._low_bits = np.uint64(num_bits // 2)
        self._low_mask = np.uint64((1 << num_bits // 2) - 1)
        self._high_mask = np.uint64((1 << num_bits - num_bits // 2) - 1)
        keys = np.random.default_rng(tuple(seeds)).integers(2**64, size=(_NUM_ROUNDS, 2), dtype=np.uint64)
        self._keys = keys
        self._start, self._block = -1, np.empty(0, np.intp)

    def places(self, start: int, most: int) -> np.ndarray:
        first = start - start % _BLOCK
        if first != self._start:
            numbers = np.arange(first, min(first + _BLOCK, self._length), dtype=np.uint64)
            self._start, self._block = first, self._rows(numbers).astype(np.intp)
        return self._block[start - first : start - first + most]

    def _rows(self, numbers: np.ndarray) -> np.ndarray:
        rows = self._encrypted(numbers)
        while len(outside := np.flatnonzero(rows >= self._length)):
            rows[outside] = self._encrypted(rows[outside])
        return rows

    def _encrypted(self, numbers: np.ndarray) -> np.ndarray:
        high, low = numbers >> self._low_bits, numbers & self._low_mask
        for number, keys in enumerate(self._keys):
            if number % 2:
                low ^= _mixed(high, keys) & self._low_mask
            else:
                high ^= _mixed(low, keys) & self._high_mask
        return (high << self._low_bits) | low


def _mixed(numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns 64 bits that depend on all bits of a number and of its keys."""
    mixed = numbers + keys[0]
    mixed *= _FIRST_FACTOR  # NumPy's arrays wrap around
    mixed ^= mixed >> _HALF
    mixed += keys[1]
    mixed *= _SECOND_FACTOR
    mixed >>= _THIRD
    return mixed
