"""Reads the contents of a checkpoint by name."""

from __future__ import annotations

import os
from typing import final

import numpy as np

from replicax._src.checkpoint.directory import is_of_keras, latest_checkpoint
from replicax._src.checkpoint.errors import CheckpointNotFoundError
from replicax._src.checkpoint.saved import SavedCheckpoint
from replicax._src.vocabulary.options import path_of


def list_variables(path: str | os.PathLike[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the keys and shapes of the arrays in a checkpoint, or in the latest one of a directory.

    Source: TensorFlow, ``tf.train.list_variables``.
    """
    arrays = opened(path).contents.arrays
    return [(key, arrays[key].shape) for key in sorted(arrays)]


def opened(path: str | os.PathLike[str]) -> SavedCheckpoint:
    """Returns a checkpoint, or the latest one of a directory.

    Raises:
      CheckpointNotFoundError: There is none.
    """
    checked = path_of(path, "path", "training/ckpt-3")
    latest = latest_checkpoint(checked)
    return SavedCheckpoint(latest if latest and not is_of_keras(latest) else checked)


def load_variable(path: str | os.PathLike[str], name: str) -> np.ndarray:
    """Returns one verified array of a checkpoint, or of the latest one of a directory.

    Raises:
      CheckpointNotFoundError: There is no checkpoint, or no such array in it.
      CorruptCheckpointError: The array is damaged.

    Source: TensorFlow, ``tf.train.load_variable``.
    """
    saved = opened(path)
    if name not in saved.contents.arrays:
        raise CheckpointNotFoundError(
            f"The checkpoint {saved.path!r} has no array {name!r}. It has "
            f"{', '.join(sorted(saved.contents.arrays)[:20])}."
        )
    return saved.array(name).read()


@final
class CheckpointReader:
    """The arrays of one checkpoint by name, like TensorFlow's reader. ``load_checkpoint`` makes it."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        self._saved = saved

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shapes of all arrays by key."""
        return {key: list(array.shape) for key, array in self._saved.contents.arrays.items()}

    def get_variable_to_dtype_map(self) -> dict[str, str]:
        """Returns the dtypes of all arrays by key, with their names in NumPy and JAX."""
        return {key: array.dtype for key, array in self._saved.contents.arrays.items()}

    def has_tensor(self, name: str) -> bool:
        """True if the checkpoint has an array of this key."""
        return name in self._saved.contents.arrays

    def get_tensor(self, name: str) -> np.ndarray:
        """Returns one verified array; see ``load_variable``."""
        return load_variable(self._saved.path, name)


def load_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Returns a reader of a checkpoint, or of the latest one of a directory.

    Raises:
      CheckpointNotFoundError: There is none.

    Source: TensorFlow, ``tf.train.load_checkpoint``.
    """
    return CheckpointReader(opened(path))
