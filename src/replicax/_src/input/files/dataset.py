"""FileDataset, a dataset over files of any format, and the cursor that reads the files in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

from replicax._src.devices.autoshard import check_shard
from replicax._src.input.chunks import Chunk, read_pieces
from replicax._src.input.files.formats import FileFormat, FileReader, reading
from replicax._src.input.files.paths import fingerprint_of
from replicax._src.input.pipeline import Dataset, RowSource
from replicax._src.input.steps import Cursor
from replicax._src.options import whole_number


@final
class FileDataset(Dataset):
    """A dataset over files. Make one with ``from_tfrecords``, ``from_parquet`` and similar functions.

    Each iteration reads the files again. (A batch of unparsed records is an array of Python objects.)
    """

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

    def of_files(self, num_shards: int, index: int) -> FileDataset:
        """Returns the same dataset over the files ``index, index + num_shards, ...``."""
        check_shard(num_shards, index)
        assert self.source.of_files is not None
        return FileDataset(self.source.of_files(self.files[index::num_shards]), self.steps, self.passes)


def file_dataset(files: tuple[str, ...], format: FileFormat) -> FileDataset:
    """Makes a dataset over the rows of files, in order."""
    return FileDataset(_source_of(files, format))


def _source_of(files: tuple[str, ...], format: FileFormat) -> RowSource:
    return RowSource(
        f"{len(files)} {format.name} file" + "s" * (len(files) != 1),
        lambda: _FilesCursor(files, format),
        length=functools.cache(lambda: _num_rows(files, format)),
        row_spec=format.row_spec,
        fingerprint=lambda: {
            "format": format.name,
            "options": format.options,
            **fingerprint_of(files),
        },
        has_arrays=format.has_columns,
        files=files,
        of_files=lambda files: _source_of(files, format),
    )


def _num_rows(files: Sequence[str], format: FileFormat) -> int | None:
    total = 0
    for path in files:
        with reading(path, format):
            num_rows = format.count_rows(path)
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
