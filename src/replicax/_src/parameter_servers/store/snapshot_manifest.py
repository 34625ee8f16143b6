"""The description in a snapshot: the places of the bytes of each piece, and the files that they are in. Pure.

A snapshot is a *base*, in whose file all pieces are, or it goes on from another one: its file has what has changed
since, and says where the rest is. The files from the base to this one are its *chain*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, final

import jax.numpy as jnp
import numpy as np

from replicax._src.parameter_servers.errors import SnapshotError
from replicax._src.parameter_servers.store.held_values import Spec

FORMAT: Final = 2
MAX_FILES: Final = 64
"""In a chain. Who restores opens all of them; at the usual interval there is a new base in about an hour."""

GROWTH: Final = 1.5
"""A chain has at most so many times the bytes of the pieces: of what is written, two thirds are bases then at worst."""


class Block(NamedTuple):
    """Some bytes of a file, and their checksum (CRC-32)."""

    file: int
    offset: int
    num_bytes: int
    checksum: int


class Part(NamedTuple):
    """Values of a piece in one file: of all its rows, or of those of some units.

    Attributes:
      values: One row after the other.
      units: The units' numbers, ascending, as ``<u8``; None: all of the piece.
    """

    values: Block
    units: Block | None = None

    @property
    def num_bytes(self) -> int:
        """The number of bytes of both."""
        return self.values.num_bytes + (0 if self.units is None else self.units.num_bytes)


@dataclass(frozen=True)
class PieceRecord:
    """A piece as a snapshot has it.

    Attributes:
      number: The number of its version.
      rows_per_unit: Rows that are written together, where not all are.
      parts: A whole one, and what has replaced rows of it, in order.
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
        """The numbers of the files that have parts of it."""
        return {part.values.file for part in self.parts}

    def described(self) -> dict[str, Any]:
        """Returns it as JSON."""
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
        """The record that was described in a file."""
        spec = (tuple(described["shape"]), np.dtype(jnp.dtype(described["dtype"])))
        if "parts" not in described:  # of format 1: whole, in the same file
            place = Block(file, described["offset"], described["bytes"], described["checksum"])
            return cls(described["key"], spec, described["number"], 1, (Part(place),))
        parts = tuple(
            Part(Block(*values), None if units is None else Block(*units))
            for values, units in described["parts"]
        )
        return cls(described["key"], spec, described["number"], described["rows_per_unit"], parts)


@final
@dataclass(frozen=True)
class Manifest:
    """A snapshot.

    Attributes:
      content: What it has besides pieces, as JSON.
      pieces: The pieces by key.
      chain: Its files from the base on, and how many bytes of pieces each has.
    """

    content: Mapping[str, Any]
    pieces: Mapping[str, PieceRecord]
    chain: Sequence[tuple[int, int]]

    @property
    def base(self) -> int:
        """The number of the first file."""
        return self.chain[0][0]

    @property
    def number(self) -> int:
        """The number of the last file, its own."""
        return self.chain[-1][0]

    @property
    def files(self) -> set[int]:
        """The numbers of the files that have parts of it."""
        return {file for piece in self.pieces.values() for file in piece.files}

    def goes_on(self, num_new_bytes: int, num_bytes: int) -> bool:
        """True if a snapshot of ``num_bytes`` continues this one's chain; False if it has to be a base."""
        held = sum(of_file for _, of_file in self.chain)
        return len(self.chain) < MAX_FILES and held + num_new_bytes <= GROWTH * num_bytes

    def described(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return {
            "format": FORMAT,
            "content": self.content,
            "pieces": [piece.described() for piece in self.pieces.values()],
            "chain": [list(each) for each in self.chain],
        }

    @classmethod
    def of(cls, described: Mapping[str, Any], file: int) -> Self:
        """The manifest that a file has. Raises SnapshotError if it is of another version."""
        if described["format"] not in (1, FORMAT):
            raise SnapshotError(
                f"it has format {described['format']}, and what is read here is up to {FORMAT}"
            )
        pieces = {piece["key"]: PieceRecord.of(piece, file) for piece in described["pieces"]}
        whole = (file, sum(piece.num_bytes for piece in pieces.values()))
        chain = [(number, num_bytes) for number, num_bytes in described.get("chain", [whole])]
        return cls(described["content"], pieces, chain)
