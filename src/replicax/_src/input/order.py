"""The order in which the rows of arrays are visited, as numbers: shuffled, repeated, cut into batches.

An order is walked in blocks of row numbers, so that no Python runs per row; a block is a ``range`` where
the rows are adjacent, so that it can be read as a slice. Each pass over the data has a path: the number
of the pass, then that of each repetition inside it; equal seeds and paths give equal orders. Pure.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

Rows = range | np.ndarray
Path = tuple[int, ...]

Cardinality = int | float
INFINITE: Final[float] = math.inf
"""The cardinality of what never ends."""


@dataclass
class PassCounter:
    """Numbers the passes over a dataset, which may be in the hands of several who iterate it."""

    num_begun: int = 0

    def begin(self) -> int:
        """Returns the number of the pass that begins now."""
        self.num_begun += 1
        return self.num_begun - 1

    def give_back(self, number: int) -> None:
        """Takes a pass back that was begun last and of which nothing was read."""
        if self.num_begun == number + 1:
            self.num_begun = number


class Order(abc.ABC):
    """A sequence of elements, which are rows, or (from ``Batches`` on) batches of rows."""

    @property
    @abc.abstractmethod
    def length(self) -> Cardinality:
        """The number of elements, or INFINITE."""

    @abc.abstractmethod
    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        """Yields row numbers: of one batch each, or of any number of rows where these are the elements.

        Args:
          path: See above.
          start: The first element to yield; the epochs before it are not walked through.
        """


@final
@dataclass(frozen=True)
class InOrder(Order):
    """The rows as they stand."""

    num_rows: int

    @property
    def length(self) -> Cardinality:
        return self.num_rows

    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        yield range(min(start, self.num_rows), self.num_rows)


@final
@dataclass(frozen=True)
class ShuffledRows(Order):
    """All rows of a finite order in random order, a new one for each path if ``reshuffle``."""

    parent: Order
    seed: int
    reshuffle: bool

    @property
    def length(self) -> Cardinality:
        return self.parent.length

    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        rows = _concatenate(self.parent.blocks(path))
        yield _generator(self.seed, path, self.reshuffle).permutation(rows)[start:]


@final
@dataclass(frozen=True)
class ShuffledBatches(Order):
    """All batches of a finite order in random order; the rows of a batch stay together."""

    parent: Order
    seed: int
    reshuffle: bool

    @property
    def length(self) -> Cardinality:
        return self.parent.length

    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        batches = list(self.parent.blocks(path))
        for index in _generator(self.seed, path, self.reshuffle).permutation(len(batches))[start:]:
            yield batches[index]


@final
@dataclass(frozen=True)
class Repeated(Order):
    """An order ``count`` times over, or for ever if that is None."""

    parent: Order
    count: int | None

    @property
    def length(self) -> Cardinality:
        if self.parent.length == 0 or self.count == 0:
            return 0  # never INFINITE * 0
        return INFINITE if self.count is None else self.parent.length * self.count

    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        if self.length == 0:
            return  # an empty order repeated for ever ends at once
        first, start = (
            (0, start) if self.parent.length == INFINITE else divmod(start, int(self.parent.length))
        )
        for repetition in itertools.count(first) if self.count is None else range(first, self.count):
            yield from self.parent.blocks((*path, repetition), start)
            start = 0


@final
@dataclass(frozen=True)
class FirstRows(Order):
    """The first rows of an order."""

    parent: Order
    count: int

    @property
    def length(self) -> Cardinality:
        return min(self.parent.length, self.count)

    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        missing = max(self.count - start, 0)
        for block in self.parent.blocks(path, start) if missing else ():
            yield block[:missing]
            missing -= min(missing, len(block))
            if not missing:
                return


@final
@dataclass(frozen=True)
class FirstBatches(Order):
    """The first batches of an order."""

    parent: Order
    count: int

    @property
    def length(self) -> Cardinality:
        return min(self.parent.length, self.count)

    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        return itertools.islice(self.parent.blocks(path, start), max(self.count - start, 0))


@final
@dataclass(frozen=True)
class ShardOfRows(Order):
    """Every ``num_shards``-th row of an order, from the row ``index`` on; all if these are to be said later."""

    parent: Order
    num_shards: int | None
    index: int | None

    @property
    def length(self) -> Cardinality:
        return _shard_length(self.parent.length, self.num_shards, self.index)

    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        step, skip = self.num_shards or 1, self.index or 0
        skip += start * step
        position = skip
        for block in self.parent.blocks(path, skip):
            if len(block):
                yield block[skip - position :: step] if skip - position < len(block) else block[:0]
                position += len(block)
                skip += -(-max(position - skip, 0) // step) * step


@final
@dataclass(frozen=True)
class ShardOfBatches(Order):
    """Every ``num_shards``-th batch of an order, from the batch ``index`` on; all if these are to be said later."""

    parent: Order
    num_shards: int | None
    index: int | None

    @property
    def length(self) -> Cardinality:
        return _shard_length(self.parent.length, self.num_shards, self.index)

    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        step, skip = self.num_shards or 1, self.index or 0
        return itertools.islice(self.parent.blocks(path, skip + start * step), 0, None, step)


@final
@dataclass(frozen=True)
class Batches(Order):
    """An order of rows cut every ``batch_size`` rows; the last batch may be smaller, or is dropped."""

    parent: Order
    batch_size: int
    drop_remainder: bool

    @property
    def length(self) -> Cardinality:
        num_rows = self.parent.length
        if num_rows == INFINITE:
            return INFINITE
        full, remainder = divmod(int(num_rows), self.batch_size)
        return full + bool(remainder and not self.drop_remainder)

    def blocks(self, path: Path, start: int = 0) -> Iterator[Rows]:
        pieces: list[Rows] = []
        missing = self.batch_size
        for block in self.parent.blocks(path, start * self.batch_size):
            start = 0
            while start < len(block):
                piece = block[start : start + missing]
                pieces.append(piece)
                start += len(piece)
                missing -= len(piece)
                if not missing:
                    yield _join(pieces)
                    pieces, missing = [], self.batch_size
        if pieces and not self.drop_remainder:
            yield _join(pieces)


def rebuilt(order: Order, change: Callable[[Order], Order]) -> Order:
    """Returns an order with ``change`` made to it and to all orders that it is made of, the innermost first."""
    if isinstance(order, InOrder):
        return change(order)
    return change(replace(order, parent=rebuilt(order.parent, change)))  # type: ignore[arg-type,attr-defined]


def parts_of(order: Order) -> list[Order]:
    """Returns the orders that an order is made of, itself included, the innermost first."""
    parts: list[Order] = []

    def note(part: Order) -> Order:
        parts.append(part)
        return part

    rebuilt(order, note)
    return parts


def _shard_length(length: Cardinality, num_shards: int | None, index: int | None) -> Cardinality:
    if length == INFINITE:
        return INFINITE
    return len(range(index or 0, int(length), num_shards or 1))


def _join(pieces: list[Rows]) -> Rows:
    """One block of several; a batch has more than one piece only where repetitions meet in it."""
    return pieces[0] if len(pieces) == 1 else _concatenate(pieces)


def _concatenate(blocks: Iterable[Rows]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.intp), *(np.asarray(block, np.intp) for block in blocks)])


def _generator(seed: int, path: Path, reshuffle: bool) -> np.random.Generator:
    return np.random.default_rng((seed, *path) if reshuffle else (seed,))
