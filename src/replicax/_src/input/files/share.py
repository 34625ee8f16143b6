"""The files that one worker reads, and how the rest of them is divided if another number of workers resumes.

The rest of a repetition is a list of parts. A part is JSON: files from their first row on, files that have been begun
(``at``), or the rest of a batch of which a worker had used some rows. ``path`` and ``seeds`` decide the shuffled order.
Worker 0 of 2, eight bytes into its first file; a part without ``files`` has all files of the worker::

    {"share": [2, 0], "repetition": 0, "parts": [{"path": [0], "at": {"file": 0, "at": 8}}]}
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.input.chunks import Chunk, join, read_pieces
from replicax._src.input.elements import NotResumableError
from replicax._src.input.pipeline import ChunkCursor, RowSource, with_seeds
from replicax._src.input.stream_operations import (
    Batch,
    Cursor,
    Filter,
    Map,
    Opener,
    Path,
    Repeat,
    RowOperation,
    Shuffle,
    description_of,
)

Share = tuple[int, int]
"""``(num_shards, index)``: the files ``index, index + num_shards, ...``."""


@final
@dataclass(frozen=True)
class Stages:
    """The steps of a dataset over files, in the order in which a ``ShareCursor`` applies them.

    Attributes:
      row_steps: The steps within one repetition.
      repeat: The step that repeats them.
      batch: The batches, and whether each repetition ends with its own last batch (``is_cut``).
      batch_steps: The steps after ``batch``.
      undivided: The step because of which a repetition cannot be divided again. All steps are then in ``row_steps``.
    """

    row_steps: tuple[RowOperation, ...]
    repeat: Repeat | None = None
    batch: Batch | None = None
    is_cut: bool = False
    batch_steps: tuple[RowOperation, ...] = ()
    undivided: RowOperation | None = None

    @classmethod
    def of(cls, steps: Sequence[RowOperation]) -> Stages:
        """Sorts the steps of a dataset."""
        row_steps: list[RowOperation] = []
        batch_steps: list[RowOperation] = []
        repeat = batch = None
        is_cut = False
        for step in steps:
            if isinstance(step, Batch):
                batch = step
            elif isinstance(step, Repeat) and repeat is None:
                repeat, is_cut = step, batch is not None
            elif isinstance(step, Map) or (
                batch is None and (isinstance(step, Filter) or (isinstance(step, Shuffle) and repeat is None))
            ):
                (row_steps if batch is None else batch_steps).append(step)
            else:
                return cls(tuple(steps), undivided=step)
        return cls(tuple(row_steps), repeat, batch, is_cut, tuple(batch_steps))


def open_share(source: RowSource, share: Share, steps: Sequence[RowOperation], path: Path) -> Cursor:
    """Opens what one worker reads of a source of files."""
    stages = Stages.of(steps)
    opener: Opener = lambda path: ShareCursor(source, share, stages, path)  # noqa: E731
    for step in (*([stages.batch] if stages.batch else []), *stages.batch_steps):
        opener = functools.partial(step.open, opener)
    return opener(path)


@final
class ShareCursor(Cursor):
    """A cursor over the rows of a worker's files. Its position lists the parts that are left."""

    def __init__(self, source: RowSource, share: Share, stages: Stages, path: Path):
        self._source, self._share, self._stages, self._path = source, share, stages, path
        self._own = range(len(source.files))[share[1] :: share[0]]
        self._begin(0)

    def _begin(self, repetition: int) -> None:
        self._repetition, self._has_rows = repetition, False
        is_none = self._stages.repeat is not None and self._stages.repeat.count == 0
        self._parts: list[dict[str, Any]] = [] if is_none else [{"path": self._path_of(repetition)}]
        self._cursor: Cursor | None = None  # of the first part

    def _path_of(self, repetition: int) -> list[int]:
        return [*self._path, repetition] if self._stages.repeat else [*self._path]

    def read(self, num_rows: int) -> Chunk:
        is_cut, batch = self._stages.is_cut, self._stages.batch
        least = num_rows if not is_cut or (batch and batch.drop_remainder) else 1
        rows: Chunk = []
        while True:
            more = read_pieces(num_rows - (0 if is_cut else len(rows)), self._piece)
            rows = more if is_cut else join([rows, more])
            self._has_rows = self._has_rows or len(more) >= (least if is_cut else 1)
            if len(rows) >= least or not self._goes_on():
                return rows

    def _goes_on(self) -> bool:
        """Starts the next repetition, unless this was the last, or had no row, which would loop without end."""
        repeat = self._stages.repeat
        if repeat is None or not self._has_rows or self._repetition + 1 == repeat.count:
            return False
        self._begin(self._repetition + 1)
        return True

    def _piece(self, num_rows: int) -> Chunk | None:
        while self._parts:
            if self._cursor is None:
                self._cursor = self._opened(self._parts[0])
            piece = self._cursor.read(num_rows)
            if len(piece) < num_rows:
                self._parts, self._cursor = self._parts[1:], None
            if len(piece):
                return piece
        return None

    def _opened(self, part: dict[str, Any]) -> Cursor:
        steps = self._stages.row_steps
        if "seeds" in part:
            steps = with_seeds(steps, part["seeds"])
        if "batch" in part:
            share, stages = tuple(part["batch"]["share"]), dataclasses.replace(self._stages, row_steps=steps)
            before = ShareCursor(self._source, share, stages, self._path)
            before.set_state(part["batch"])
            start, stop = part["rows"]
            cursor: Cursor = ChunkCursor(before.read(stop)[start:])
        else:
            assert self._source.with_files is not None
            files = tuple(self._source.files[number] for number in part.get("files", self._own))
            source = self._source.with_files(files)
            opener: Opener = lambda path: source.open()  # noqa: E731 because every pass has the same order
            for step in steps:
                opener = functools.partial(step.open, opener)
            cursor = opener(tuple(part["path"]))
        if part.get("at") is not None:
            cursor.set_state(part["at"])
        return cursor

    def get_state(self) -> Any:
        parts = list(self._parts)
        if self._cursor is not None:
            parts[0] = {**parts[0], "at": self._cursor.get_state()}
        return {"share": list(self._share), "repetition": self._repetition, "parts": parts}

    def set_state(self, state: Any) -> None:
        if "workers" in state:
            self._divide(state["workers"])
        elif tuple(state["share"]) == self._share:
            self._begin(int(state["repetition"]))
            self._parts = list(state["parts"])
        elif tuple(state["share"]) == (1, 0):  # all workers read all files
            self._divide([{"now": state}])
        else:
            num_shards, index = state["share"]
            raise NotResumableError(
                f"This is the position of worker {index} of {num_shards}, each with files of its own. Resume on {num_shards} "
                "workers with AutoShardPolicy.FILE again, or on another number through rx.Checkpoint, which has the positions "
                "of all."
            )
        self._has_rows = True
        if self._parts and "at" in self._parts[0]:  # an invalid position fails here, not in a later read
            self._cursor = self._opened(self._parts[0])

    def _divide(self, workers: Sequence[dict[str, Any]]) -> None:
        """Divides what the workers of a saved run have not read; each new worker computes the same."""
        if self._stages.undivided is not None:
            raise NotResumableError(
                f"{description_of(self._stages.undivided)} stands where the position of one worker cannot be divided: with "
                f"files on each worker it resumes on {len(workers)} worker(s) only. Any number resumes with map, filter "
                "and shuffle before batch, map after it, and one repeat after shuffle; or with AutoShardPolicy.DATA."
            )
        last = max(worker["now"]["repetition"] for worker in workers)
        begun: list[dict[str, Any]] = []
        unread: list[tuple[list[int], int]] = []
        for worker in workers:
            state, seeds = worker["now"], {"seeds": worker["seeds"]} if "seeds" in worker else {}
            num_shards, index = state["share"]
            own = list(range(len(self._source.files))[index::num_shards])
            later = [{"path": self._path_of(each)} for each in range(state["repetition"] + 1, last + 1)]
            if "batch" in worker:
                begun.append({**seeds, "batch": worker["batch"], "rows": worker["rows"]})
            for part in [*state["parts"], *later]:
                files, at = part.get("files", own), part.get("at")
                if "batch" in part:
                    begun.append({**seeds, **part})
                    continue
                num_begun = 0 if at is None else _num_begun(at)
                if num_begun:
                    begun.append({**seeds, **part, "files": files[:num_begun]})
                unread.extend((part["path"], number) for number in files[num_begun:])
        num_shards, index = self._share
        mine: list[Any] = [*begun, *sorted(unread)][index::num_shards]
        self._begin(last)
        self._parts = [part for part in mine if isinstance(part, dict)]
        for path, files in itertools.groupby(mine[len(self._parts) :], lambda one: one[0]):
            self._parts.append({"path": path, "files": [number for _, number in files]})


def merged(positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one position of a ``DatasetIterator``, which each worker divides, from those of all workers.

    Args:
      positions: For each worker ``now``, the position of its iterator; and if it has used ``rows[0]`` of the
        ``rows[1]`` rows of its last batch, ``batch``, the position before that batch.
    """
    workers = []
    for position in positions:
        worker = {"now": position["now"]["cursor"], "seeds": position["now"]["seeds"]}
        if "batch" in position:
            worker |= {"batch": position["batch"]["cursor"], "rows": position["rows"]}
        workers.append(worker)
    return {**positions[0]["now"], "cursor": {"workers": workers}}


def _num_begun(at: Any) -> int:
    """Returns how many files a cursor has begun, from its position."""
    while "of" in at:
        at = at.get("to", at["of"])  # a shuffle has read to the end of its window
    return at["file"] + (at["at"] is not None)
