"""The contents of a checkpoint, as described in its ``manifest.json``. Plain data, without I/O.

A checkpoint is a directory::

    ckpt-7/
      manifest.json      the contents, with a checksum of its own
      arrays/KEY/        an array, in zarr 3: zarr.json, and files of chunks with checksums
      components/KEY/    the components [R, ...] of a variable with a value on each replica
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, final

import jax.numpy as jnp

from replicax._src.checkpoint.chunks import grid_of
from replicax._src.checkpoint.errors import CorruptCheckpointError

MANIFEST = "manifest.json"
ARRAYS = "arrays"
COMPONENTS = "components"
_FORMAT = 5
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

    @classmethod
    def of(cls, held: Mapping[str, Any] | None) -> Self | None:
        """Reads it from a manifest."""
        if held is None:
            return None
        shapes = {name: tuple(held[name]) for name in ("shape", "chunk", "file", "writers")}
        return cls(**{**held, **shapes})


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

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, int, int]], num_files: int) -> Self:
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
    def of_text(cls, text: str, where: str) -> Self:
        """Reads the text of a manifest.

        Raises:
          CorruptCheckpointError: It is damaged, or was written by another version.
        """
        try:
            whole = json.loads(text)
            held = whole["contents"]
            is_whole = isinstance(held, dict) and zlib.crc32(_text(held).encode()) == whole["crc32"]
        except (ValueError, KeyError, TypeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise CorruptCheckpointError(
                f"{where!r} is damaged: its checksum is wrong, so the checkpoint cannot be verified. Restore "
                "another checkpoint."
            )
        if held.pop("format") not in _READABLE:
            raise CorruptCheckpointError(f"{where!r} was written by another version of replicax.")
        return cls(
            objects=tuple(SavedObject(**each) for each in held.pop("objects")),
            arrays={
                key: SavedArray(
                    each["label"],
                    StoredArray.of(each["value"]),
                    StoredArray.of(each["components"]),
                    each["combine"],
                )
                for key, each in held.pop("arrays").items()
            },
            processes=tuple(held.pop("processes")),
            files={
                folder: WrittenFiles(tuple(each["sizes"]), tuple(each["checksums"]))
                for folder, each in held.pop("files", {}).items()
            },
            **held,
        )


def _text(held: Any) -> str:
    return json.dumps(held, sort_keys=True)
