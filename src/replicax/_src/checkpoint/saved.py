"""A checkpoint on disk: opens, verifies and reads it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn, final

import jax.numpy as jnp
import numpy as np

from replicax._src.checkpoint.contents import COMPONENTS, MANIFEST, STATE, Contents
from replicax._src.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError
from replicax._src.checkpoint.orbax_files import read_arrays, rows_in_turn
from replicax._src.checkpoint.writing import checksum, file_checksum


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
            with open(manifest, errors="replace") as file:
                return Contents.of_text(file.read(), manifest)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise CorruptCheckpointError(f"{manifest!r} cannot be read ({error}).") from error
        if os.path.isdir(os.path.join(self.path, STATE)):
            raise CorruptCheckpointError(f"{manifest!r} is missing, so the other files cannot be verified.")
        raise CheckpointNotFoundError(
            f"There is no checkpoint at {self.path!r}. Checkpoints are directories such as 'training/ckpt-3'; "
            "rx.checkpoint.latest_checkpoint(directory) finds the newest one."
        )

    def problems(self) -> list[str]:
        """Reads all files, and returns the problems that it found."""
        return [text for text in map(self._problem_of, self.contents.files) if text]

    def _problem_of(self, name: str) -> str:
        expected_size, expected_crc = self.contents.files[name]
        try:
            size, crc = file_checksum(os.path.join(self.path, name))
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if size != expected_size:
            return f"{name} has {size} bytes, but {expected_size} were written"
        return "" if crc == expected_crc else f"{name} has other bytes than were written"

    def verify(self) -> None:
        """Reads and verifies all files.

        Raises:
          CorruptCheckpointError: Files are damaged; the message names them.
        """
        problems = self.problems()
        if problems:
            shown = "\n".join(f"  {text}" for text in problems[:10])
            more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CorruptCheckpointError(
                f"The checkpoint {self.path!r} is damaged, and nothing of it was restored:\n{shown}{more}\nRestore "
                "another one: rx.CheckpointManager restores the latest intact one."
            )

    def values(self, keys: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns some of its arrays, verified.

        Raises:
          CorruptCheckpointError: An array is damaged; the message names it.
        """
        arrays = self.contents.arrays
        wanted = {key: (arrays[key].shape, arrays[key].dtype) for key in keys}
        values = self._read(STATE, wanted)
        self._check([(key, values[key], arrays[key].crc32) for key in wanted])
        return values

    def rows(self, key: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the rows of an array block by block, with the number of each block's first row.

        Raises:
          CorruptCheckpointError: The array cannot be read.
        """
        with self._reading():
            yield from rows_in_turn(os.path.join(self.path, STATE), key)

    def check_rows(self, key: str) -> None:
        """Reads and verifies an array that has rows.

        Raises:
          CorruptCheckpointError: It is damaged, or has another shape or dtype.
        """
        array, crc, num_rows = self.contents.arrays[key], 0, 0
        for _, rows in self.rows(key):
            if rows.dtype != jnp.dtype(array.dtype) or rows.shape[1:] != array.shape[1:]:
                num_rows = -1
                break
            crc, num_rows = checksum(rows, crc), num_rows + len(rows)
        if (crc, num_rows) != (array.crc32, array.shape[0]):
            self._raise_damaged([key])

    def components(self, keys: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns the components of those of some arrays that have components, verified.

        Raises:
          CorruptCheckpointError: An array is damaged; the message names it.
        """
        arrays = self.contents.arrays
        wanted = {
            key: ((array.num_components, *array.shape), array.dtype)
            for key in keys
            if (array := arrays[key]).components_crc32 is not None
        }
        values = self._read(COMPONENTS, wanted)
        self._check([(key, values[key], arrays[key].components_crc32) for key in wanted])
        return values

    def _read(self, item: str, wanted: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, np.ndarray]:
        if not wanted:
            return {}
        with self._reading():
            return read_arrays(os.path.join(self.path, item), wanted)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CorruptCheckpointError(
                f"The checkpoint {self.path!r} cannot be read ({type(error).__name__}: {error!s:.300}). It "
                "may have been deleted in the meantime, or changed by hand."
            ) from error

    def _check(self, arrays: Sequence[tuple[str, np.ndarray, int | None]]) -> None:
        damaged = [key for key, array, crc in arrays if checksum(array) != crc]
        if damaged:
            self._raise_damaged(damaged)

    def _raise_damaged(self, keys: Sequence[str]) -> NoReturn:
        raise CorruptCheckpointError(
            f"The checkpoint {self.path!r} has damaged values for {', '.join(map(repr, keys[:5]))}."
        )
