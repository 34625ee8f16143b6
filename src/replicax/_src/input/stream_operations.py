"""The operations on a stream of rows: map, filter, shuffle, repeat, take, shard, batch. They do not know arrays or
files.

A cursor is read like a file: ``read(n)`` returns n rows, and fewer only at the end. So no cursor reads more from its
parent than it returns, and a few numbers describe its position. After ``Batch`` rows are batches.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from replicax._src.input.arrays import batch_of_rows
from replicax._src.input.chunks import ArrayRows, Chunk, chosen, mapped, permuted, read_pieces
from replicax._src.input.element_specs import INFINITE, Cardinality
from replicax._src.input.random_order import CipherOrder, DrawnOrder, RandomOrder, random_order

Path = tuple[int, ...]
"""The number of a pass over the data, then those of the repetitions around a step. Equal paths give equal orders."""

_Function = Callable[..., Any]


class Cursor(abc.ABC):
    """A position in a stream of rows."""

    @abc.abstractmethod
    def read(self, num_rows: int) -> Chunk:
        """Returns the next rows. Returns fewer only if these are the last, and none after that."""

    @abc.abstractmethod
    def get_state(self) -> Any:
        """Returns the position as JSON."""

    @abc.abstractmethod
    def set_state(self, state: Any) -> None:
        """Moves to the position of an equal cursor."""


Opener = Callable[[Path], Cursor]
"""Opens a stream at its start."""


class RowOperation(abc.ABC):
    """One operation, applied to the stream of rows before it. Its subclasses are frozen dataclasses.

    Attributes:
      method: The method of a dataset that adds it.
    """

    method: ClassVar[str]

    @abc.abstractmethod
    def length(self, parent: Cardinality | None) -> Cardinality | None:
        """Returns the number of its rows if its parent has ``parent`` rows; None if that is not known."""

    @abc.abstractmethod
    def open(self, parent: Opener, path: Path) -> Cursor:
        """Opens its output stream."""


# --- without a state of their own ---------------------------------------------------------------------


@final
class _StatelessCursor(Cursor):
    """A cursor whose position is that of its parent."""

    def __init__(self, parent: Cursor, read: Callable[[Cursor, int], Chunk]):
        self._parent, self._read = parent, read

    def read(self, num_rows: int) -> Chunk:
        return self._read(self._parent, num_rows)

    def get_state(self) -> Any:
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        self._parent.set_state(state)


@final
@dataclass(frozen=True)
class Map(RowOperation):
    """Applies ``function`` to every row."""

    method = "map"

    function: _Function

    def length(self, parent: Cardinality | None) -> Cardinality | None:
        return parent

    def open(self, parent: Opener, path: Path) -> Cursor:
        return _StatelessCursor(parent(path), lambda rows, count: mapped(rows.read(count), self.function))


@final
@dataclass(frozen=True)
class Filter(RowOperation):
    """Keeps the rows for which ``predicate`` is true."""

    method = "filter"

    predicate: _Function

    def length(self, parent: Cardinality | None) -> Cardinality | None:
        return parent if parent in (0, INFINITE) else None

    def open(self, parent: Opener, path: Path) -> Cursor:
        return _StatelessCursor(parent(path), self._read)

    def _read(self, parent: Cursor, num_rows: int) -> Chunk:
        def piece(num_rows: int) -> Chunk | None:
            chunk = parent.read(num_rows)
            return chosen(chunk, self.predicate) if len(chunk) else None

        return read_pieces(num_rows, piece)


@final
@dataclass(frozen=True)
class Batch(RowOperation):
    """Joins every ``batch_size`` rows into one pytree of arrays. The last batch may be smaller or dropped."""

    method = "batch"

    batch_size: int
    drop_remainder: bool

    def length(self, parent: Cardinality | None) -> Cardinality | None:
        if parent is None or parent == INFINITE:
            return parent
        full, remainder = divmod(int(parent), self.batch_size)
        return full + bool(remainder and not self.drop_remainder)

    def open(self, parent: Opener, path: Path) -> Cursor:
        return _StatelessCursor(parent(path), self._read)

    def _read(self, parent: Cursor, num_batches: int) -> Chunk:
        smallest = self.batch_size if self.drop_remainder else 1
        batches: list[Any] = []
        while len(batches) < num_batches:
            rows = parent.read(self.batch_size)
            if len(rows) < smallest:
                break
            batches.append(rows if type(rows) is ArrayRows else batch_of_rows(rows))  # type: ignore[arg-type]
        return batches


# --- fewer rows ---------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Take(RowOperation):
    """Keeps the first ``count`` rows."""

    method = "take"

    count: int

    def length(self, parent: Cardinality | None) -> Cardinality | None:
        if parent is None:
            return None if self.count else 0
        return min(parent, self.count)

    def open(self, parent: Opener, path: Path) -> Cursor:
        return _SliceCursor(parent(path), left=self.count)


@final
@dataclass(frozen=True)
class TakeShard(RowOperation):
    """Keeps every ``num_shards``-th row, starting with the row ``index``; all rows while both are None."""

    method = "shard"

    num_shards: int | None
    index: int | None

    def length(self, parent: Cardinality | None) -> Cardinality | None:
        if parent is None or parent == INFINITE:
            return parent
        return len(range(self.index or 0, int(parent), self.num_shards or 1))

    def open(self, parent: Opener, path: Path) -> Cursor:
        return _SliceCursor(parent(path), skip=self.index or 0, step=self.num_shards or 1)


@final
class _SliceCursor(Cursor):
    """Yields every ``step``-th row after ``skip`` skipped rows, at most ``left`` rows."""

    def __init__(self, parent: Cursor, *, skip: int = 0, step: int = 1, left: int = sys.maxsize):
        self._parent, self._skip, self._step, self._left = parent, skip, step, left

    def read(self, num_rows: int) -> Chunk:
        num_rows = min(num_rows, self._left)
        if not num_rows:
            return []
        chunk = self._parent.read(self._skip + (num_rows - 1) * self._step + 1)
        mine = chunk[self._skip :: self._step]
        self._skip, self._left = self._step - 1, self._left - num_rows
        return mine

    def get_state(self) -> Any:
        return {"skip": self._skip, "left": self._left, "of": self._parent.get_state()}

    def set_state(self, state: Any) -> None:
        self._skip = int(
            state.get("skip", self._skip)
        )  # positions of older versions have only one of the two
        self._left = int(state.get("left", self._left))
        self._parent.set_state(state["of"])


# --- shuffle ------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Shuffle(RowOperation):
    """Puts each window of ``buffer_size`` adjacent rows, or all rows, in random order. With ``reshuffle`` each path has
    a new order.
    """

    method = "shuffle"

    buffer_size: int | None
    seed: int
    reshuffle: bool
    is_seed_drawn: bool = False  # in this process: other processes have another

    def length(self, parent: Cardinality | None) -> Cardinality | None:
        return parent

    def open(self, parent: Opener, path: Path) -> Cursor:
        seeds = (self.seed, *path) if self.reshuffle else (self.seed,)
        return _ShuffleCursor(parent(path), self.buffer_size or sys.maxsize, seeds)


@final
class _ShuffleCursor(Cursor):
    """A cursor over shuffled windows. Its state is that of the stream before (``of``) and after (``to``) the window,
    the number of the window, and the number of its rows already read.

    The seed, the path and the number of a window determine its order. Rows of arrays are put in order when they are
    read, so neither a window nor a position in it takes longer if it has more of them.
    """

    def __init__(self, parent: Cursor, buffer_size: int, seeds: tuple[int, ...]):
        self._parent, self._buffer_size, self._seeds = parent, buffer_size, seeds
        self._window: Chunk = []
        self._order: RandomOrder | None = None
        self._number = -1  # the number of the current window
        self._given = 0
        self._before: Any = None

    def read(self, num_rows: int) -> Chunk:
        return read_pieces(num_rows, self._piece)

    def _piece(self, num_rows: int) -> Chunk | None:
        if self._given == len(self._window) and not self._fill():
            return None
        assert self._order is not None
        piece = permuted(self._window, self._order.places(self._given, num_rows))
        self._given += len(piece)
        return piece

    def get_state(self) -> Any:
        if self._given == len(self._window):
            return {"window": self._number, "given": 0, "of": self._parent.get_state()}
        to = self._parent.get_state()
        kind = {"order": "computed"} if isinstance(self._order, CipherOrder) else {}
        return {"window": self._number - 1, "given": self._given, "of": self._before, "to": to} | kind

    def set_state(self, state: Any) -> None:
        self._parent.set_state(state["of"])
        self._number, self._window, self._given = int(state["window"]), [], 0
        if state["given"]:
            self._fill(is_drawn="order" not in state)  # older versions drew the order of every window
            self._given = int(state["given"])
            if self._given > len(self._window):
                raise ValueError(
                    f"row {self._given} of a shuffled window was next, but the window has {len(self._window)} rows"
                )

    def _fill(self, *, is_drawn: bool = False) -> bool:
        self._before = self._parent.get_state()
        window = self._parent.read(self._buffer_size)
        self._window, self._given = [], 0
        if not len(window):
            return False
        self._number += 1
        seeds = (*self._seeds, self._number)
        is_drawn = is_drawn or not isinstance(window, ArrayRows)
        self._order = (DrawnOrder if is_drawn else random_order)(seeds, len(window))
        self._window = window
        return True


# --- repeat -------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Repeat(RowOperation):
    """Repeats all rows ``count`` times, or without end if ``count`` is None."""

    method = "repeat"

    count: int | None

    def length(self, parent: Cardinality | None) -> Cardinality | None:
        if parent == 0 or self.count == 0:
            return 0  # avoids INFINITE * 0
        if self.count is None:
            return INFINITE
        return None if parent is None else parent * self.count

    def open(self, parent: Opener, path: Path) -> Cursor:
        return _RepeatCursor(parent, path, self.count)


@final
class _RepeatCursor(Cursor):
    def __init__(self, parent: Opener, path: Path, count: int | None):
        self._open, self._path, self._count = parent, path, count
        self._start(0)

    def read(self, num_rows: int) -> Chunk:
        return read_pieces(num_rows, self._piece)

    def _piece(self, num_rows: int) -> Chunk | None:
        if self._count == 0:
            return None
        piece = self._rows.read(num_rows)
        self._has_rows = self._has_rows or len(piece) > 0
        if len(piece) < num_rows and not self._go_on() and not len(piece):
            return None
        return piece

    def get_state(self) -> Any:
        return {"repetition": self._repetition, "has_rows": self._has_rows, "of": self._rows.get_state()}

    def set_state(self, state: Any) -> None:
        self._start(int(state["repetition"]))
        self._has_rows = bool(state["has_rows"])
        self._rows.set_state(state["of"])

    def _go_on(self) -> bool:
        """Starts again, unless this was the last time or there was no row, which would loop without end."""
        if not self._has_rows or self._repetition + 1 == self._count:
            return False
        self._start(self._repetition + 1)
        return True

    def _start(self, repetition: int) -> None:
        self._repetition, self._has_rows = repetition, False
        self._rows = self._open((*self._path, repetition))


def description_of(step: RowOperation) -> str:
    """Returns a description such as ``shuffle(buffer_size=10, reshuffle=True)`` that tells steps apart, without
    functions and seed.
    """
    fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}  # type: ignore[arg-type]
    told = ["..." if callable(v) else f"{k}={v}" for k, v in fields.items() if "seed" not in k]
    return f"{step.method}({', '.join(told)})"
