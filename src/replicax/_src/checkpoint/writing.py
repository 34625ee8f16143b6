"""Writes a checkpoint: into a temporary directory, then the checksums, then it gets its name.

A partial checkpoint never has that name. A killed writer leaves a directory that the next start removes.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._src.checkpoint.contents import COMPONENTS, MANIFEST, STATE, Contents, SavedArray, SavedObject
from replicax._src.checkpoint.errors import CheckpointWriteError
from replicax._src.checkpoint.host_copy import HostArray
from replicax._src.checkpoint.orbax_files import write_arrays

_TEMPORARY = re.compile(r"(?P<name>.+)\.(?P<what>part|replaced)-(?P<host>.*)-(?P<pid>\d+)-[0-9a-f]{8}")
_BLOCK = 8 << 20
_MARGIN_BYTES = 1 << 20


@final
@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint will contain, on the host.

    Attributes:
      objects: The graph.
      arrays, states: The arrays and states by key.
      number, order, time_s, metrics: See ``Contents``.
    """

    objects: tuple[SavedObject, ...]
    arrays: Mapping[str, HostArray]
    states: Mapping[str, list[Any]]
    number: int
    order: int
    time_s: float
    metrics: Any = None

    @property
    def num_bytes(self) -> int:
        return sum(
            array.value.nbytes + (0 if array.components is None else array.components.nbytes)
            for array in self.arrays.values()
        )


def new_part(path: str) -> str:
    """Creates the directory in which a checkpoint is written.

    Raises:
      CheckpointWriteError: It cannot be created.
    """
    part = _beside(path, "part")
    try:
        os.makedirs(part)
    except OSError as error:
        raise write_error(path, error) from error
    return part


def write(path: str, part: str, snapshot: Snapshot) -> Contents:
    """Writes a checkpoint, which replaces an existing one at ``path``.

    Args:
      path: The path of the checkpoint.
      part: The directory that ``new_part`` has created. It does not exist afterwards, in any case.
      snapshot: The contents.

    Raises:
      CheckpointWriteError: The disk is full, or read-only. An existing checkpoint is unchanged.
    """
    try:
        _check_space(path, snapshot.num_bytes)
        contents = _write_into(part, snapshot)
        _take_place(part, path)
        return contents
    except CheckpointWriteError:
        raise
    except Exception as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_into(part: str, snapshot: Snapshot) -> Contents:
    arrays = snapshot.arrays
    write_arrays(os.path.join(part, STATE), {key: array.value for key, array in arrays.items()})
    components = {key: array.components for key, array in arrays.items() if array.components is not None}
    if components:
        write_arrays(os.path.join(part, COMPONENTS), components)
    saved = {key: _described(array) for key, array in arrays.items()}
    for array in arrays.values():
        if array.path is not None:
            os.remove(array.path)
    files = dict(sorted(_checked_files(part)))
    contents = Contents(
        snapshot.objects,
        saved,
        snapshot.states,
        files,
        snapshot.number,
        snapshot.order,
        snapshot.time_s,
        snapshot.metrics,
    )
    with open(os.path.join(part, MANIFEST), "w") as file:
        file.write(contents.to_text())
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(part):
        _sync_folder(folder)
    return contents


def _described(array: HostArray) -> SavedArray:
    value, components = array.value, array.components
    return SavedArray(
        tuple(value.shape),
        value.dtype.name,
        checksum(value),
        array.label,
        None if components is None else checksum(components),
        0 if components is None else len(components),
    )


def checksum(array: np.ndarray, before: int = 0) -> int:
    """Returns the CRC-32 of an array's bytes, continued from ``before``."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return zlib.crc32(flat, before)  # type: ignore[arg-type]


def file_checksum(path: str) -> tuple[int, int]:
    """Returns the size and the CRC-32 of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def _checked_files(part: str) -> Any:
    for folder, _, names in os.walk(part):
        for name in names:
            path = os.path.join(folder, name)
            os.utime(part)  # waiting processes see the progress
            yield os.path.relpath(path, part), file_checksum(path)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- names ------------------------------------------------------------------------------------------------


def _take_place(part: str, path: str) -> None:
    replaced = None
    if os.path.exists(path):
        replaced = _beside(path, "replaced")
        os.rename(path, replaced)
    os.rename(part, path)
    _sync_folder(os.path.dirname(path))
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _beside(path: str, what: str) -> str:
    return f"{path}.{what}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def remove(path: str) -> None:
    """Deletes a checkpoint. It removes the name first, so that no reader finds a partial one."""
    gone = _beside(path, "part")
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def clean(directory: str) -> list[str]:
    """Removes the leftovers of killed writers from a directory, and returns their names.

    A writer that was killed while it replaced a checkpoint has left both. The old one gets its name back.
    """
    removed = []
    for name in sorted(os.listdir(directory)):
        match = _TEMPORARY.fullmatch(name)
        if match is None or _is_alive(match["host"], int(match["pid"])):
            continue
        path, whole = os.path.join(directory, name), os.path.join(directory, match["name"])
        if match["what"] == "replaced" and not os.path.exists(whole):
            os.rename(path, whole)
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(name)
    return removed


def _is_alive(host: str, pid: int) -> bool:
    """True if a writer is known to be running on this host. This process has no running writers when it asks."""
    if host != socket.gethostname() or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# --- disks ------------------------------------------------------------------------------------------------


def probe(directory: str) -> None:
    """Checks that a directory exists and is writable.

    Raises:
      CheckpointWriteError: It is not.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        path = _beside(os.path.join(directory, "probe"), "part")
        with open(path, "wb") as file:
            file.write(b"?")
        os.remove(path)
    except OSError as error:
        raise write_error(directory, error) from error


def _check_space(path: str, num_bytes: int) -> None:
    free = shutil.disk_usage(os.path.dirname(path)).free
    if free < num_bytes + _MARGIN_BYTES:
        raise CheckpointWriteError(
            errno.ENOSPC,
            f"The checkpoint {path!r} needs up to {_mib(num_bytes)}, but its disk has {_mib(free)} left. "
            "Nothing was written, and earlier checkpoints are unchanged. Free some space, or keep fewer "
            "checkpoints (max_to_keep).",
        )


def write_error(path: str, error: Exception) -> CheckpointWriteError:
    """Returns the error for a failed write."""
    number = error.errno if isinstance(error, OSError) and error.errno else _number_in(str(error))
    reason = {
        errno.ENOSPC: "its disk is full. Free some space, or keep fewer checkpoints (max_to_keep)",
        errno.EDQUOT: "the quota of its disk is used up. Free some space, or keep fewer checkpoints (max_to_keep)",
        errno.EROFS: "its disk is read-only. Choose another directory",
        errno.EACCES: "its directory is not writable. Choose another one, or change its permissions",
        errno.ENOENT: "its directory was deleted in the meantime. The next save creates it again",
        errno.ENOTDIR: "its directory is a file. Choose another path, or move the file away",
        errno.EEXIST: "its directory is a file. Choose another path, or move the file away",
        errno.EFBIG: "a file would exceed the size limit of this process (ulimit -f)",
    }.get(number, f"writing failed with {type(error).__name__}: {error!s:.500}")
    return CheckpointWriteError(
        number or errno.EIO,
        f"The checkpoint {path!r} could not be written: {reason}. Earlier checkpoints are unchanged.",
    )


def _number_in(text: str) -> int:
    """Returns the errno for an error of tensorstore, which has only text."""
    words = {
        "RESOURCE_EXHAUSTED": errno.ENOSPC,
        "No space left": errno.ENOSPC,
        "Read-only file system": errno.EROFS,
    }
    words |= {
        "File too large": errno.EFBIG,
        "Permission denied": errno.EACCES,
        "quota exceeded": errno.EDQUOT,
        "No such file or directory": errno.ENOENT,
        "Not a directory": errno.ENOTDIR,
    }
    return next((number for word, number in words.items() if word in text), 0)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
