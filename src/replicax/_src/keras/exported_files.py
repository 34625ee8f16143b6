"""Writes a checkpoint to ``.weights.h5`` and ``.keras`` files. Keras writes them, and gets each value in slabs.

A checkpoint names variables by structure, and Keras's files also by classes and by the order in which layers make
variables. So the user's function makes the model. Its large variables get no values.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from replicax._src.checkpoint.agreement import own_state
from replicax._src.checkpoint.array_leaves import VariableLeaf
from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.errors import CheckpointMismatchError, CheckpointWriteError, listed
from replicax._src.checkpoint.restoring import Restoration
from replicax._src.checkpoint.saved import SavedCheckpoint, SavedValue
from replicax._src.keras import internals, unallocated_variables
from replicax._src.keras.backend import check_keras
from replicax._src.keras.internals import accessor, saving_lib
from replicax._src.keras.overriding import overridden
from replicax._src.vocabulary.errors import InvalidArgumentError

# A new optimizer has these too.
_OF_NEW_OPTIMIZERS = {"iterations", "learning_rate"}

_Values = dict[int, tuple[Any, SavedValue]]
"""Variables and their saved values, by the id of the variable."""


def writing(saved: SavedCheckpoint, make_model: Callable[[], Any], name: str) -> Callable[[str], None]:
    """Returns a function that writes a model of a checkpoint to a file, ``.weights.h5`` or ``.keras``.

    Args:
      saved: The checkpoint.
      make_model: Makes the model that was saved.
      name: The name of the model in the checkpoint.

    Raises:
      CheckpointMismatchError: The checkpoint has no such model, or another one.
      InvalidArgumentError: The function returns something else than a built Keras model.
    """
    check_keras("replicax")
    nodes = saved.contents.objects
    if name not in nodes[0].children:
        raise CheckpointMismatchError(
            f"The checkpoint {saved.path!r} has no {name!r}. Give the name of the model in it, one of "
            f"{', '.join(map(repr, nodes[0].children))}."
        )
    node = nodes[nodes[0].children[name]]
    has_slots = (
        "optimizer" in node.children and {*nodes[node.children["optimizer"]].children} > _OF_NEW_OPTIMIZERS
    )
    # Keras must not give the variables values later: it would read the checkpoint, which may be gone by then.
    with _unallocated(), internals.building_undone():
        model = make_model()
        optimizer = getattr(model, "optimizer", None)  # only compiled models have it
        if optimizer is not None and has_slots:
            optimizer.build(model.trainable_variables)
    if not isinstance(model, keras.Model) or not model.built:
        raise InvalidArgumentError(
            f"The function for the model returned {model!r:.200}. It must return a Keras model that is built: give it a "
            "keras.Input, or call model.build(input_shape)."
        )
    return functools.partial(_write, model, _values_of(saved, model, name))


def _values_of(saved: SavedCheckpoint, model: Any, name: str) -> _Values:
    restoration = Restoration(saved, Checkpoint(**{name: model}), own_state)
    matches = restoration.matches()
    differ = [f"{key}: not in the checkpoint" for key in restoration.unsaved()]
    differ += [f"{key}: only in the checkpoint" for key in _keys_of(saved, name) if key not in matches]
    if differ:
        raise CheckpointMismatchError(
            f"The checkpoint {saved.path!r} has another model than the function makes. These differ:\n{listed(differ)}\n"
            "Make the model as it was when it was saved."
        )
    return {
        id(leaf.of): (leaf.of, saved.array(key))
        for key, leaf in matches.items()
        if isinstance(leaf, VariableLeaf)
    }


def _keys_of(saved: SavedCheckpoint, name: str) -> list[str]:
    """Returns the keys of the arrays of a model, without those of its optimizer."""
    nodes, arrays = saved.contents.objects, saved.contents.arrays
    model = nodes[0].children[name]
    found, waiting = {model}, [model]
    while waiting:
        number = waiting.pop()
        children = {
            child
            for part, child in nodes[number].children.items()
            if child not in found and not (number == model and part == "optimizer")
        }
        found |= children
        waiting.extend(children)
    return [nodes[number].key for number in sorted(found) if nodes[number].key in arrays]


def _write(model: Any, values: _Values, file: str) -> None:
    for variable, array in values.values():
        if accessor.is_built(variable):
            variable.assign(array.read())
        else:  # layers that save something computed read the value so
            internals.set_initializer(variable, functools.partial(_read, array))
    with (
        overridden(saving_lib, H5IOStore=_store_of(values), is_memory_sufficient=lambda model: False),
        _with_methods(keras.Variable, numpy=_without_reading),
    ):
        if file.endswith(".keras"):
            model.save(file, overwrite=True)
        else:
            model.save_weights(file, overwrite=True)


def _read(array: SavedValue, shape: Any, dtype: Any = None) -> Any:
    del shape, dtype
    return jnp.asarray(array.read())


def _without_reading(variable: Any) -> Any:
    """Replaces ``variable.numpy()``, which optimizers save: a variable without a value goes to the store as it is."""
    return np.asarray(variable.value) if accessor.is_built(variable) else variable


class _StoreFile(io.BytesIO):
    """A file for HDF5 that hides failed writes from it, because HDF5 ends the process with a crash after one.

    After a failed write it drops all others; ``check`` and ``end`` raise the error.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._file = io.FileIO(path, "w+")
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises OSError if a write failed."""
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Closes the file. Raises OSError if a write failed."""
        self._file.close()
        self.check()

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and self._error is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            if self._error is None:
                return self._file.truncate(size)
        except OSError as error:
            self._error = error
        return self.tell() if size is None else size

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _store_of(values: _Values) -> type:
    """Returns the class of stores that write the values of variables in slabs."""

    class SlabStore(saving_lib.H5IOStore):
        """Keras's store, for files on disk."""

        def __init__(self, path_or_io: Any, archive: Any = None, mode: str = "r"):
            if archive is not None:
                raise CheckpointWriteError(
                    errno.EIO, "Keras could not make a temporary file for the weights beside the file."
                )
            self._file = _StoreFile(path_or_io)
            super().__init__(self._file, mode=mode)

        def close(self) -> None:
            try:
                super().close()
            finally:
                self._file.end()

        def __setitem__(self, key: str, value: Any) -> None:
            _, array = values.get(id(value), (None, None))
            if array is None:
                super().__setitem__(key, value.value if isinstance(value, keras.Variable) else value)
                return
            dataset = internals.group_of(self).create_dataset(key, array.shape, array.dtype)
            if array.dtype == jnp.bfloat16:
                dataset.attrs["dtype"] = "bfloat16"
            for index, part in array.slabs():
                dataset[index] = part
                self._file.check()

    return SlabStore


@contextlib.contextmanager
def _unallocated() -> Iterator[None]:
    """Gives large variables that are made in the block no values."""
    own = {name: getattr(keras.Variable, name) for name in ("__init__", "_deferred_initialize")}

    def make(variable: Any, *args: Any, **kwargs: Any) -> None:
        unallocated_variables.make(own["__init__"], variable, *args, **kwargs)

    def initialize(variable: Any) -> None:
        unallocated_variables.initialize(own["_deferred_initialize"], variable)

    with _with_methods(keras.Variable, __init__=make, _deferred_initialize=initialize):
        yield


@contextlib.contextmanager
def _with_methods(owner: type, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replaces methods of a class inside the block."""
    before = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
