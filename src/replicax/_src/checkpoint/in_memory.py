"""A checkpoint in memory: the state that a live process gives to the replacement of a dead one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, final

import jax.numpy as jnp
import numpy as np

from replicax._src.checkpoint.array_chunks import part_at
from replicax._src.checkpoint.array_files import Piece
from replicax._src.checkpoint.array_leaves import ArrayLeaf, ValueReader, VariableLeaf
from replicax._src.checkpoint.contents import ARRAYS, COMPONENTS, Contents, SavedArray, StoredArray
from replicax._src.checkpoint.errors import CorruptCheckpointError
from replicax._src.checkpoint.saved import combined
from replicax._src.untrusted.strict_json import Form, JsonReader, TextError

_MOST_DIMS: Final = 32


class ReadableCheckpoint(Protocol):
    """A checkpoint that can be restored, on a disk or in memory.

    Attributes:
      path: The path of its directory. In memory: the path that it would have.
      contents: Its contents.
    """

    path: str
    contents: Contents

    def array(self, key: str) -> ValueReader:
        """Returns an array, to read all or parts of it."""
        ...

    def verify(self, without: Iterable[str] = (), share: tuple[int, int] = (0, 1)) -> None:
        """Verifies what is not read, or a share of it."""
        ...

    def note_given(self, key: str, leaf: ArrayLeaf) -> None:
        """Notes that a leaf has got the value of a key."""
        ...


def described(
    contents: Contents, pieces: Sequence[Piece], compared: Mapping[str, tuple[bool, bool]]
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns the description of a checkpoint as JSON, and its arrays.

    Args:
      contents: The contents.
      pieces: The arrays.
      compared: The arguments of ``VariableLeaf.note_compared`` by key.
    """
    places = [[piece.folder, list(piece.origin)] for piece in pieces]
    checksums = {folder: 0 for folder, _, _ in contents.folders()}  # there are no files
    contents = dataclasses.replace(contents, checksums=checksums)
    flags = {key: list(each) for key, each in compared.items()}
    return {"contents": contents.to_text(), "pieces": places, "compared": flags}, [
        piece.value for piece in pieces
    ]


@final
class CheckpointInMemory:
    """A checkpoint in memory.

    Args:
      path: The path that it would have.
      description, arrays: The results of ``described``.

    Raises:
      CorruptCheckpointError: They do not fit together.
    """

    def __init__(self, path: str, description: Any, arrays: Sequence[np.ndarray]):
        self.path = path
        try:
            fields = JsonReader(description, "description").record(_DESCRIPTION)
            self.contents = Contents.from_text(fields["contents"], f"the state of {path}")
            self._values = _put_together(self.contents, fields["pieces"], arrays)
            self._compared = fields["compared"]
        except TextError as error:
            raise CorruptCheckpointError(
                f"The live tasks have sent a state that does not fit together ({error}). Use one version of replicax in all "
                "processes."
            ) from error

    def array(self, key: str) -> ValueInMemory:
        """Returns an array."""
        values = self._values
        return ValueInMemory(
            self.contents.arrays[key], values.get(f"{ARRAYS}/{key}"), values.get(f"{COMPONENTS}/{key}")
        )

    def verify(self, without: Iterable[str] = (), share: tuple[int, int] = (0, 1)) -> None:
        """Does nothing: what has come over a connection is verified."""
        del without, share

    def note_given(self, key: str, leaf: ArrayLeaf) -> None:
        """Notes that a leaf has got the value of a key, which is as old here as in the process that has given it."""
        if isinstance(leaf, VariableLeaf) and key in self._compared:
            is_adopted, is_of_program = self._compared[key]
            leaf.note_compared(is_adopted=is_adopted, is_of_program=is_of_program)


@final
class ValueInMemory:
    """A value of a checkpoint in memory, with the methods of ``SavedValue``."""

    def __init__(self, array: SavedArray, value: np.ndarray | None, components: np.ndarray | None):
        self.shape, self.dtype, self.label = array.shape, np.dtype(jnp.dtype(array.dtype)), array.label
        self.num_components = 0 if components is None else components.shape[0]
        self._value, self._components, self._combine = value, components, array.combine

    def read(self, index: tuple[Any, ...] = (), into: np.ndarray | None = None) -> np.ndarray:
        """Returns a copy of the values of an index, by default of all."""
        del into
        if self._value is not None:
            return np.array(self._value[index])
        return combined(self.read_components((slice(None), *index)), self._combine)

    def read_components(self, index: tuple[Any, ...] = (), into: np.ndarray | None = None) -> np.ndarray:
        """Does the same for the components [R, ...]."""
        del into
        assert self._components is not None
        return np.array(self._components[index])

    def slabs(self, max_bytes: int | None = None) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yields all values, in one part."""
        del max_bytes
        yield tuple(slice(0, size) for size in self.shape), self.read()


def _place(it: JsonReader) -> tuple[str, tuple[int, ...]]:
    return it.fixed(JsonReader.string, lambda origin: origin.items(JsonReader.count, most=_MOST_DIMS))


_DESCRIPTION: Final[Mapping[str, Form[Any]]] = {
    "contents": JsonReader.string,
    "pieces": lambda it: it.items(_place),
    "compared": lambda it: it.table(lambda each: each.fixed(JsonReader.flag, JsonReader.flag)),
}


def _put_together(
    contents: Contents, places: Sequence[tuple[str, tuple[int, ...]]], arrays: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the arrays by their folders. An array of one piece is not copied."""
    stored = {folder: one for folder, _, one in contents.folders()}
    if len(places) != len(arrays):
        raise TextError(f"there are {len(arrays)} arrays for {len(places)} places")
    values: dict[str, np.ndarray] = {}
    num_left = {folder: math.prod(one.shape) for folder, one in stored.items()}
    for (folder, origin), array in zip(places, arrays, strict=True):
        if folder not in stored:
            raise TextError(f"an array of {folder!r}, which the contents do not have")
        one = stored[folder]
        index = part_at(origin, one.file, one.shape) if len(origin) == len(one.shape) else ()
        _check_form(array, folder, one, tuple(part.stop - part.start for part in index))
        if array.size == math.prod(one.shape):
            values[folder] = array.reshape(one.shape)
        else:
            if folder not in values:
                values[folder] = np.empty(one.shape, array.dtype)
            values[folder][index] = array
        num_left[folder] -= array.size
    for folder, left in num_left.items():
        if left:
            raise TextError(f"{left} values of {folder!r} are missing")
        if folder not in values:  # it has no values
            values[folder] = np.empty(stored[folder].shape, jnp.dtype(stored[folder].dtype))
    return values


def _check_form(array: np.ndarray, folder: str, stored: StoredArray, shape: tuple[int, ...]) -> None:
    has, needs = (array.shape, array.dtype), (shape, np.dtype(jnp.dtype(stored.dtype)))
    if has != needs:
        raise TextError(f"an array of {folder!r} has shape and dtype {has}, and needs {needs}")
