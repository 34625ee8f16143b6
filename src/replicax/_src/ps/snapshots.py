"""Snapshots of a store, in files: each is written as one, and checked when it is read. What is in one is ``store.py``'s."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, Final, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.errors import ReplicaxError
from replicax._src.ps.held_values import BYTES_PER_BLOCK, Spec, copied, filled, num_rows_per_block

log = logging.getLogger("replicax")

NUM_KEPT: Final = 2
_FORMAT: Final = 1
_MAGIC: Final = b"rx-ps-01"
_ALIGNMENT: Final = 64
_FOOTER: Final = struct.Struct("<QQII8s")  # of the header: offset, length, checksum; 0; the magic
_NAME: Final = re.compile(r"snapshot-(\d{10})\.rxps")
_PARTIAL: Final = "snapshot.partial"


class SnapshotError(ReplicaxError, RuntimeError):
    """A snapshot could not be written, or none can be read."""


@dataclass(frozen=True)
class Entry:
    """A piece as it is written: ``value`` may be a view."""

    key: str
    spec: Spec
    number: int
    value: np.ndarray


def write(
    directory: Path,
    content: Mapping[str, Any],
    entries: deque[Entry],
    on_written: Callable[[str], None] = lambda key: None,
) -> tuple[Path, int]:
    """Writes a snapshot beside those that are there, and then removes all but the last ``NUM_KEPT``.

    There is no half of one: it gets its name when all of it is on the disk. While it is written there is one more.

    Args:
      content: What is to be read first, as JSON.
      entries: The pieces. They are taken out as they are written, so that views end early.
      on_written: Told the key of a piece then.

    Returns:
      Its file and how many bytes it has.

    Raises:
      SnapshotError: It could not be written; those before are as they were.
    """
    partial, failure = directory / _PARTIAL, None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:  # one that was left here by a process that died gives its room back
            _write_all(file, content, entries, on_written)
            num_bytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
        before = _files(directory)
        path = directory / f"snapshot-{_number(before[0]) + 1 if before else 1:010}.rxps"
        partial.rename(path)
        _sync(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        failure = str(error)
    finally:
        entries.clear()
    if failure is not None:  # raised here, without the error before, whose frames have views
        raise SnapshotError(
            f"No snapshot could be written to {directory}: {failure}. The ones before are as they were. "
            f"Give a folder that can be written to, with room for {NUM_KEPT + 1} snapshots."
        )
    for old in before[NUM_KEPT - 1 :]:
        with contextlib.suppress(OSError):
            old.unlink()
    return path, num_bytes


def newest_whole(directory: Path, epoch: int | None = None) -> tuple[SnapshotFile, list[str]] | None:
    """The newest snapshot that is whole, opened, and what is wrong with those that are newer.

    Args:
      epoch: That its content has to name; None: any.

    Returns:
      None if there is no snapshot.

    Raises:
      SnapshotError: There are some, and none that will do.
    """
    refused: list[str] = []
    for path in _files(directory):
        try:
            snapshot = SnapshotFile.opened(path)
            with contextlib.ExitStack() as closing:
                closing.callback(snapshot.close)
                if epoch is not None and snapshot.content["epoch"] != epoch:
                    raise SnapshotError(f"it is of epoch {snapshot.content['epoch']}, not {epoch}")
                snapshot.check()
                closing.pop_all()
        except (SnapshotError, OSError) as error:
            refused.append(f"{path.name}: {error}")
            log.warning("Snapshot %s is not taken: %s", path, error)
        else:
            return snapshot, refused
    if refused:
        raise SnapshotError(
            f"None of the snapshots in {directory} can be restored. {'; '.join(refused)}. "
            "Remove them to start without one, or put back copies of them."
        )
    return None


@final
class SnapshotFile:
    """A snapshot that is read.

    Attributes:
      content: What was given to ``write``.
      pieces: key, spec and number of each piece, with where it is.
    """

    def __init__(self, file: BufferedReader, header: Mapping[str, Any]):
        self.path = Path(file.name)
        self.content: dict[str, Any] = header["content"]
        self.pieces: list[dict[str, Any]] = header["pieces"]
        self._file = file

    @classmethod
    def opened(cls, path: Path) -> Self:
        """The snapshot in a file. Raises SnapshotError if it has no whole header."""
        file = open(path, "rb")  # noqa: SIM115 - the object closes it
        try:
            return cls(file, _read_header(file))
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def check(self) -> None:
        """Reads all of it. Raises SnapshotError if something is not as it was written."""
        for piece in self.pieces:
            for _ in self._blocks(piece, BYTES_PER_BLOCK):
                pass

    def spec(self, piece: Mapping[str, Any]) -> Spec:
        """Shape and dtype of a piece."""
        return tuple(piece["shape"]), np.dtype(jnp.dtype(piece["dtype"]))

    def value(self, piece: Mapping[str, Any], device: Any) -> jax.Array:
        """The value of a piece, on a device. There is one block of it besides.

        Raises:
          SnapshotError: It is not as it was written.
        """
        shape, dtype = self.spec(piece)
        if piece["bytes"] <= BYTES_PER_BLOCK or not shape:
            value = np.empty(shape, dtype)
            for block in self._blocks(piece, BYTES_PER_BLOCK):
                value = _as_array(block, dtype, shape)
            return copied(value, device)
        row_bytes = piece["bytes"] // shape[0]
        blocks = self._blocks(piece, num_rows_per_block(shape, dtype) * row_bytes)
        return filled(
            shape,
            dtype,
            device,
            lambda start, stop: _as_array(next(blocks), dtype, (stop - start, *shape[1:])),
        )

    def _blocks(self, piece: Mapping[str, Any], block_bytes: int) -> Iterator[memoryview]:
        """The bytes of a piece, one block after the other in the same memory. Wrong ones raise before the last block."""
        self._file.seek(piece["offset"])
        memory, checksum, left = _aligned(min(block_bytes, piece["bytes"])).data, 0, piece["bytes"]
        while left:
            block = memory[: min(left, len(memory))]
            if self._file.readinto(block) != len(block):
                raise SnapshotError(f'piece "{piece["key"]}" is cut off')
            checksum = zlib.crc32(block, checksum)
            left -= len(block)
            if not left and checksum != piece["checksum"]:
                raise SnapshotError(f'the checksum of piece "{piece["key"]}" is wrong')
            yield block


def _write_all(
    file: BufferedWriter,
    content: Mapping[str, Any],
    entries: deque[Entry],
    on_written: Callable[[str], None],
) -> None:
    file.write(_MAGIC)
    pieces = []
    while entries:
        pieces.append(_write_entry(file, entries.popleft()))
        on_written(pieces[-1]["key"])
    header = json.dumps({"format": _FORMAT, "content": content, "pieces": pieces}).encode()
    offset = file.tell()
    file.write(header)
    file.write(_FOOTER.pack(offset, len(header), zlib.crc32(header), 0, _MAGIC))


def _write_entry(file: BufferedWriter, entry: Entry) -> dict[str, Any]:
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset, checksum = file.tell(), 0
    memory = entry.value.reshape(-1).view(np.uint8).data
    for start in range(0, len(memory), BYTES_PER_BLOCK):
        block = memory[start : start + BYTES_PER_BLOCK]
        checksum = zlib.crc32(block, checksum)
        file.write(block)
    shape, dtype = entry.spec
    return {
        "key": entry.key,
        "shape": list(shape),
        "dtype": dtype.name,
        "number": entry.number,
        "offset": offset,
        "bytes": len(memory),
        "checksum": checksum,
    }


def _read_header(file: BufferedReader) -> dict[str, Any]:
    num_bytes = file.seek(0, os.SEEK_END)
    if num_bytes < len(_MAGIC) + _FOOTER.size:
        raise SnapshotError(f"it has {num_bytes} bytes, fewer than any snapshot")
    file.seek(num_bytes - _FOOTER.size)
    offset, length, checksum, _, magic = _FOOTER.unpack(file.read(_FOOTER.size))
    if magic != _MAGIC or offset + length + _FOOTER.size != num_bytes:
        raise SnapshotError("it does not end as a snapshot does: it is cut off, or of another version")
    file.seek(offset)
    header = file.read(length)
    if zlib.crc32(header) != checksum:
        raise SnapshotError("the checksum of its header is wrong")
    described = json.loads(header)
    if described["format"] != _FORMAT:
        raise SnapshotError(f"it has format {described['format']}, and {_FORMAT} is what is read here")
    return described


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]


def _as_array(block: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(block, dtype).reshape(shape)


def _files(directory: Path) -> list[Path]:
    """The snapshots in a folder, the newest first."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("snapshot-").removesuffix(".rxps"))


def _sync(directory: Path) -> None:
    """The name is on the disk, too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
