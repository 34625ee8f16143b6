"""Writes a checkpoint to files of other programs, in slabs, so that a model of any size needs little memory."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from replicax._src.checkpoint import agreement, orbax_directories, safetensors_files
from replicax._src.checkpoint.errors import CheckpointWriteError
from replicax._src.checkpoint.reader import opened
from replicax._src.checkpoint.saved import SavedCheckpoint, SavedValue
from replicax._src.checkpoint.writing import beside
from replicax._src.hooks import hook
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError
from replicax._src.vocabulary.options import path_of

_SAFETENSORS: Final = ".safetensors"
_WEIGHTS: Final = ".weights.h5"
_OF_KERAS: Final = (_WEIGHTS, ".keras")


def export(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    only: str | Iterable[str] | None = None,
    model: Callable[[], Any] | None = None,
    name: str = "model",
) -> str:
    """Writes a checkpoint to a file of another program. The name of the file says which:

    - ``model.safetensors``: the arrays under their keys, with the program's names as metadata;
    - ``model.weights.h5``, ``model.keras``: a Keras model, as Keras itself writes it;
    - a name without an ending: a directory for orbax, a pytree of nested dicts. It needs orbax.

    The arrays are read, verified and written in slabs of 32 MiB. So a model of any size needs less than 0.5 GB of
    memory. One process calls it.

    Args:
      path: The checkpoint, or a directory, for its latest one.
      to: The file to write. It replaces an existing file once it is complete. A directory must not exist.
      only: Patterns of the keys to export: ``"model/*"``. All by default. Not for Keras.
      model: Only for Keras: makes the model that was saved, without arguments. Variables of 1 MB and more are not
        allocated. If the model is compiled and its optimizer was saved with it, the file has the optimizer too.
      name: Only for Keras: the name that the model has in the checkpoint.

    Returns:
      The path of the file.

    Raises:
      CheckpointNotFoundError: There is no checkpoint.
      CorruptCheckpointError: The checkpoint is damaged; the message names the variable.
      CheckpointMismatchError: The checkpoint has another model than ``model`` makes.
      InvalidArgumentError: The ending is unknown, ``only`` matches nothing, or an option is for another format.
      CheckpointWriteError: The file cannot be written, or safetensors does not support the dtype of an array
        (``int4``). An existing file is unchanged.
      MissingExtraError: orbax or Keras is not installed.
    """
    to = os.path.abspath(path_of(to, "to", "model.safetensors"))
    ending = _ending_of(to)
    _check_options(to, ending, only, model)
    saved = opened(path)
    if ending in _OF_KERAS:
        assert model is not None
        files_of_keras = hook("exported_keras_files")
        write = files_of_keras.writing(saved, model, name)
    else:
        arrays = _chosen(saved, "*" if only is None else only)
        write_arrays = safetensors_files.write if ending else orbax_directories.write
        write = functools.partial(write_arrays, arrays=arrays)
        if not ending:
            orbax_directories.orbax()
            if os.path.lexists(to):
                raise InvalidArgumentError(f"{to!r} exists. Remove it, or export to a new directory.")
    with _in_place(to, ending) as part:
        write(part)
    return to


def _ending_of(to: str) -> str:
    """Returns the ending of a path; "" for a directory.

    Raises:
      InvalidArgumentError: The ending is of another format.
    """
    for ending in (_SAFETENSORS, *_OF_KERAS):
        if to.endswith(ending):
            return ending
    if os.path.splitext(to)[1]:
        raise InvalidArgumentError(
            f"export writes a file that ends with '.safetensors', '.weights.h5' or '.keras', or a directory for orbax, "
            f"whose name has no ending; got {to!r}."
        )
    return ""


def _check_options(to: str, ending: str, only: Any, model: Any) -> None:
    if ending in _OF_KERAS:
        if not callable(model):
            raise InvalidArgumentError(
                f"{os.path.basename(to)!r} is a file of Keras, so export needs model=make_model, a function that makes "
                f"the model that was saved; got {model!r:.200}."
            )
        if only is not None:
            raise InvalidArgumentError(
                "only is for safetensors and orbax. A file of Keras has the full model."
            )
    elif model is not None:
        raise InvalidArgumentError(
            f"model is for files that end with '.weights.h5' or '.keras', not for {os.path.basename(to)!r}."
        )


def _chosen(saved: SavedCheckpoint, only: str | Iterable[str]) -> dict[str, SavedValue]:
    """Returns the arrays whose keys match the patterns."""
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Iterable) else [only]
    if not all(isinstance(each, str) for each in patterns):
        raise InvalidArgumentError(
            f"only must be a pattern of keys such as 'model/*', or a list of patterns; got {only!r:.200}."
        )
    keys = [key for key in saved.contents.arrays if any(fnmatch.fnmatchcase(key, each) for each in patterns)]
    if not keys:
        raise InvalidArgumentError(
            f"only={only!r} matches none of the arrays of {saved.path!r}, so nothing was written. It has "
            f"{', '.join(sorted(saved.contents.arrays)[:20]) or 'only numbers and strings'}."
        )
    return {key: saved.array(key) for key in keys}


@contextlib.contextmanager
def _in_place(to: str, ending: str) -> Iterator[str]:
    """Yields a new path to write, which then replaces ``to``. Makes the directory that it is in.

    Args:
      to: The file to write.
      ending: The end of its name, which Keras needs.

    Raises:
      CheckpointWriteError: It could not be written; ``to`` is unchanged.
    """
    part = beside(to.removesuffix(ending), "part") + ending
    try:
        os.makedirs(os.path.dirname(to), exist_ok=True)
        yield part
        _flush(part)
        os.replace(part, to)
    except BaseException as error:
        _remove(part)
        if isinstance(error, ReplicaxError) or not isinstance(error, Exception):
            raise
        raise CheckpointWriteError(
            getattr(error, "errno", None) or errno.EIO,
            f"{to!r} could not be written ({type(error).__name__}: {error!s:.300}). An existing file is unchanged.",
        ) from error


def _remove(part: str) -> None:
    if os.path.isdir(part):
        shutil.rmtree(part, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.remove(part)


def _flush(part: str) -> None:
    """Waits until a file is on the disk."""
    if os.path.isfile(part):
        with open(part, "rb") as file:
            os.fsync(file.fileno())


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
    if not agreement.is_chief():
        return None
    with _in_place(file, _WEIGHTS) as part:
        model.save_weights(part, overwrite=True)
    return file
