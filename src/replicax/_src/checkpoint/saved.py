"""A checkpoint on disk: opens, reads and verifies it."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from replicax._src.checkpoint.array_chunks import origins, part_at, slabs
from replicax._src.checkpoint.array_files import ArrayReader
from replicax._src.checkpoint.array_leaves import ArrayLeaf
from replicax._src.checkpoint.contents import ARRAYS, COMPONENTS, MANIFEST, Contents, StoredArray
from replicax._src.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError


def save_at(path: str) -> str | None:
    """Returns the identity of the checkpoint at a path; None if there is none."""
    try:
        return SavedCheckpoint(path).contents.save
    except (CorruptCheckpointError, CheckpointNotFoundError):
        return None


@functools.lru_cache(maxsize=256)
def _contents(manifest: str, changed_ns: int, num_bytes: int, inode: int) -> Contents:
    """Reads a manifest, once for each state of the file: listing and opening checkpoints both need it."""
    del changed_ns, num_bytes, inode
    with open(manifest, errors="replace") as file:
        return Contents.from_text(file.read(), manifest)


@final
class SavedCheckpoint:
    """A checkpoint that has been written.

    Args:
      path: The path of its directory.

    Raises:
      CheckpointNotFoundError: There is no checkpoint.
      CorruptCheckpointError: Its manifest is damaged.
    """

    def __init__(self, path: str):
        self.path = os.path.abspath(path)
        self.contents = self._read_contents()

    def _read_contents(self) -> Contents:
        manifest = os.path.join(self.path, MANIFEST)
        try:
            found = os.stat(manifest)
            return _contents(manifest, found.st_mtime_ns, found.st_size, found.st_ino)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise CorruptCheckpointError(f"{manifest!r} cannot be read ({error}).") from error
        if os.path.isdir(os.path.join(self.path, ARRAYS)):
            raise CorruptCheckpointError(f"{manifest!r} is missing, so the other files cannot be read.")
        raise CheckpointNotFoundError(
            f"There is no checkpoint at {self.path!r}. Checkpoints are directories such as 'training/ckpt-3'; "
            "rx.checkpoint.latest_checkpoint(directory) finds the newest one."
        )

    def array(self, key: str) -> SavedValue:
        """Returns an array, to read all or parts of it."""
        return SavedValue(self, key)

    def note_given(self, key: str, leaf: ArrayLeaf) -> None:
        """Does nothing: all processes have read the value, and all compare it where they compare any."""
        del key, leaf

    def reader(self, folder: str, key: str, stored: StoredArray) -> ArrayReader:
        """Opens what a folder of the checkpoint has."""
        contents = self.contents
        crc32, label = contents.checksums[folder], contents.arrays[key].label
        files = contents.files.get(folder)
        return ArrayReader(
            self.path, folder, stored, crc32, files, label, contents.processes, contents.part_of
        )

    def verify(self, without: Iterable[str] = (), share: tuple[int, int] = (0, 1)) -> None:
        """Reads and verifies all files.

        Args:
          without: The keys of values that are not read, because they were read before.
          share: The number of this process, and of all that verify together: each reads some of the files.

        Raises:
          CorruptCheckpointError: Files are damaged; the message names one.
        """
        part_of = self.contents.part_of
        (number, num_processes), position = share if part_of is None else (0, 1), 0
        arrays = self.contents.arrays
        read = {
            f"{COMPONENTS if arrays[key].value is None else ARRAYS}/{key}" for key in {*without} & {*arrays}
        }
        for folder, key, stored in self.contents.folders():
            if folder in read:
                continue
            reader = None
            for at, origin in enumerate(
                origins(stored.shape, stored.file) if math.prod(stored.shape) else [None]
            ):
                position += 1
                if (position - number) % num_processes or part_of not in (None, stored.writer_of(at)):
                    continue
                reader = reader or self.reader(folder, key, stored)
                if origin is not None:
                    reader.read(part_at(origin, stored.file, stored.shape))


@final
class SavedValue:
    """A value in a checkpoint. Reading verifies it.

    Attributes:
      shape, dtype: Its shape and dtype.
      label: The program's name of it.
      num_components: The number of components, R, of a variable with a value on each replica; otherwise 0.
    """

    def __init__(self, saved: SavedCheckpoint, key: str):
        array = self._array = saved.contents.arrays[key]
        self.shape, self.dtype, self.label = array.shape, np.dtype(jnp.dtype(array.dtype)), array.label
        self.num_components = 0 if array.components is None else array.components.shape[0]
        self._saved, self._key = saved, key
        self._readers: dict[str, ArrayReader] = {}

    def _reader(self, folder: str, stored: StoredArray) -> ArrayReader:
        if folder not in self._readers:
            self._readers[folder] = self._saved.reader(f"{folder}/{self._key}", self._key, stored)
        return self._readers[folder]

    def read(self, index: tuple[Any, ...] = (), into: np.ndarray | None = None) -> np.ndarray:
        """Returns the values of an index, in memory that nobody else holds.

        Args:
          index: Slices of the first dims, without steps; by default of all.
          into: The memory for the result. It is not used if the value is computed from components.

        Raises:
          CorruptCheckpointError: It is damaged; the message names it.
        """
        if self._array.value is not None:
            return self._reader(ARRAYS, self._array.value).read(index, into)
        return combined(self.read_components((slice(None), *index)), self._array.combine)

    def read_components(self, index: tuple[Any, ...] = (), into: np.ndarray | None = None) -> np.ndarray:
        """Does the same for the components [R, ...]."""
        assert self._array.components is not None
        return self._reader(COMPONENTS, self._array.components).read(index, into)

    def slabs(self, max_bytes: int | None = None) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yields the parts of ``chunks.slabs``, each with its index. Afterwards no chunk is kept."""
        stored = self._array.value or self._array.components
        assert stored is not None
        chunk_rows = stored.chunk[len(stored.shape) - len(self.shape)] if self.shape else 1
        try:
            for index in slabs(self.shape, self.dtype.itemsize, chunk_rows, max_bytes):
                yield index, self.read(index)
        finally:
            self._readers.clear()


def combined(components: np.ndarray, how: str) -> np.ndarray:
    """Returns the value of components [R, ...] as it is read outside of replicas; the first one if they are not
    aggregated.
    """
    if how not in ("SUM", "MEAN"):
        return np.array(components[0])
    total = np.sum(components, axis=0, dtype=components.dtype)
    if how == "SUM":
        return np.asarray(total)
    return np.asarray(total / np.asarray(len(components), components.dtype)).astype(components.dtype)
