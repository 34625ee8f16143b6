"""The contents of a checkpoint, as described in its ``manifest.json``. Plain data, without I/O.

A checkpoint is a directory::

    ckpt-7/
      manifest.json    the contents, with checksums
      state/           the arrays, as an item of orbax, which orbax reads without replicax
      components/      the components of variables with a value on each replica, if any; also an item of orbax
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any, Self, final

from replicax._src.checkpoint.errors import CorruptCheckpointError

MANIFEST = "manifest.json"
STATE = "state"
COMPONENTS = "components"
_FORMAT = 2
_FORMATS = (1, _FORMAT)  # 1 has no kinds of objects


@final
@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array.

    Attributes:
      shape, dtype: The shape and dtype of the value.
      crc32: The CRC-32 of the value's bytes.
      label: The program's name of it, for messages.
      components_crc32: The CRC-32 of its components [R, ...]; None if it has none.
      num_components: The number of components, R.
    """

    shape: tuple[int, ...]
    dtype: str
    crc32: int
    label: str
    components_crc32: int | None = None
    num_components: int = 0


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
      files: The size and the checksum of each file, by its path in the checkpoint.
      number: The number of the checkpoint, if it has one.
      order: The position among the checkpoints of the directory.
      time_s: The time of the save, in seconds since 1970.
      metrics: The metrics that were given.
    """

    objects: tuple[SavedObject, ...]
    arrays: Mapping[str, SavedArray]
    states: Mapping[str, list[Any]]
    files: Mapping[str, tuple[int, int]]
    number: int
    order: int
    time_s: float
    metrics: Any = None

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def to_text(self) -> str:
        """Returns the text of the manifest, with a checksum of its own."""
        held = _text({"format": _FORMAT, **dataclasses.asdict(self)})
        return f'{{"crc32": {zlib.crc32(held.encode())}, "contents":\n{held}}}\n'

    @classmethod
    def of_text(cls, text: str, where: str) -> Self:
        """Reads the text of a manifest.

        Raises:
          CorruptCheckpointError: It is damaged, or was written by a later version.
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
                "another checkpoint, or read the arrays with orbax."
            )
        if held.pop("format") not in _FORMATS:
            raise CorruptCheckpointError(f"{where!r} was written by a later version: update replicax.")
        return cls(
            objects=tuple(SavedObject(**each) for each in held.pop("objects")),
            arrays={
                key: SavedArray(**{**each, "shape": tuple(each["shape"])})
                for key, each in held.pop("arrays").items()
            },
            files={path: (int(size), int(crc)) for path, (size, crc) in held.pop("files").items()},
            **held,
        )


def _text(held: Any) -> str:
    return json.dumps(held, sort_keys=True)
