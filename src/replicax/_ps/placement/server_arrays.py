"""``ServerArray``: the value of a variable on parameter servers, in one piece or in shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
import numpy as np

from replicax._src.program_kit.variables import RemoteArray

_TABLE_BYTES = 1 << 20

Initial = Callable[[], Any]
"""Returns the first value."""


@dataclass(frozen=True)
class Shard:
    """A shard of a variable on one parameter server: rows ``start`` to ``stop`` of its first dim, or all of it.

    Attributes:
      ps: The index of the parameter server.
      key: The key of the shard, unique on that server.
      rows: The (start, stop) of its rows; None for a variable in one piece.
    """

    ps: int
    key: str
    rows: tuple[int, int] | None = None


@final
class Balance:
    """Chooses the parameter server for the next shard: the first one with the fewest bytes.

    Args:
      bytes_on: The number of bytes on each server.
    """

    def __init__(self, bytes_on: Sequence[int]):
        self.bytes_on = list(bytes_on)

    def take(self, num_bytes: int) -> int:
        """Returns the index of the server for a shard of this size."""
        ps = min(range(len(self.bytes_on)), key=lambda index: (self.bytes_on[index], index))
        self.add(ps, num_bytes)
        return ps

    def add(self, ps: int, num_bytes: int) -> None:
        """Counts a shard on server ``ps``. An empty shard counts as one byte, so that empty shards spread, too."""
        self.bytes_on[ps] += max(num_bytes, 1)

    def remove(self, ps: int, num_bytes: int) -> None:
        """Removes a shard from the count."""
        self.bytes_on[ps] -= max(num_bytes, 1)


class ArrayHolder(Protocol):
    """The session that has the values of arrays: ``_ps/client/session.py``."""

    @property
    def num_ps(self) -> int: ...

    def make(self, arrays: Sequence[ServerArray]) -> None:
        """Creates arrays on the servers that are not there yet."""

    def read(self, arrays: Sequence[ServerArray]) -> list[np.ndarray]:
        """Returns the full values of arrays, of one moment."""
        ...

    def read_rows(self, array: ServerArray, ids: np.ndarray) -> np.ndarray:
        """Returns a copy of the rows of an array at ``ids`` [n]."""
        ...

    def assign(self, array: ServerArray, value: np.ndarray) -> None:
        """Replaces a value, on every server that has a shard or a copy of it."""


@final
class ServerArray(RemoteArray):
    """A value on parameter servers. It has no shards before its first use, so that it can be placed beside another.

    Attributes:
      holder: The object that stores the value.
      name: The name that messages show.
      key: The prefix of the keys of its shards. The holder assigns it.
      shape, dtype: The shape and dtype of the full value.
      row_ranges: The (start, stop) of each shard's rows; empty if there is one shard.
      initial: Returns the first value; None after it has been made.
      colocated_with: The array whose servers and row ranges it shares; None if it has its own.
      shards: The shards and their servers; empty before the value is made.
      copies: The keys of further copies, by parameter server. Every server that updates an optimizer's variables needs
        some of the optimizer's state, and updates its own copy.
    """

    def __init__(
        self,
        holder: ArrayHolder,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        initial: Initial,
        row_ranges: Sequence[tuple[int, int]] = (),
    ):
        self.holder = holder
        self.name, self.key = name, ""
        self.initial: Initial | None = initial
        self.colocated_with: ServerArray | None = None
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.row_ranges = tuple(row_ranges)
        self.shards: tuple[Shard, ...] = ()
        self.copies: dict[int, str] = {}

    @property
    def is_made(self) -> bool:
        return bool(self.shards)

    @property
    def is_table(self) -> bool:
        """True if only the rows that are looked up travel. This is so for large arrays and arrays in shards."""
        return len(self.shape) > 1 and (bool(self.row_ranges) or self.num_bytes >= _TABLE_BYTES)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def keys_on(self, ps: int) -> set[str]:
        """Returns the keys of all shards on one server, and of the copy there."""
        keys = {shard.key for shard in self.shards if shard.ps == ps}
        return keys | {self.copies[ps]} if ps in self.copies else keys

    def shape_of(self, shard: Shard) -> tuple[int, ...]:
        """Returns the shape of a shard."""
        if shard.rows is None:
            return self.shape
        return (shard.rows[1] - shard.rows[0], *self.shape[1:])

    def bytes_of(self, shard: Shard) -> int:
        """Returns the size of a shard in bytes."""
        return math.prod(self.shape_of(shard)) * self.dtype.itemsize

    @property
    def places(self) -> list[tuple[str, tuple[int, int] | None, int]]:
        return [(f"ps {shard.ps}", shard.rows, self.bytes_of(shard)) for shard in self.shards]

    def make(self) -> None:
        """Makes the value and places it, if it has not been made."""
        self.holder.make([self])

    def read(self) -> jax.Array:
        """Returns the current value as a JAX array. Communicates, and blocks."""
        # device_put takes over aligned memory, which nobody else may hold.
        return jax.device_put(self.holder.read([self])[0])

    def read_rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the current rows for valid ids, [*ids.shape, ...]. Only these rows travel. Communicates, and
        blocks.
        """
        return self.holder.read_rows(self, ids.reshape(-1)).reshape(*ids.shape, *self.shape[1:])

    def assign(self, value: Any) -> None:
        """Replaces the value, and blocks until every server has it."""
        array = np.asarray(value, self.dtype)
        assert array.shape == self.shape
        self.holder.assign(self, array)

    def __repr__(self) -> str:
        where = ", ".join(f"ps {shard.ps}" for shard in self.shards) or "nowhere yet"
        return f"ServerArray({self.name!r}, shape={self.shape}, dtype={self.dtype.name}, on {where})"
