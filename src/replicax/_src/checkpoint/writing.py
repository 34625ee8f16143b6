"""Writes a checkpoint: every process its files, into a temporary directory; then the leader gives it its name.

A partial checkpoint never has that name. A killed writer leaves a directory that the next start removes. Where the
others continue after a death, each has a copy of the whole checkpoint, and the leader writes it. If the leader dies,
the next one writes its copy.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, final

from replicax._src.checkpoint import agreement
from replicax._src.checkpoint.array_files import (
    Piece,
    Written,
    sync,
    sync_names,
    write_metadata,
    write_pieces,
)
from replicax._src.checkpoint.contents import ARRAYS, MANIFEST, Contents, WrittenFiles
from replicax._src.checkpoint.errors import CheckpointWriteError
from replicax._src.checkpoint.saved import save_at
from replicax._src.cluster.failures import ClusterFailureError
from replicax._src.control.standing import Moment

_TEMPORARY = r"\.(?P<what>part|replaced)-(?P<host>.*)-(?P<pid>\d+)-[0-9a-f]{8}"
_MARGIN_BYTES = 1 << 20
_NUM_REMOVALS = 8
log = logging.getLogger("replicax")


@final
@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that will be written.

    Attributes:
      part: The directory in which it is written.
      contents: What it will contain, without the checksums.
      pieces: The files that this process writes.
      written: The files that it has written already.
      leader: The number of the process that names the checkpoint.
      is_whole: True if ``pieces`` are all files. Then only the leader writes, and another process takes its place if it
        dies.
      moment: The moment at which the save begins. Those that take part then complete it.
    """

    part: str
    contents: Contents
    pieces: list[Piece]
    written: Written
    leader: int
    is_whole: bool
    moment: Moment = field(default_factory=agreement.moment)


def new_part(path: str) -> str:
    """Creates the directory in which a checkpoint is written.

    Raises:
      CheckpointWriteError: It cannot be created, or ``path`` is something else than a checkpoint.
    """
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(os.path.join(path, ARRAYS))):
        raise CheckpointWriteError(
            errno.EEXIST,
            f"{path!r} exists and is not a checkpoint, so it was not replaced. Choose another path, or move it away.",
        )
    part = beside(path, "part")
    try:
        os.makedirs(os.path.join(part, ARRAYS))
    except OSError as error:
        raise write_error(path, error) from error
    return part


def write(path: str, snapshot: PendingCheckpoint) -> int:
    """Writes a checkpoint, which replaces an existing one at ``path``. Every process calls it, in any thread.

    Args:
      path: The path of the checkpoint.
      snapshot: The contents. Their directory does not exist afterwards, in any case.

    Returns:
      The number of bytes of arrays that this process has written.

    Raises:
      CheckpointWriteError: The disk is full, or read-only, in some process. An existing checkpoint is unchanged.
      ClusterFailureError: Another process is lost.
    """
    while (next_leader := _write_under_leader(path, snapshot)) is not None:
        snapshot = dataclasses.replace(snapshot, leader=next_leader, part="")
    return sum(piece.value.nbytes for piece in snapshot.pieces)


def _write_under_leader(path: str, snapshot: PendingCheckpoint) -> int | None:
    """Writes a checkpoint. Returns the number of the next leader, if the leader has died before it was complete."""
    name, contents = os.path.basename(path), snapshot.contents
    is_own = contents.part_of is not None
    leads = is_own or snapshot.leader == agreement.process_number()
    once = f"{contents.save} under {snapshot.leader}"
    committed: list[bool] = []

    def write_files() -> tuple[dict[str, int], Written]:
        nonlocal snapshot
        if snapshot.is_whole and not (leads or is_own):
            return {}, {}
        if not snapshot.part:
            log.warning("The task that wrote %s has died. This task writes it in its place.", path)
            _remove_leftovers(os.path.dirname(path), re.escape(name), lambda host, pid: True)
            snapshot = dataclasses.replace(snapshot, part=new_part(path))
        return _write_own(snapshot, leads=leads)

    def tell_files(result: tuple[dict[str, int], Written]) -> Written:
        return {} if is_own else result[1]

    try:
        (checksums, own), of_all = agreement.gather_results(
            f"writing {name}",
            lambda: _failing_as(path, write_files),
            tell_files,
            once=f"{once} written",
            since=snapshot.moment,
        )

        def commit() -> None:
            if leads:
                _commit(path, snapshot, checksums, [own] if is_own else of_all)
                committed.append(True)

        live = of_all
        if is_own or snapshot.leader in live.numbers:
            live = agreement.gather_results(
                f"committing {name}",
                lambda: _failing_as(path, commit),
                lambda result: None,
                once=f"{once} committed",
                since=snapshot.moment,
            )[1]
        if is_own or snapshot.leader in live.numbers:
            return None
        is_complete = save_at(path) == contents.save
        found = agreement.gather(
            f"looking for {name}", is_complete, once=f"{once} found", since=snapshot.moment
        )
        return None if found[0] else found.numbers[0]
    except ClusterFailureError:
        # A shared checkpoint that is committed is complete; code that needs the others gets the error.
        if is_own or not committed:
            raise
        return None
    finally:
        if leads and snapshot.part:
            shutil.rmtree(snapshot.part, ignore_errors=True)


def write_alone(path: str, snapshot: PendingCheckpoint) -> int:
    """Writes a checkpoint of which this process has everything, as ``write`` does, without the other processes.

    Returns:
      The number of bytes of arrays.

    Raises:
      CheckpointWriteError: The disk is full, or read-only. An existing checkpoint is unchanged.
    """

    def write_all() -> None:
        checksums, written = _write_own(snapshot, leads=True)
        _commit(path, snapshot, checksums, [written])

    try:
        _failing_as(path, write_all)
    finally:
        shutil.rmtree(snapshot.part, ignore_errors=True)
    return sum(piece.value.nbytes for piece in snapshot.pieces)


def _write_own(snapshot: PendingCheckpoint, *, leads: bool) -> tuple[dict[str, int], Written]:
    folders = {folder: stored for folder, _, stored in snapshot.contents.folders()}
    checksums = write_metadata(snapshot.part, folders, snapshot.contents.save) if leads else {}
    return checksums, snapshot.written | write_pieces(snapshot.part, folders, snapshot.pieces)


def _commit(
    path: str, snapshot: PendingCheckpoint, checksums: dict[str, int], written: Iterable[Written]
) -> None:
    files = _files_of(snapshot.contents, written)
    contents = dataclasses.replace(snapshot.contents, checksums=checksums, files=files)
    _write_manifest(snapshot.part, contents)
    _take_place(snapshot.part, path)


def _files_of(contents: Contents, written: Iterable[Written]) -> dict[str, WrittenFiles]:
    """Combines the files that processes have written, by the folder of their array."""
    rows: Written = {}
    for files_by_folder in written:
        for folder, files in files_by_folder.items():
            rows.setdefault(folder, []).extend(files)
    return {
        folder: WrittenFiles.from_rows(rows.get(folder, ()), stored.num_files)
        for folder, _, stored in contents.folders()
    }


def _failing_as(path: str, action: Any) -> Any:
    try:
        return action()
    except CheckpointWriteError:
        raise
    except Exception as error:
        raise write_error(path, error) from error


def _write_manifest(part: str, contents: Contents) -> None:
    with open(os.path.join(part, MANIFEST), "w") as file:
        file.write(contents.to_text())
        file.flush()
        os.fsync(file.fileno())
    sync_names(part)


# --- names ------------------------------------------------------------------------------------------------


def _take_place(part: str, path: str) -> None:
    replaced = None
    if os.path.exists(path):
        replaced = beside(path, "replaced")
        os.rename(path, replaced)
    try:
        os.rename(part, path)
    except OSError:
        if replaced is not None:
            os.rename(replaced, path)
        raise
    sync(os.path.dirname(path))
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def beside(path: str, what: str) -> str:
    """Returns a new path in the same directory, which nothing else has."""
    return f"{path}.{what}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def remove(path: str) -> None:
    """Deletes a checkpoint. It removes the name first, so that no reader finds a partial one."""
    gone = beside(path, "part")
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    _remove_tree(gone)


def _remove_tree(path: str) -> None:
    """Removes a folder with all that is in it, the folders of arrays in threads. It raises nothing."""
    folders = [folder for folder, names, _ in os.walk(path) if not names]
    with ThreadPoolExecutor(_NUM_REMOVALS, "replicax-remove") as threads:
        for _ in threads.map(functools.partial(shutil.rmtree, ignore_errors=True), folders):
            pass
    shutil.rmtree(path, ignore_errors=True)


def clean(directory: str, name: str) -> None:
    """Removes what killed writers have left of the checkpoints with a name. Other names may be of a living writer on
    another host.

    A writer that was killed while it replaced a checkpoint has left both. The old one gets its name back.
    """
    _remove_leftovers(directory, rf"{re.escape(name)}-\d+", lambda host, pid: not _is_alive(host, pid))


def _remove_leftovers(directory: str, names: str, is_left: Callable[[str, int], bool]) -> None:
    """Removes what writers have left of the checkpoints with these names, a regular expression.

    Args:
      is_left: Returns True for the host and the process of a writer that no longer writes.
    """
    pattern = re.compile(rf"(?P<name>{names}){_TEMPORARY}")
    for entry in sorted(os.listdir(directory)):
        match = pattern.fullmatch(entry)
        if match is None or not is_left(match["host"], int(match["pid"])):
            continue
        path, whole = os.path.join(directory, entry), os.path.join(directory, match["name"])
        if match["what"] == "replaced" and not os.path.exists(whole):
            os.rename(path, whole)
            continue
        shutil.rmtree(path, ignore_errors=True)
        log.info("Removed %s, which a killed writer has left in %s.", entry, directory)


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
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"?")
    except OSError as error:
        raise write_error(directory, error) from error


def check_space(path: str, num_bytes: int) -> None:
    """Checks that the disk has room for a checkpoint.

    Raises:
      CheckpointWriteError: It has not.
    """
    free = shutil.disk_usage(os.path.dirname(path)).free
    if free < num_bytes + _MARGIN_BYTES:
        raise CheckpointWriteError(
            errno.ENOSPC,
            f"The checkpoint {path!r} needs up to {_mib(num_bytes)}, and a margin of {_mib(_MARGIN_BYTES)}, but its disk has "
            f"{_mib(free)} free. Nothing was written, and earlier checkpoints are unchanged. Free some space, or keep fewer "
            "checkpoints (max_to_keep).",
        )


def write_error(path: str, error: Exception) -> CheckpointWriteError:
    """Returns the error for a failed write."""
    number = error.errno if isinstance(error, OSError) else None
    reason = {
        errno.ENOSPC: "its disk is full. Free some space, or keep fewer checkpoints (max_to_keep)",
        errno.EDQUOT: "the quota of its disk is used up. Free some space, or keep fewer checkpoints (max_to_keep)",
        errno.EROFS: "its disk is read-only. Choose another directory",
        errno.EACCES: "its directory is not writable. Choose another one, or change its permissions",
        errno.EPERM: "its directory is not writable. Choose another one, or change its permissions",
        errno.ENOENT: "its directory was deleted in the meantime. The next save creates it again",
        errno.ENOTDIR: "its directory is a file. Choose another path, or move the file away",
        errno.EEXIST: "its directory is a file. Choose another path, or move the file away",
        errno.EFBIG: "a file would exceed the size limit of this process (ulimit -f)",
    }.get(number or 0, f"writing failed with {type(error).__name__}: {error!s:.500}")
    return CheckpointWriteError(
        number or errno.EIO,
        f"The checkpoint {path!r} could not be written: {reason}. Earlier checkpoints are unchanged.",
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
