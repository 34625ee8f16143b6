"""Arrays in files: zarr 3, with a CRC-32C of each chunk. Only this module uses tensorstore.

Every process writes files of its own, which begin and end at the edges of chunks. So nobody reads or locks a file that
another process writes. Reading a chunk verifies it: the codec compares the values with the checksum after them, and
the manifest has a checksum of each file, so that a file of another save or another place is an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import os
import re
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, cast, final

import jax.numpy as jnp
import numpy as np

from replicax._src.checkpoint.array_chunks import origins_in, part_at, position_of
from replicax._src.checkpoint.contents import StoredArray, WrittenFiles
from replicax._src.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError
from replicax._src.packaging.extras import missing_extra

_METADATA = "zarr.json"
# Bytes that are being written at the same time. Tensorstore also holds each of these files in its encoded form.
_WINDOW_BYTES = 16 << 20
_NUM_READS: Final = 8  # chunks at the same time
# Devices that share a chunk read it once.
_CACHE_BYTES = 64 << 20
# Tensorstore would sync each file, its name and its folder one after the other. `_sync` does it for all files together.
_LIMITS: Final = {
    "file_io_concurrency": {"limit": 4},
    "data_copy_concurrency": {"limit": 2},
    "file_io_sync": False,
}
_NUM_SYNCS: Final = 8  # at the same time; the file system commits them together
# The index of the chunks in a file: where each begins, and its number of bytes. Each checksum is a CRC-32C.
_PLACE: Final = struct.Struct("<QQ")
_NO_PLACE: Final = 2**64 - 1
_CRC_BYTES: Final = 4
_NOT_IN_ZARR: Final = ("uint2", "uint4", "float8_e4m3")


def tensorstore() -> Any:
    """Imports and returns tensorstore.

    Raises:
      MissingExtraError: It is not installed.
    """
    try:
        import tensorstore as ts
    except ImportError as error:
        raise missing_extra("Saving and restoring checkpoints", "checkpoint", "tensorstore") from error
    return ts


@functools.cache
def _threads() -> Any:
    """Returns the context of the threads that read and write files. The process has one, and never frees it.

    A thread that has given a task to a pool of threads uses the pool once more, and tensorstore (0.1.86) does not keep
    the pool for it. If the thread is late by 20 ms on a busy machine, and the last array of the pool was freed before,
    the process dies of SIGSEGV or SIGABRT.
    """
    context = tensorstore().Context(_LIMITS)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))  # it is not freed when Python ends either
    return context


def _context(cache_bytes: int = 0) -> Any:
    """Returns a context with a cache of its own and the threads of the process."""
    return tensorstore().Context({"cache_pool": {"total_bytes_limit": cache_bytes}}, parent=_threads())


def _in_files(dtype: Any) -> np.dtype:
    """Returns the dtype in files: unsigned integers of the same size for dtypes that tensorstore's zarr lacks."""
    dtype = jnp.dtype(dtype)
    return np.dtype(f"u{dtype.itemsize}") if dtype.name in _NOT_IN_ZARR else dtype


def _spec(folder: str, stored: StoredArray, save: str = "") -> dict[str, Any]:
    """Returns tensorstore's description of an array in a folder."""
    codecs: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    if stored.chunk != stored.file:
        inner = {
            "chunk_shape": stored.chunk,
            "codecs": codecs,
            "index_codecs": codecs,
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "store_data_equal_to_fill_value": True,  # otherwise a chunk of zeros has no file, and looks lost
        "fill_missing_data_reads": False,  # otherwise a lost chunk reads as zeros
        "metadata": {
            "shape": stored.shape,
            "data_type": _in_files(stored.dtype).name,
            "codecs": codecs,
            "attributes": {"save": save},
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": stored.file}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        },
    }


# --- writing ----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Piece:
    """A file that this process writes.

    Attributes:
      folder: The folder of the array, as its path in the checkpoint.
      origin: Where it begins.
      value: Its values, which do not change until it is written.
    """

    folder: str
    origin: tuple[int, ...]
    value: np.ndarray


def write_metadata(part: str, arrays: Mapping[str, StoredArray], save: str) -> dict[str, int]:
    """Writes the ``zarr.json`` of each array, by its folder. One process calls it, and later ``sync_names``.

    Args:
      part: The directory of the checkpoint.
      arrays: The arrays by their folders.
      save: The identity of the save.

    Returns:
      The checksum of each ``zarr.json``.

    Raises:
      OSError: They cannot be written.
    """
    ts = tensorstore()
    context = _context()
    opened = [
        ts.open(_spec(os.path.join(part, folder), stored, save), context=context, create=True, open=True)
        for folder, stored in arrays.items()
    ]
    with _with_numbers():
        for one in opened:
            one.result()
    return {folder: _checksum(os.path.join(part, folder, _METADATA)) for folder in arrays}


def _checksum(path: str) -> int:
    with open(path, "rb") as file:
        return zlib.crc32(file.read())


Written = dict[str, list[tuple[int, int, int]]]
"""The position, size and checksum of files, by the folder of their array."""


def write_pieces(part: str, arrays: Mapping[str, StoredArray], pieces: Iterable[Piece]) -> Written:
    """Writes files of this process, and returns when they are on the disk; not so their names. It waits for no other
    process.

    Args:
      part: The directory of the checkpoint.
      arrays: The arrays by their folders.
      pieces: The files, of which those that are being written are in memory at the same time.

    Returns:
      The position, size and checksum of each file, by the folder of its array.

    Raises:
      OSError: They cannot be written.
    """
    with _with_numbers():
        return _write_pieces(part, arrays, pieces)


def _write_pieces(part: str, arrays: Mapping[str, StoredArray], pieces: Iterable[Piece]) -> Written:
    ts = tensorstore()
    context = _context()
    flying: deque[tuple[int, Any]] = deque()
    num_bytes = 0
    places: list[tuple[str, str, tuple[int, ...]]] = []
    folder, array = "", cast(Any, None)
    try:
        for piece in pieces:
            stored = arrays[piece.folder]
            if folder != piece.folder:
                folder, spec = piece.folder, _spec(os.path.join(part, piece.folder), stored)
                opened = ts.open(spec, context=context, open=True, write=True, assume_metadata=True)
                array = opened.result()
            while flying and num_bytes + piece.value.nbytes > _WINDOW_BYTES:
                size, written = flying.popleft()
                written.result()
                num_bytes -= size
            index = part_at(piece.origin, stored.file, stored.shape)
            value = piece.value.view(_in_files(stored.dtype))
            written = array[index].write(value, can_reference_source_data_indefinitely=True)
            flying.append((value.nbytes, written))
            num_bytes += value.nbytes
            path = os.path.join(part, piece.folder, _name_of(stored, piece.origin))
            places.append((path, piece.folder, piece.origin))
    finally:
        for _, written in flying:  # all have ended before the memory of the pieces is used again
            with contextlib.suppress(Exception):
                written.result()
    for _, written in flying:
        written.result()
    # Opening them also finds out if somebody has deleted the folder, which tensorstore then makes again.
    written_files: Written = {}
    for path, folder, origin in places:
        stored = arrays[folder]
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            checksum = _checksum_of_chunks(file.fileno(), size, stored)
        written_files.setdefault(folder, []).append(
            (position_of(origin, stored.file, stored.shape), size, checksum)
        )
    _sync(path for path, _, _ in places)
    return written_files


def _sync(paths: Iterable[str]) -> None:
    """Calls ``sync`` for many, in threads.

    Raises:
      OSError: They cannot be written.
    """
    with ThreadPoolExecutor(_NUM_SYNCS, "replicax-sync") as threads:
        for _ in threads.map(sync, list(paths)):
            pass


def sync_names(part: str) -> None:
    """Returns when all names in a checkpoint are on the disk, and what ``write_metadata`` has written."""
    folders = [(folder, names) for folder, _, names in os.walk(part)]
    _sync([os.path.join(folder, _METADATA) for folder, names in folders if _METADATA in names])
    _sync(folder for folder, _ in folders)


def sync(path: str) -> None:
    """Returns when a file, or the names in a folder, are on the disk.

    Raises:
      OSError: They cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name_of(stored: StoredArray, origin: tuple[int, ...]) -> str:
    """Returns the name of the file that begins at ``origin``, "c.1.0" for example."""
    numbers = (at // by for at, by in zip(origin, stored.file, strict=True))
    return ".".join(["c", *map(str, numbers)])


def _checksum_of_chunks(descriptor: int, size: int, stored: StoredArray) -> int:
    """Returns a checksum of the checksums of the chunks in a file, and of their places. It reads a few bytes for each.

    A chunk is followed by its CRC-32C. A file with several chunks ends with an index of their places and its CRC-32C.

    Raises:
      ValueError: The file has no such index.
    """
    if not stored.num_chunks:
        return zlib.crc32(os.pread(descriptor, _CRC_BYTES, max(0, size - _CRC_BYTES)))
    index_bytes = stored.num_chunks * _PLACE.size + _CRC_BYTES
    if index_bytes > size:
        raise ValueError(f"it has {size} bytes, fewer than its index of {stored.num_chunks} chunks")
    index = os.pread(descriptor, index_bytes, size - index_bytes)
    checksum = zlib.crc32(index)
    for start, num_bytes in _PLACE.iter_unpack(index[:-_CRC_BYTES]):
        if start == num_bytes == _NO_PLACE:  # a chunk beyond the edge of the array
            continue
        if not _CRC_BYTES <= num_bytes <= size - start:
            raise ValueError(
                f"its index has a chunk of {num_bytes} bytes at {start}, and it has {size} bytes"
            )
        checksum = zlib.crc32(os.pread(descriptor, _CRC_BYTES, start + num_bytes - _CRC_BYTES), checksum)
    return checksum


@contextlib.contextmanager
def _with_numbers() -> Iterator[None]:
    """Gives tensorstore's errors, which have only text, their ``errno``."""
    words = {
        "RESOURCE_EXHAUSTED": errno.ENOSPC,
        "No space left": errno.ENOSPC,
        "Read-only file system": errno.EROFS,
        "File too large": errno.EFBIG,
        "Permission denied": errno.EACCES,
        "quota exceeded": errno.EDQUOT,
        "No such file or directory": errno.ENOENT,
        "Not a directory": errno.ENOTDIR,
    }
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise OSError(next((n for word, n in words.items() if word in text), errno.EIO), text) from error


# --- reading ----------------------------------------------------------------------------------------------


@final
class ArrayReader:
    """Reads an array of a checkpoint.

    Args:
      path: The path of the checkpoint.
      folder: The folder of the array in it.
      stored: The array.
      crc32: The CRC-32 of its ``zarr.json``.
      files: Its files as they were written; None in a checkpoint of an earlier version.
      label: The program's name of it, for messages.
      names: The names of the processes that wrote it.
      part_of: The process that wrote all files that are there; None if all processes wrote some.

    Raises:
      CorruptCheckpointError: Its ``zarr.json`` is missing or damaged, or of another checkpoint.
    """

    def __init__(
        self,
        path: str,
        folder: str,
        stored: StoredArray,
        crc32: int,
        files: WrittenFiles | None,
        label: str,
        names: Sequence[str],
        part_of: int | None = None,
    ):
        self.stored = stored
        self._path, self._folder, self._label, self._names = path, folder, label, names
        self._part_of, self._files = part_of, files
        self._verified: set[int] = set()
        ts = tensorstore()
        self._check_metadata(crc32)
        context = _context(_CACHE_BYTES)
        spec = _spec(os.path.join(path, folder), stored)
        with self._translated():
            self._array = ts.open(
                spec, context=context, open=True, read=True, write=False, assume_metadata=True
            ).result()

    def _check_metadata(self, crc32: int) -> None:
        try:
            is_whole = _checksum(os.path.join(self._path, self._folder, _METADATA)) == crc32
        except OSError as error:
            raise self._corrupt(_METADATA, f"cannot be read ({error})") from error
        if not is_whole:
            raise self._corrupt(_METADATA, "has other bytes than were written, or is of another checkpoint")

    def read(self, index: tuple[Any, ...] = (), into: np.ndarray | None = None) -> np.ndarray:
        """Returns the verified values of an index, in memory that nobody else holds.

        Args:
          index: Slices of the first dims, without steps.
          into: The memory for the result, of its shape and dtype; new memory if it is None.

        Raises:
          CorruptCheckpointError: A file is damaged or missing, or is of another save or place.
          CheckpointNotFoundError: This process did not hold it when it saved its own checkpoint.
        """
        shape = self.stored.shape
        padded = (*index, *[slice(None)] * (len(shape) - len(index)))
        bounds = tuple(slice(*one.indices(size)[:2]) for one, size in zip(padded, shape, strict=True))
        for origin in origins_in(bounds, self.stored.file):
            self._check_size(origin)  # before there is memory for it
        value = into
        if value is None:
            value = np.empty([one.stop - one.start for one in bounds], jnp.dtype(self.stored.dtype))
        with self._translated():
            self._read_chunks(bounds, value.view(_in_files(self.stored.dtype)))
        for origin in origins_in(bounds, self.stored.file):
            self._check_chunks(origin)  # now they are in the system's cache
        return value

    def _read_chunks(self, bounds: tuple[slice, ...], value: np.ndarray) -> None:
        """Reads some chunks at a time. If tensorstore read whole files, it would take new memory for each."""
        target = tensorstore().array(value)
        flying: deque[Any] = deque()
        try:
            for origin in origins_in(bounds, self.stored.chunk):
                part = part_at(origin, self.stored.chunk, self.stored.shape)
                index = tuple(
                    slice(max(one.start, all_.start), min(one.stop, all_.stop))
                    for one, all_ in zip(part, bounds, strict=True)
                )
                if len(flying) == _NUM_READS:
                    flying.popleft().result()
                there = tuple(
                    slice(one.start - all_.start, one.stop - all_.start)
                    for one, all_ in zip(index, bounds, strict=True)
                )
                flying.append(target[there].write(self._array[index]))
        finally:
            # All have ended before the memory is used for something else.
            errors = [one.exception() for one in flying]
        for error in errors:
            if error is not None:
                raise error

    def _check_size(self, origin: tuple[int, ...]) -> None:
        """Checks that a file has as many bytes as were written, and as its part of the array needs."""
        position = position_of(origin, self.stored.file, self.stored.shape)
        if position in self._verified:
            return
        name = _name_of(self.stored, origin)
        if self._files is not None and self._files.checksums[position] is None:
            raise self._missing(name, position)
        try:
            size = os.stat(os.path.join(self._path, self._folder, name)).st_size
        except FileNotFoundError as error:
            raise self._missing(name, position) from error
        except OSError as error:
            raise self._corrupt(name, f"cannot be read ({error})") from error
        if self._files is not None and size != self._files.size_of(position):
            raise self._corrupt(name, f"has {size} bytes, and {self._files.size_of(position)} were written")
        part = part_at(origin, self.stored.file, self.stored.shape)
        num_values = max(math.prod(self.stored.chunk), math.prod(one.stop - one.start for one in part))
        needed = num_values * _in_files(self.stored.dtype).itemsize
        if size < needed:
            raise self._corrupt(name, f"has {size} bytes, and its part of the array needs {needed}")

    def _check_chunks(self, origin: tuple[int, ...]) -> None:
        """Checks that a file has what was written there: its chunks have the checksums that they had."""
        position = position_of(origin, self.stored.file, self.stored.shape)
        if self._files is None or position in self._verified:
            return
        name = _name_of(self.stored, origin)
        try:
            with open(os.path.join(self._path, self._folder, name), "rb", buffering=0) as file:
                checksum = _checksum_of_chunks(file.fileno(), self._files.size_of(position), self.stored)
        except (OSError, ValueError) as error:
            raise self._corrupt(name, f"is damaged ({error})") from error
        if checksum != self._files.checksums[position]:
            raise self._corrupt(
                name, "has other chunks than were written: it is of another save or another place"
            )
        self._verified.add(position)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            text = str(error)
            found = re.search(r'local file "(?:.*/)?([^/"]+)"', text)
            raise self._corrupt(
                found[1] if found else "", f"is damaged ({text.partition(': ')[2]:.300})"
            ) from error

    def _missing(self, name: str, position: int) -> CheckpointNotFoundError | CorruptCheckpointError:
        writer = self.stored.writer_of(position)
        if self._part_of not in (None, writer):
            return CheckpointNotFoundError(
                f"The checkpoint {self._path!r} has only what the devices of {self._names[self._part_of]} held, and "
                f"these did not hold all that is needed of {self._label!r}: it was saved with another layout."
            )
        whose = f"; it is of the part that {self._names[writer]} wrote" if len(self._names) > 1 else ""
        return self._corrupt(name, f"is missing{whose}")

    def _corrupt(self, name: str, problem: str) -> CorruptCheckpointError:
        file = os.path.join(self._folder, name) if name else self._folder
        return CorruptCheckpointError(
            f"The checkpoint {self._path!r} is damaged, and nothing of it was restored: {file}, of "
            f"{self._label!r}, {problem}. Restore another one: rx.CheckpointManager restores the latest intact one."
        )
