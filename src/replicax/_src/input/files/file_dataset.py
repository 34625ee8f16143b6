"""FileDataset, a dataset over files of any format, and the cursor that reads the files in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from replicax._src.devices.autoshard import check_shard
from replicax._src.input.chunks import Chunk, read_pieces
from replicax._src.input.files.formats import FileFormat, FileReader, reading
from replicax._src.input.files.paths import fingerprint_of
from replicax._src.input.files.share import Share, open_share
from replicax._src.input.pipeline import Dataset, RowSource
from replicax._src.input.stream_operations import Cursor, Path
from replicax._src.vocabulary.options import whole_number


@final
class FileDataset(Dataset):
    """A dataset over files. Make one with ``from_tfrecords``, ``from_parquet`` and similar functions.

    Each iteration reads the files again. (A batch of unparsed records is an array of Python objects.)
    """

    _all: FileDataset | None = None  # the dataset of which this is the share of one worker
    _share: Share = (1, 0)

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of its files, in reading order."""
        return self.source.files

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> FileDataset:
        """Puts the elements in random order, within windows of ``buffer_size`` adjacent ones.

        A full window is read, and its elements come in a uniformly random order. No element moves to another window.
        (TensorFlow replaces one element of its buffer at a time, so there a few move further.) So rows that are sorted
        in the files need large windows, or ``files`` in random order.

        Args:
          buffer_size: The number of elements per window, which are held in memory.
          seed: Equal seeds give equal orders. None draws a random seed. In a cluster pass a seed, so that all processes
            use the same order.
          reshuffle_each_iteration: Take a new order each time the dataset is iterated or repeated.

        Raises:
          InvalidArgumentError: ``buffer_size`` is less than 1, or the seed is negative.
        """
        return self._shuffled(
            whole_number("buffer_size", buffer_size, least=1), seed, reshuffle_each_iteration
        )

    def shard_files(self, num_shards: int, index: int) -> FileDataset:
        """Returns the same dataset over the files ``index, index + num_shards, ...``. Any number of such shares resumes
        from the positions of any other.
        """
        check_shard(num_shards, index)
        assert self.source.with_files is not None
        share = FileDataset(self.source.with_files(self.files[index::num_shards]), self.steps, self.passes)
        share._all, share._share = self, (num_shards, index)
        return share

    def open(self, path: Path) -> Cursor:
        """Opens the stream of its elements."""
        return open_share((self._all or self).source, self._share, self.steps, path)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON that tells the dataset from those with other rows or steps; equal for all shares."""
        return super().fingerprint if self._all is None else self._all.fingerprint


def file_dataset(files: tuple[str, ...], format: FileFormat) -> FileDataset:
    """Makes a dataset over the rows of files, in order."""
    return FileDataset(_Files(files, format).source())


@final
@dataclass(frozen=True)
class _Files:
    """Files of one format. A dataset over them can be pickled, so that it can be sent to workers."""

    paths: tuple[str, ...]
    format: FileFormat

    def source(self) -> RowSource:
        """Returns the source of their rows."""
        return RowSource(
            f"{len(self.paths)} {self.format.name} file" + "s" * (len(self.paths) != 1),
            partial(_FilesCursor, self.paths, self.format),
            length=self.length,
            row_spec=self.format.row_spec,
            fingerprint=self.fingerprint,
            has_arrays=self.format.has_columns,
            files=self.paths,
            with_files=self.others,
        )

    def others(self, paths: tuple[str, ...]) -> RowSource:
        """Returns the source of the rows of other files."""
        return _Files(paths, self.format).source()

    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON that tells these files, and how they are read, from others."""
        return {"format": self.format.name, "options": self.format.options, **fingerprint_of(self.paths)}

    def length(self) -> int | None:
        """Returns the number of rows, or None if only a read of the files could tell."""
        return self._num_rows

    @functools.cached_property
    def _num_rows(self) -> int | None:
        total = 0
        for path in self.paths:
            with reading(path, self.format):
                num_rows = self.format.count_rows(path)
            if num_rows is None:
                return None
            total += num_rows
        return total


@final
class _FilesCursor(Cursor):
    """A cursor over files. Its position is the number of the file and the position in that file."""

    def __init__(self, files: Sequence[str], format: FileFormat):
        self._files, self._format = files, format
        self._number = 0  # the number of the current file
        self._reader: FileReader | None = None

    def read(self, num_rows: int) -> Chunk:
        return read_pieces(num_rows, self._piece)

    def _piece(self, num_rows: int) -> Chunk | None:
        if self._number == len(self._files):
            return None
        if self._reader is None:
            self._reader = self._opened(None)
        with reading(self._files[self._number], self._format):
            piece = self._reader.read(num_rows)
        if len(piece) < num_rows:
            self._close()
            self._number += 1
        return piece

    def get_state(self) -> Any:
        return {"file": self._number, "at": None if self._reader is None else self._reader.tell()}

    def set_state(self, state: Any) -> None:
        self._close()
        self._number = int(state["file"])
        if state["at"] is not None:
            self._reader = self._opened(state["at"])

    def _opened(self, position: Any) -> FileReader:
        path = self._files[self._number]
        with reading(path, self._format):
            return self._format.open(path, position)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None
