"""What a checkpoint says of itself: ``manifest.json``. Plain data; nothing is read or written here but its text.

A checkpoint is a directory::

    ckpt-7/
      manifest.json    this: what is in it, with checksums
      state/           the arrays, an item of orbax: what orbax reads without replicax
      components/      of variables with a value for each replica, these values, if there are such; of orbax too
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
_FORMATS = (1, _FORMAT)  # without the kinds of objects, and with them


@final
@dataclasses.dataclass(frozen=True)
class SavedArray:
    """One array.

    Attributes:
      shape, dtype: Of the value.
      crc32: Of the value's bytes.
      label: What the program called it: for people.
      components_crc32: Of its components [R, ...]; None if it has none.
      num_components: R.
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
    """A node of the graph of what was saved.

    Attributes:
      children: By name, the number of the object.
      key: Of the array or state, if it is one.
      kind: Where its parts mean nothing to objects of other kinds.
    """

    children: Mapping[str, int]
    key: str = ""
    kind: str = ""


@final
@dataclasses.dataclass(frozen=True)
class Contents:
    """What is in a checkpoint.

    Attributes:
      objects: The graph; the first is what was saved.
      arrays: By key.
      states: By key: what is written as JSON, for each process that had another one.
      files: By path in the checkpoint, the size and the checksum.
      number: Of the checkpoint, where it has one.
      order: Counts the checkpoints of one directory.
      time_s: When it was taken, in seconds since 1970.
      metrics: As they were given.
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
        """As a manifest has it, with a checksum of its own."""
        held = _text({"format": _FORMAT, **dataclasses.asdict(self)})
        return f'{{"crc32": {zlib.crc32(held.encode())}, "contents":\n{held}}}\n'

    @classmethod
    def of_text(cls, text: str, where: str) -> Self:
        """What a manifest says.

        Raises:
          CorruptCheckpointError: It is not as it was written, or was written by a later version.
        """
        try:
            whole = json.loads(text)
            held = whole["contents"]
            is_whole = isinstance(held, dict) and zlib.crc32(_text(held).encode()) == whole["crc32"]
        except (ValueError, KeyError, TypeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise CorruptCheckpointError(
                f"{where!r} is not as it was written: its checksum does not fit. What it describes cannot be verified; restore "
                "another checkpoint, or read the arrays as they are with orbax."
            )
        if held.pop("format") not in _FORMATS:
            raise CorruptCheckpointError(f"{where!r} was written by a later version of replicax: update it.")
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
