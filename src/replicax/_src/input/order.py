"""The order in which the rows of arrays are visited, as numbers: shuffled, repeated, cut into batches.

An order is walked in blocks of row numbers, so that no Python runs per row; a block is a ``range`` where
the rows are adjacent, so that it can be read as a slice. Each pass over the data has a path: the number
of the pass, then that of each repetition inside it; equal seeds and paths give equal orders. Pure.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Final, final

import numpy as np

Rows = range | np.ndarray
Path = tuple[int, ...]

Cardinality = int | float
INFINITE: Final[float] = math.inf
"""The cardinality of what never ends."""


class Order(abc.ABC):
    """A sequence of elements, which are rows, or (from ``Batches`` on) batches of rows."""

    @property
    @abc.abstractmethod
    def length(self) -> Cardinality:
        """The number of elements, or INFINITE."""

    @abc.abstractmethod
    def blocks(self, path: Path) -> Iterator[Rows]:
        """Yields row numbers: of one batch each, or of any number of rows where these are the elements."""


@final
class InOrder(Order):
    """The rows as they stand."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows

    @property
    def length(self) -> Cardinality:
        return self._num_rows

    def blocks(self, path: Path) -> Iterator[Rows]:
        yield range(self._num_rows)


@final
class ShuffledRows(Order):
    """All rows of a finite order in random order, a new one for each path if ``reshuffle``."""

    def __init__(self, parent: Order, seed: int, reshuffle: bool):
        self._parent, self._seed, self._reshuffle = parent, seed, reshuffle

    @property
    def length(self) -> Cardinality:
        return self._parent.length

    def blocks(self, path: Path) -> Iterator[Rows]:
        rows = _concatenate(self._parent.blocks(path))
        yield _generator(self._seed, path, self._reshuffle).permutation(rows)


@final
class ShuffledBatches(Order):
    """All batches of a finite order in random order; the rows of a batch stay together."""

    def __init__(self, parent: Order, seed: int, reshuffle: bool):
        self._parent, self._seed, self._reshuffle = parent, seed, reshuffle

    @property
    def length(self) -> Cardinality:
        return self._parent.length

    def blocks(self, path: Path) -> Iterator[Rows]:
        batches = list(self._parent.blocks(path))
        for index in _generator(self._seed, path, self._reshuffle).permutation(len(batches)):
            yield batches[index]


@final
class Repeated(Order):
    """An order ``count`` times over, or for ever if that is None."""

    def __init__(self, parent: Order, count: int | None):
        self._parent, self._count = parent, count

    @property
    def length(self) -> Cardinality:
        if self._parent.length == 0 or self._count == 0:
            return 0  # never INFINITE * 0
        return INFINITE if self._count is None else self._parent.length * self._count

    def blocks(self, path: Path) -> Iterator[Rows]:
        if self.length == 0:
            return  # an empty order repeated for ever ends at once
        for repetition in itertools.count() if self._count is None else range(self._count):
            yield from self._parent.blocks((*path, repetition))


@final
class FirstRows(Order):
    """The first rows of an order."""

    def __init__(self, parent: Order, count: int):
        self._parent, self._count = parent, count

    @property
    def length(self) -> Cardinality:
        return min(self._parent.length, self._count)

    def blocks(self, path: Path) -> Iterator[Rows]:
        missing = self._count
        for block in self._parent.blocks(path) if missing else ():
            yield block[:missing]
            missing -= min(missing, len(block))
            if not missing:
                return


@final
class FirstBatches(Order):
    """The first batches of an order."""

    def __init__(self, parent: Order, count: int):
        self._parent, self._count = parent, count

    @property
    def length(self) -> Cardinality:
        return min(self._parent.length, self._count)

    def blocks(self, path: Path) -> Iterator[Rows]:
        return itertools.islice(self._parent.blocks(path), self._count)


@final
class Batches(Order):
    """An order of rows cut every ``batch_size`` rows; the last batch may be smaller, or is dropped."""

    def __init__(self, rows: Order, batch_size: int, drop_remainder: bool):
        self._rows, self._batch_size, self._drop_remainder = rows, batch_size, drop_remainder

    @property
    def length(self) -> Cardinality:
        num_rows = self._rows.length
        if num_rows == INFINITE:
            return INFINITE
        full, remainder = divmod(int(num_rows), self._batch_size)
        return full + bool(remainder and not self._drop_remainder)

    def blocks(self, path: Path) -> Iterator[Rows]:
        pieces: list[Rows] = []
        missing = self._batch_size
        for block in self._rows.blocks(path):
            start = 0
            while start < len(block):
                piece = block[start : start + missing]
                pieces.append(piece)
                start += len(piece)
                missing -= len(piece)
                if not missing:
                    yield _join(pieces)
                    pieces, missing = [], self._batch_size
        if pieces and not self._drop_remainder:
            yield _join(pieces)


def _join(pieces: list[Rows]) -> Rows:
    """One block of several; a batch has more than one piece only where repetitions meet in it."""
    return pieces[0] if len(pieces) == 1 else _concatenate(pieces)


def _concatenate(blocks: Iterable[Rows]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.intp), *(np.asarray(block, np.intp) for block in blocks)])


def _generator(seed: int, path: Path, reshuffle: bool) -> np.random.Generator:
    return np.random.default_rng((seed, *path) if reshuffle else (seed,))
