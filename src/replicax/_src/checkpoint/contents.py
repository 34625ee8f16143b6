"""The contents of a checkpoint, as described in its ``manifest.json``. Plain data, without I/O.

A checkpoint is a directory::

    ckpt-7/
      manifest.json      the contents, with a checksum of its own
      arrays/KEY/        an array, in zarr 3: zarr.json, and files of chunks with checksums
      components/KEY/    the components [R, ...] of a variable with a value on each replica
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Self, final

import jax.numpy as jnp

from replicax._src.checkpoint.array_chunks import grid_of
from replicax._src.checkpoint.errors import CorruptCheckpointError
from replicax._src.untrusted.strict_json import Form, JsonReader, TextError, read_json, wrong
from replicax._src.values.dtypes import dtype_name
from replicax._src.vocabulary.options import VariableAggregation

MANIFEST = "manifest.json"
ARRAYS = "arrays"
COMPONENTS = "components"
_FORMAT = 5
_MOST_BYTES = 1 << 30
_READABLE = (4, _FORMAT)  # format 4 does not describe the files of arrays


@final
@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in files.

    Attributes:
      shape, dtype: Its shape, and the name of its dtype.
      chunk: The shape of a chunk, which is read and verified at once.
      file: The shape of what a file has.
      writers: The number of the process that wrote each file, in C order; one number if all are equal.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    file: tuple[int, ...]
    writers: tuple[int, ...]

    def writer_of(self, position: int) -> int:
        """Returns the number of the process that wrote a file."""
        return self.writers[position if len(self.writers) > 1 else 0]

    @property
    def num_files(self) -> int:
        return math.prod(grid_of(self.shape, self.file))

    @property
    def num_chunks(self) -> int:
        """The number of chunks in the index of a file; 0 if a file is one chunk, without an index."""
        return 0 if self.chunk == self.file else math.prod(grid_of(self.file, self.chunk))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def check(self, where: str, num_processes: int) -> None:
        """Checks that its shapes fit together.

        Raises:
          TextError: They do not.
        """
        if not len(self.shape) == len(self.chunk) == len(self.file):
            raise wrong(f"{where}: file", self.file, f"a shape of {len(self.shape)} dims, like its chunk")
        for shape in (self.shape, self.file):
            JsonReader(shape, f"{where}: shape").check_size(jnp.dtype(self.dtype).itemsize)
        if any(size % by for size, by in zip(self.file, self.chunk, strict=True)):
            raise wrong(f"{where}: file", self.file, f"a shape of whole chunks, {self.chunk}")
        if len(self.writers) not in (bool(self.num_files), self.num_files, 1):
            raise wrong(f"{where}: writers", self.writers, f"one, or one for each of {self.num_files} files")
        if any(writer >= num_processes for writer in self.writers):
            raise wrong(f"{where}: writers", self.writers, f"numbers of {num_processes} processes")


@final
@dataclasses.dataclass(frozen=True)
class WrittenFiles:
    """The files of an array as they were written, in C order.

    Attributes:
      sizes: The number of bytes of each file; one number if all are equal.
      checksums: The CRC-32 of the checksums of each file's chunks. None for a file that is not in this checkpoint,
        because another process has it in its own.
    """

    sizes: tuple[int, ...]
    checksums: tuple[int | None, ...]

    def size_of(self, position: int) -> int:
        """Returns the number of bytes of a file."""
        return self.sizes[position if len(self.sizes) > 1 else 0]

    def check(self, where: str, num_files: int) -> None:
        """Checks that it has each file.

        Raises:
          TextError: It has not.
        """
        if len(self.checksums) != num_files:
            raise wrong(f"{where}.checksums", self.checksums, f"a list of {num_files}")
        has_one = any(checksum is not None for checksum in self.checksums)
        if len(self.sizes) not in ((1, num_files) if has_one else (0, 1, num_files)):
            raise wrong(f"{where}.sizes", self.sizes, f"one number, or {num_files}")

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[int, int, int]], num_files: int) -> Self:
        """Combines the position, size and checksum of each file."""
        known = {position: (size, checksum) for position, size, checksum in rows}
        sizes = {size for size, _ in known.values()}
        return cls(
            tuple(sizes) if len(sizes) < 2 else tuple(known.get(n, (0, 0))[0] for n in range(num_files)),
            tuple(known[n][1] if n in known else None for n in range(num_files)),
        )


@final
@dataclasses.dataclass(frozen=True)
class SavedArray:
    """The value of a variable, or of another leaf.

    Attributes:
      label: The program's name of it, for messages.
      value: The array; None if it is computed from the components.
      components: The components [R, ...], if replicas have values of their own.
      combine: How the value is computed from the components: the name of a ``VariableAggregation``.
    """

    label: str
    value: StoredArray | None
    components: StoredArray | None = None
    combine: str = ""

    def check(self, where: str) -> None:
        """Checks that it has a value.

        Raises:
          TextError: It has none.
        """
        components = None if self.components is None else self.components.shape
        if components is not None and not (components and components[0]):
            raise wrong(f"{where}.components", components, "a shape [R, ...]")
        if self.value is not None and components is not None and components[1:] != self.value.shape:
            raise wrong(f"{where}.components", components, f"the shape [R, *{self.value.shape}]")
        if self.value is None and (components is None or not self.combine):
            raise TextError(f"{where} has no value, and no components that combine to one")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        if self.value is not None:
            return self.value.shape
        assert self.components is not None
        return self.components.shape[1:]

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        stored = self.value or self.components
        assert stored is not None
        return stored.dtype


@final
@dataclasses.dataclass(frozen=True)
class SavedObject:
    """A node of the graph of saved objects.

    Attributes:
      children: The numbers of the child objects, by name.
      key: The key of the array or state, if it is one.
      kind: The kind of the object, if its parts are meaningless for objects of other kinds.
    """

    children: Mapping[str, int]
    key: str = ""
    kind: str = ""


@final
@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
      objects: The graph; the first object is the root.
      arrays: The arrays by key.
      states: The states by key, as JSON: one for each process, or one for all if they are equal.
      save: The identity of the save, which is also in each ``zarr.json``.
      processes: The names of the processes that wrote it, by number.
      number: The number of the checkpoint, if it has one.
      time_s: The time of the save, in seconds since 1970. It is later than that of every checkpoint that was in the
        directory, even if the clock was set back.
      metrics: The metrics that were given.
      part_of: The number of the process whose own checkpoint it is: it has only what that process's devices held, and
        files of other writers are not in it. None for a checkpoint that has everything.
      checksums: The CRC-32 of each ``zarr.json``, by its folder.
      files: The files of each array, by its folder. Empty for a checkpoint of an earlier version.
    """

    objects: tuple[SavedObject, ...]
    arrays: Mapping[str, SavedArray]
    states: Mapping[str, list[Any]]
    save: str
    processes: tuple[str, ...]
    number: int
    time_s: float
    metrics: Any = None
    part_of: int | None = None
    checksums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    files: Mapping[str, WrittenFiles] = dataclasses.field(default_factory=dict)

    def folders(self) -> Iterator[tuple[str, str, StoredArray]]:
        """Yields the folder in the checkpoint, the key, and the description of all that is in files."""
        for key, array in self.arrays.items():
            if array.value is not None:
                yield f"{ARRAYS}/{key}", key, array.value
            if array.components is not None:
                yield f"{COMPONENTS}/{key}", key, array.components

    def to_text(self) -> str:
        """Returns the text of the manifest, with a checksum of its own."""
        held = _text({"format": _FORMAT, **dataclasses.asdict(self)})
        return f'{{"crc32": {zlib.crc32(held.encode())}, "contents":\n{held}}}\n'

    @classmethod
    def from_text(cls, text: str, where: str) -> Self:
        """Reads the text of a manifest.

        Raises:
          CorruptCheckpointError: It is damaged, or was written by another version.
        """
        try:
            whole = read_json(text, most_bytes=_MOST_BYTES)
            held = whole["contents"]
            is_whole = isinstance(held, dict) and zlib.crc32(_text(held).encode()) == whole["crc32"]
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            raise CorruptCheckpointError(
                f"{where!r} is damaged: its checksum is wrong, so the checkpoint cannot be verified. Restore "
                "another checkpoint."
            )
        if held.get("format") not in _READABLE:
            raise CorruptCheckpointError(f"{where!r} was written by another version of replicax.")
        try:
            contents = cls(**JsonReader(held, "contents").record(_FIELDS[held.pop("format")]))
            contents._check()
        except TextError as error:
            raise CorruptCheckpointError(
                f"{where!r} does not describe a checkpoint, though its checksum is right: {error}. Another program has "
                "written it. Restore another checkpoint."
            ) from error
        return contents

    def _check(self) -> None:
        """Checks that the parts of a manifest fit together.

        Raises:
          TextError: They do not.
        """
        for number, each in enumerate(self.objects):
            where = f"contents.objects[{number}]"
            for name, child in each.children.items():
                if child >= len(self.objects):
                    raise wrong(f"{where}.children[{name!r}]", child, "the number of an object")
            if each.key and each.key not in self.arrays and each.key not in self.states:
                raise wrong(f"{where}.key", each.key, "the key of an array or a state")
        for key, states in self.states.items():
            if len(states) not in (1, len(self.processes)):
                raise wrong(f"contents.states[{key!r}]", states, "one state, or one for each process")
        if self.part_of is not None and self.part_of >= len(self.processes):
            raise wrong("contents.part_of", self.part_of, "the number of a process")
        for key, array in self.arrays.items():
            array.check(f"contents.arrays[{key!r}]")
        for folder, _, stored in self.folders():
            stored.check(f"the array in {folder!r}", len(self.processes))
            if folder not in self.checksums:
                raise TextError(f"contents.checksums has no {folder!r}")
            if folder in self.files:
                self.files[folder].check(f"contents.files[{folder!r}]", stored.num_files)
            elif self.files:
                raise TextError(f"contents.files has no {folder!r}")


def _text(held: Any) -> str:
    return json.dumps(held, sort_keys=True)


# --- the form of a manifest -----------------------------------------------------------------------------------


def _key(it: JsonReader) -> str:
    """Accepts keys that stay inside the folder of arrays."""
    key = it.string()
    if key and ("\0" in key or not {"", ".", ".."}.isdisjoint(key.split("/"))):
        raise it.wrong("the key of an array: names, separated by '/'")
    return key


def _state(it: JsonReader) -> Any:
    if it.value is None:  # of a process that did not track it
        return it.value
    if isinstance(it.value, dict):
        text = it.record({"bytes": JsonReader.string})["bytes"]
        try:
            base64.b64decode(text, validate=True)
        except ValueError as error:
            raise wrong(it.where, text, "bytes in base64") from error
        return it.value
    return list(it.fixed(JsonReader.anything))


_MOST_DIMS = 32


def _shape(it: JsonReader) -> tuple[int, ...]:
    return it.items(JsonReader.count, most=_MOST_DIMS)


def _step(it: JsonReader) -> tuple[int, ...]:
    return it.items(lambda size: size.whole(1), most=_MOST_DIMS)


def _counts(it: JsonReader) -> tuple[int, ...]:
    return it.items(JsonReader.count)


def _stored(it: JsonReader) -> StoredArray:
    fields = {"shape": _shape, "dtype": dtype_name, "chunk": _step, "file": _step, "writers": _counts}
    return StoredArray(**it.record(fields))


_COMBINING: Final = ("", *(each.name for each in VariableAggregation))
_ARRAY: Final[Mapping[str, Form[Any]]] = {
    "label": JsonReader.string,
    "value": lambda it: it.optional(_stored),
    "components": lambda it: it.optional(_stored),
    "combine": lambda it: it.one_of(*_COMBINING),
}
_OBJECT: Final[Mapping[str, Form[Any]]] = {
    "children": lambda it: it.table(JsonReader.count),
    "key": JsonReader.string,
    "kind": JsonReader.string,
}


def _files(it: JsonReader) -> WrittenFiles:
    checksums: Form[Any] = lambda each: each.optional(JsonReader.crc32)  # noqa: E731
    return WrittenFiles(**it.record({"sizes": _counts, "checksums": lambda each: each.items(checksums)}))


def _metric(it: JsonReader) -> float:
    """Accepts every number, also NaN and infinity."""
    return it.value if isinstance(it.value, float) else it.number()


_OF_FORMAT_4: Final[Mapping[str, Form[Any]]] = {
    "objects": lambda it: it.items(lambda each: SavedObject(**each.record(_OBJECT)), least=1),
    "arrays": lambda it: it.table(lambda each: SavedArray(**each.record(_ARRAY)), _key),
    "states": lambda it: it.table(lambda each: list(each.items(_state, least=1))),
    "save": JsonReader.string,
    "processes": lambda it: it.items(JsonReader.string, least=1),
    "number": lambda it: it.whole(most=10**250),  # a part of a file's name
    "time_s": JsonReader.number,
    "metrics": lambda it: it.optional(lambda each: each.table(_metric)),
    "part_of": lambda it: it.optional(JsonReader.count),
    "checksums": lambda it: it.table(JsonReader.crc32),
}
_FIELDS: Final[Mapping[int, Mapping[str, Form[Any]]]] = {
    4: _OF_FORMAT_4,
    _FORMAT: {**_OF_FORMAT_4, "files": lambda it: it.table(_files)},
}
