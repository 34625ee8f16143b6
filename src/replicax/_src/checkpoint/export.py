"""Reads the contents of a checkpoint by name, or exports them to other formats, for other programs."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
from collections.abc import Iterable, Iterator
from typing import Any, final

import numpy as np

from replicax._src.checkpoint import processes
from replicax._src.checkpoint.directory import is_of_keras, latest_checkpoint
from replicax._src.checkpoint.errors import CheckpointNotFoundError, CheckpointWriteError
from replicax._src.checkpoint.saved import SavedCheckpoint
from replicax._src.errors import InvalidArgumentError
from replicax._src.extras import missing_extra
from replicax._src.options import path_of

_WEIGHTS = ".weights.h5"


def list_variables(path: str | os.PathLike[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the keys and shapes of the arrays in a checkpoint, or in the latest one of a directory.

    Source: TensorFlow, ``tf.train.list_variables``.
    """
    arrays = _opened(path).contents.arrays
    return [(key, arrays[key].shape) for key in sorted(arrays)]


def _opened(path: str | os.PathLike[str]) -> SavedCheckpoint:
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
    saved = _opened(path)
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
    return CheckpointReader(_opened(path))


def export_safetensors(
    path: str | os.PathLike[str], file: str | os.PathLike[str], *, only: str | Iterable[str] = "*"
) -> str:
    """Writes the arrays of a checkpoint to a safetensors file, under their keys. What is read is verified.

    Args:
      path: The checkpoint, or a directory, for its latest one.
      file: The file to write. It replaces an existing file once it is complete.
      only: Patterns of the keys to export: ``"model/*"``.

    Returns:
      The path of the file.

    Raises:
      CorruptCheckpointError: The checkpoint is damaged.
      InvalidArgumentError: ``only`` matches none of its arrays.
      CheckpointWriteError: The file cannot be written, or safetensors does not support the dtype of an array
        (``int4``).
      MissingExtraError: safetensors is not installed.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise missing_extra("Exporting a checkpoint to safetensors", "checkpoint", "safetensors") from error
    saved = _opened(path)
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Iterable) else [only]
    if not all(isinstance(each, str) for each in patterns):
        raise InvalidArgumentError(
            f"only must be a pattern of keys such as 'model/*', or a list of patterns; got {only!r:.200}."
        )
    keys = [key for key in saved.contents.arrays if any(fnmatch.fnmatchcase(key, each) for each in patterns)]
    if not keys:
        raise InvalidArgumentError(
            f"export_safetensors(only={only!r}) matches none of the arrays of {saved.path!r}, so nothing was "
            f"written. It has {', '.join(sorted(saved.contents.arrays)[:20]) or 'only numbers and strings'}."
        )
    file = os.path.abspath(path_of(file, "file", "model.safetensors"))
    values = {key: np.asarray(saved.array(key).read(), order="C") for key in keys}
    labels = {key: saved.contents.arrays[key].label for key in keys}
    with _in_place(file, f"{file}.part"):
        save_file(values, f"{file}.part", metadata=labels)
    return file


@contextlib.contextmanager
def _in_place(file: str, part: str) -> Iterator[None]:
    """Returns a context in which ``part`` is written. It then replaces ``file``, whose directory is created.

    Raises:
      CheckpointWriteError: It could not be written; ``file`` is unchanged.
    """
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        yield
        os.replace(part, file)
    except Exception as error:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise CheckpointWriteError(
            getattr(error, "errno", None) or errno.EIO,
            f"{file!r} could not be written ({type(error).__name__}: {error!s:.300}). An existing file is unchanged.",
        ) from error


def export_weights(model: Any, file: str | os.PathLike[str]) -> str | None:
    """Writes the weights of a Keras model as Keras does, ``.weights.h5``. Only the chief writes.

    Args:
      model: A built model, under any strategy.
      file: The file to write. Its name must end with ``.weights.h5``.

    Returns:
      The path of the file; None on processes that do not write.

    Raises:
      InvalidArgumentError: It is not a model, or not built, or the name has another ending, which Keras would not
        load.
      CheckpointWriteError: The file cannot be written.
    """
    file = os.path.abspath(path_of(file, "file", "model.weights.h5"))
    if not file.endswith(_WEIGHTS):
        raise InvalidArgumentError(
            f"export_weights needs a file name that ends with {_WEIGHTS!r}; got {file!r}."
        )
    if not callable(getattr(model, "save_weights", None)) or not model.built:
        raise InvalidArgumentError(
            f"export_weights needs a Keras model that is built: call it on some data first. Got {model!r:.200}."
        )
    if not processes.is_chief():
        return None
    part = file.removesuffix(_WEIGHTS) + ".part" + _WEIGHTS
    with _in_place(file, part):
        model.save_weights(part, overwrite=True)
    return file
