"""Pieces as a server holds them, how they are shown, and whether what came fits them. The caller has the lock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import numpy as np

from replicax._src.errors import InvalidArgumentError
from replicax._src.parameter_servers.store.changed_rows import ChangedRows
from replicax._src.parameter_servers.store.held_values import Spec
from replicax._src.parameter_servers.store.requests import Version
from replicax._src.parameter_servers.store.updates import CompiledUpdate

MAX_COPIED_BYTES: Final = 4_000_000


@dataclass(slots=True)
class HeldPiece:
    """A piece of a variable, here.

    Attributes:
      key: Its name.
      spec: Shape and dtype.
      value: Deleted if it was lost in an update that failed while it wrote in place.
      number: The number of its version. It grows with every change, and is not used again for this key.
      changed: Since the last snapshot.
    """

    key: str
    spec: Spec
    value: jax.Array
    number: int
    changed: ChangedRows = field(init=False)

    def __post_init__(self) -> None:
        self.changed = ChangedRows(self.spec)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the value."""
        shape, dtype = self.spec
        return math.prod(shape) * dtype.itemsize

    def held(self) -> jax.Array:
        """The value. Raises RuntimeError if it is lost."""
        if self.value.is_deleted():
            raise RuntimeError(
                f'The value of piece "{self.key}" was lost: an update ran out of memory while it was written in place. '
                "Assign it, or start the server anew from a snapshot."
            )
        return self.value

    def view(self) -> np.ndarray:
        """The value without a copy. While it is alive an update needs memory for another value: keep it briefly."""
        return np.asarray(self.held())


def shown(pieces: Sequence[HeldPiece]) -> list[np.ndarray]:
    """Their values: small ones copied, so that the next update need not go to other memory; large ones as views."""
    values = [piece.view() for piece in pieces]
    num_bytes = 0
    for index in sorted(range(len(values)), key=lambda i: values[i].nbytes):
        num_bytes += values[index].nbytes
        if num_bytes >= MAX_COPIED_BYTES:
            break
        values[index] = values[index].copy()
    return values


def rows_of(piece: HeldPiece, numbers: np.ndarray) -> np.ndarray:
    """Copies of rows; a number that is none is that of the first or the last row."""
    return np.take(piece.view(), numbers, axis=0, mode="clip")


def staleness_of(used: Iterable[tuple[HeldPiece, Version | None]], instance: str) -> int | None:
    """Returns the largest number of changes since a version was used; None if no version is one of this store."""
    ages = [
        piece.number - version[1] for piece, version in used if version is not None and version[0] == instance
    ]
    return max(0, *ages) if ages else None


def check_tables(tables: Sequence[HeldPiece]) -> None:
    """Raises InvalidArgumentError for a piece without rows."""
    for piece in tables:
        shape, _ = piece.spec
        if not shape or not shape[0]:
            raise InvalidArgumentError(
                f'Piece "{piece.key}" has the shape {list(shape)}, and rows of it were to be read. '
                "Pull it whole; rows are those of a piece that has some."
            )


def check_state(update: CompiledUpdate, state: Sequence[HeldPiece]) -> None:
    """Raises InvalidArgumentError unless the program was exported for these."""
    for piece, spec in zip(state, update.state):
        if piece.spec != spec:
            raise InvalidArgumentError(
                f'Program {update.program.digest} takes piece "{piece.key}" as {text(*spec)}, and it is '
                f"{text(*piece.spec)}. Export the program for the piece as it is."
            )


def check_assigned(piece: HeldPiece, array: np.ndarray) -> None:
    """Raises InvalidArgumentError unless the array may be the piece's value."""
    if piece.spec != (array.shape, array.dtype):
        raise InvalidArgumentError(
            f'Piece "{piece.key}" is {text(*piece.spec)}, and {text(array.shape, array.dtype)} was to be assigned. '
            "Give a value of its shape and dtype."
        )


def text(shape: Sequence[int], dtype: np.dtype[Any]) -> str:
    """``float32[4, 2]``."""
    return f"{dtype.name}{list(shape)}"


def few(keys: Mapping[str, Any], limit: int = 5) -> str:
    """The first keys, for people."""
    if not keys:
        return "none"
    first = ", ".join(f'"{key}"' for key in list(keys)[:limit])
    return first if len(keys) <= limit else f"{first} and {len(keys) - limit} more"
