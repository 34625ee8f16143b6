"""Writes the bytes of shards to snapshot files, and reads them in order with their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader, BufferedWriter
from typing import Any, Final, final

import jax
import numpy as np

from replicax._ps.store.held_values import (
    BYTES_PER_BLOCK,
    copied,
    filled,
    num_rows_per_block,
)
from replicax._ps.store.snapshot_manifest import Block, Part, ShardRecord
from replicax._src.program_kit.errors import SnapshotError

_ALIGNMENT: Final = 64
_UNITS_BYTES: Final = 1 << 20
_NUMBERS: Final = np.dtype("<u8")


# --- writing --------------------------------------------------------------------------------------------


def write_whole(file: BufferedWriter, number: int, value: np.ndarray) -> Part:
    """Writes a whole value to the file of this number."""
    return Part(_written(file, number, value.reshape(-1).view(np.uint8).data))


def write_units(file: BufferedWriter, number: int, units: np.ndarray, rows: Iterable[np.ndarray]) -> Part:
    """Writes the rows of some units, in order, a few at a time."""
    numbers = _written(file, number, units.astype(_NUMBERS).view(np.uint8).data)
    offset, checksum, num_bytes = _align(file), 0, 0
    for some in rows:
        memory = some.reshape(-1).view(np.uint8).data
        checksum, num_bytes = zlib.crc32(memory, checksum), num_bytes + len(memory)
        file.write(memory)
    return Part(Block(number, offset, num_bytes, checksum), numbers)


def rows_in_turn(value: np.ndarray, units: np.ndarray, rows_per_unit: int) -> Iterator[np.ndarray]:
    """Yields copies of the rows of some units, about a megabyte at a time."""
    at_once = max(1, _UNITS_BYTES // max(1, value[:1].nbytes * rows_per_unit))
    for start in range(0, len(units), at_once):
        yield rows_of_units(value, units[start : start + at_once], rows_per_unit)


def rows_of_units(value: np.ndarray, units: np.ndarray, rows_per_unit: int) -> np.ndarray:
    """Returns copies of the rows of some units, ascending. The last unit of a shard may have fewer rows."""
    if rows_per_unit == 1:
        return np.take(value, units, axis=0)
    num_whole = len(value) // rows_per_unit
    whole = value[: num_whole * rows_per_unit].reshape(num_whole, rows_per_unit, *value.shape[1:])
    rows = np.take(whole, units[: np.searchsorted(units, num_whole)], axis=0).reshape(-1, *value.shape[1:])
    if not len(units) or units[-1] < num_whole:
        return rows
    return np.concatenate([rows, value[num_whole * rows_per_unit :]])


def _written(file: BufferedWriter, number: int, memory: memoryview) -> Block:
    offset, checksum = _align(file), 0
    for start in range(0, len(memory), BYTES_PER_BLOCK):
        block = memory[start : start + BYTES_PER_BLOCK]
        checksum = zlib.crc32(block, checksum)
        file.write(block)
    return Block(number, offset, len(memory), checksum)


def _align(file: BufferedWriter) -> int:
    file.write(bytes(-file.tell() % _ALIGNMENT))
    return file.tell()


# --- reading --------------------------------------------------------------------------------------------


@final
class Bytes:
    """The bytes of a block, read in order. Once all are read, the checksum has verified them.

    Args:
      file: The file that has the block.
      block: The range of bytes.
      what: A description of the bytes for error messages.
    """

    def __init__(self, file: BufferedReader, block: Block, what: str):
        self._file, self._block, self._what = file, block, what
        self._num_read = self._checksum = 0

    def read_into(self, memory: memoryview) -> None:
        """Reads the next bytes. Raises SnapshotError if they are missing or damaged."""
        self._file.seek(self._block.offset + self._num_read)
        if self._file.readinto(memory) != len(memory):
            raise SnapshotError(f"{self._what} is cut off")
        self._num_read += len(memory)
        self._checksum = zlib.crc32(memory, self._checksum)
        if self._num_read == self._block.num_bytes and self._checksum != self._block.checksum:
            raise SnapshotError(f"the checksum of {self._what} is wrong")

    def check(self) -> None:
        """Reads and verifies all bytes."""
        memory = _memory(min(BYTES_PER_BLOCK, self._block.num_bytes)).data
        while left := self._block.num_bytes - self._num_read:
            self.read_into(memory[: min(left, len(memory))])


Opened = Callable[[Block, str], Bytes]
"""Opens a block of a shard, given the shard's key."""


def read_value(shard: ShardRecord, opened: Opened, device: Any) -> jax.Array:
    """Returns the value of a shard on a device. It needs one block of extra memory.

    Raises:
      SnapshotError: The bytes are damaged.
    """
    shape, dtype = shard.spec
    whole, *later = shard.parts
    values = opened(whole.values, shard.key)
    if not shape or shard.num_bytes <= BYTES_PER_BLOCK:
        memory = _memory(shard.num_bytes)
        if shard.num_bytes:
            values.read_into(memory.data)
        value = np.frombuffer(memory, dtype).reshape(shape)
        for part in later:
            _Units(shard, part, opened).replace(value, 0)
        return copied(value, device)
    per_unit = shard.rows_per_unit if later else 1
    rows_at_once = num_rows_per_block(shape, dtype, per_unit)
    row_bytes = shard.num_bytes // shape[0]
    memory = _memory(rows_at_once * row_bytes)
    replacing = [_Units(shard, part, opened) for part in later]

    def rows(start: int, stop: int) -> np.ndarray:
        block = memory[: (stop - start) * row_bytes]
        values.read_into(block.data)
        value = block.view(dtype).reshape(stop - start, *shape[1:])
        for units in replacing:
            units.replace(value, start)
        return value

    return filled(shape, dtype, device, rows, per_unit)


@final
class _Units:
    """The rows of a part that has only some units, taken in order."""

    def __init__(self, shard: ShardRecord, part: Part, opened: Opened):
        assert part.units is not None
        numbers = np.empty(part.units.num_bytes // _NUMBERS.itemsize, _NUMBERS)
        if len(numbers):
            opened(part.units, shard.key).read_into(numbers.view(np.uint8).data)
        self._numbers = numbers.astype(np.int64, copy=False)
        self._values = opened(part.values, shard.key)
        self._per_unit = shard.rows_per_unit
        self._num_done = 0

    def replace(self, rows: np.ndarray, start: int) -> None:
        """Replaces the rows that this part has. ``rows`` begins with row number ``start``."""
        stop = int(np.searchsorted(self._numbers, -(-(start + len(rows)) // self._per_unit)))
        at_once = max(1, _UNITS_BYTES // max(1, rows[:1].nbytes * self._per_unit))
        for first in range(self._num_done, stop, at_once):
            numbers = self._numbers[first : min(first + at_once, stop)]
            places = (numbers[:, None] * self._per_unit + np.arange(self._per_unit)).reshape(-1) - start
            places = places[places < len(rows)]
            values = np.empty((len(places), *rows.shape[1:]), rows.dtype)
            self._values.read_into(values.reshape(-1).view(np.uint8).data)
            rows[places] = values
        self._num_done = stop


def _memory(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]
