"""The index of a snapshot: which bytes of which file hold each shard. Pure.

``snapshot_rules.py`` says which snapshot continues which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, final

import jax.numpy as jnp
import numpy as np

from replicax._ps.store.held_values import Spec
from replicax._ps.store.snapshot_rules import Chain
from replicax._src.program_kit.errors import SnapshotError
from replicax._src.program_kit.texts import JsonReader, TextError, dtype_name

FORMAT: Final = 2
_MOST_UNIT_BYTES: Final = 64 << 10
"""The most bytes of a unit of several rows. This version writes units of some hundred bytes."""


class Block(NamedTuple):
    """A range of bytes in a file, with its checksum (CRC-32)."""

    file: int
    offset: int
    num_bytes: int
    checksum: int


class Part(NamedTuple):
    """Values of a shard in one file: of all rows, or of the rows of some units.

    Attributes:
      values: The rows, one after another.
      units: The numbers of the units, ascending, as ``<u8``; None for the whole shard.
    """

    values: Block
    units: Block | None = None

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the values and the unit numbers."""
        return self.values.num_bytes + (0 if self.units is None else self.units.num_bytes)


@dataclass(frozen=True)
class ShardRecord:
    """A shard in a snapshot.

    Attributes:
      number: The number of its version.
      rows_per_unit: The number of rows that are written together when only some are written.
      parts: A part with all rows, then parts that replace some rows, in order.
    """

    key: str
    spec: Spec
    number: int
    rows_per_unit: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the value."""
        shape, dtype = self.spec
        return math.prod(shape) * dtype.itemsize

    @property
    def files(self) -> set[int]:
        """The numbers of the files that have parts of the shard."""
        return {part.values.file for part in self.parts}

    def described(self) -> dict[str, Any]:
        """Returns the record as JSON."""
        shape, dtype = self.spec
        return {
            "key": self.key,
            "shape": list(shape),
            "dtype": dtype.name,
            "number": self.number,
            "rows_per_unit": self.rows_per_unit,
            "parts": self.parts,
        }

    @classmethod
    def of(cls, described: Mapping[str, Any], file: int) -> Self:
        """Makes the record that a file describes, whose fields are checked."""
        spec = (described["shape"], np.dtype(jnp.dtype(described["dtype"])))
        if "parts" not in described:  # format 1: the whole shard, in the same file
            place = Block(file, described["offset"], described["bytes"], described["checksum"])
            return cls(described["key"], spec, described["number"], 1, (Part(place),))
        return cls(
            described["key"], spec, described["number"], described["rows_per_unit"], described["parts"]
        )

    def check(self) -> None:
        """Checks that its parts have the bytes that its shape needs.

        Raises:
          TextError: They have not.
        """
        shape, dtype = self.spec
        where = f"shard {self.key!r:.60}"
        JsonReader(shape, where).check_size(dtype.itemsize)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if self.rows_per_unit > 1 and self.rows_per_unit * max(1, row_bytes) > _MOST_UNIT_BYTES:
            rows = JsonReader(self.rows_per_unit, f"{where}: rows_per_unit")
            raise rows.wrong(f"units of {_MOST_UNIT_BYTES} bytes")
        whole, *later = self.parts
        if whole.units is not None or whole.values.num_bytes != self.num_bytes:
            raise JsonReader(whole, where).wrong(f"a part of {self.num_bytes} bytes first")
        if any(part.units is None for part in later) or (later and not shape):
            raise JsonReader(later, where).wrong("parts of some rows, after the first")


@final
@dataclass(frozen=True)
class Manifest:
    """A snapshot.

    Attributes:
      content: Everything besides the shards, as JSON.
      shards: The shards by key.
      chain: The files from the base on, each with its number of bytes of shards.
    """

    content: Mapping[str, Any]
    shards: Mapping[str, ShardRecord]
    chain: Chain

    @property
    def base(self) -> int:
        """The number of the first file."""
        return self.chain[0][0]

    @property
    def number(self) -> int:
        """The number of the last file, which is its own."""
        return self.chain[-1][0]

    @property
    def files(self) -> set[int]:
        """The numbers of the files that have parts of the snapshot."""
        return {file for shard in self.shards.values() for file in shard.files}

    def described(self) -> dict[str, Any]:
        """Returns the index as JSON."""
        return {
            "format": FORMAT,
            "content": self.content,
            "shards": [shard.described() for shard in self.shards.values()],
            "chain": [list(each) for each in self.chain],
        }

    @classmethod
    def of(cls, described: Mapping[str, Any], file: int) -> Self:
        """Makes the index that a file has. Raises SnapshotError if it has another format, or wrong contents."""
        number = described.get("format") if isinstance(described, dict) else None
        if number not in _MANIFEST:
            raise SnapshotError(f"it has format {number!r:.60}, and this version reads up to {FORMAT}")
        try:
            known = JsonReader(described, "its index").record(_MANIFEST[described["format"]])
            shards = {shard["key"]: ShardRecord.of(shard, file) for shard in known["shards"]}
            for shard in shards.values():
                shard.check()
        except TextError as error:
            raise SnapshotError(
                f"its index has the right checksum and wrong contents: {error}; another program has written it"
            ) from error
        whole = (file, sum(shard.num_bytes for shard in shards.values()))
        return cls(known["content"], shards, list(known.get("chain", [whole])))


# --- the form of an index ---------------------------------------------------------------------------------------


_BLOCK: Final = (JsonReader.count, JsonReader.count, JsonReader.count, JsonReader.crc32)
_SHARD: Final[Mapping[str, Callable[[JsonReader], Any]]] = {
    "key": JsonReader.string,
    "shape": lambda it: it.items(JsonReader.count, most=64),
    "dtype": dtype_name,
    "number": JsonReader.count,
}
_SHARD_OF_FORMAT_1: Final = {
    **_SHARD,
    "offset": JsonReader.count,
    "bytes": JsonReader.count,
    "checksum": JsonReader.crc32,
}
_SHARD_OF_FORMAT_2: Final = {
    **_SHARD,
    "rows_per_unit": lambda it: it.whole(1),
    "parts": lambda it: it.items(_part, least=1),
}


def _block(it: JsonReader) -> Block:
    return Block(*it.fixed(*_BLOCK))


def _part(it: JsonReader) -> Part:
    return Part(*it.fixed(_block, lambda units: units.optional(_block)))


def _pairs(it: JsonReader, least: int = 0) -> tuple[tuple[Any, ...], ...]:
    return it.items(lambda pair: pair.fixed(JsonReader.count, JsonReader.count), least=least)


def _content(it: JsonReader) -> dict[str, Any]:
    windows = {"low": JsonReader.count, "runs": _pairs}
    return it.record(
        {
            "epoch": JsonReader.count,
            "incarnation": lambda name: name.optional(JsonReader.string),
            "updates": JsonReader.count,
            "highest_number": JsonReader.count,
            "windows": lambda table: table.table(lambda window: window.record(windows)),
            "programs": lambda each: each.items(
                lambda program: program.record({"digest": JsonReader.string}, others=True)
            ),
        },
        {"time": JsonReader.number, "num_held_gradients": JsonReader.count},
        others=True,
    )


_MANIFEST: Final[Mapping[int, Mapping[str, Callable[[JsonReader], Any]]]] = {
    1: {
        "format": JsonReader.count,
        "content": _content,
        "shards": lambda it: it.items(lambda shard: shard.record(_SHARD_OF_FORMAT_1)),
    },
    FORMAT: {
        "format": JsonReader.count,
        "content": _content,
        "shards": lambda it: it.items(lambda shard: shard.record(_SHARD_OF_FORMAT_2)),
        "chain": lambda it: _pairs(it, least=1),
    },
}
