"""Files of compiled programs, which many processes read and write at once, in a folder of bounded size. No JAX here."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, final

from replicax._src.untrusted.file_access import is_own

_SUFFIX: Final = "-cache"  # as JAX names them
_PART: Final = ".part-"
_PART_LIVES_S: Final = 3600.0
# A full scan may be slow on a network disk, so a process writes this share of the limit before the next one.
_SCANNED_EVERY: Final = 0.01
_KEPT: Final = 0.9  # of the limit, after programs were removed


@final
class ProgramFiles:
    """The compiled programs of a folder, one file each. It has the methods that JAX's persistent cache calls.

    Every file is complete, and no lock is needed: a process writes a temporary file and renames it. JAX writes in place
    and never rewrites (jax 0.10 to 0.12; no upstream issue: write a temporary file and rename it), so after a kill
    every later process would find half a program, warn and compile again. JAX bounds the size with a lock file, which
    network disks may not support, and a process that waits for it fails after 10 s.

    Args:
      folder: The folder of the files; it is created.
      root: The folder whose size is bounded; ``folder`` or a parent, also with programs of other versions.
      max_bytes: The largest size of all programs in ``root``. Those not used for longest are removed. Each process that
        writes may exceed it by 1 %. None is no limit.
      is_private: True to ignore the files of other users, which could run code in this process.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        root: Path | None = None,
        max_bytes: int | None = None,
        *,
        is_private: bool = False,
    ):
        self._is_private = is_private
        self._path = Path(folder)  # JAX prints it
        self._root, self._max_bytes = root or self._path, max_bytes
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._num_new = 0  # bytes written since the last scan
        self._clean_up()

    def get(self, key: str) -> bytes | None:
        """Returns a program, or None."""
        path = self._path / f"{key}{_SUFFIX}"
        try:
            with path.open("rb") as file:
                if self._is_private and not is_own(os.fstat(file.fileno())):
                    return None
                value = file.read()
        except OSError:  # missing; or on a network disk, removed by another process meanwhile
            return None
        if self._max_bytes is not None:
            with contextlib.suppress(OSError):
                os.utime(path)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Writes a program, also in place of a damaged one."""
        if self._max_bytes is not None and len(value) > self._max_bytes:
            return
        part = self._path / f"{key}{_PART}{uuid.uuid4().hex}"
        try:
            part.touch(mode=0o600)
            part.write_bytes(value)
            part.replace(self._path / f"{key}{_SUFFIX}")
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._num_new += len(value)
        if self._max_bytes is not None and self._num_new > self._max_bytes * _SCANNED_EVERY:
            self._clean_up()

    def _clean_up(self) -> None:
        """Removes what killed processes left, and the programs that are too many."""
        self._num_new, found, left = 0, [], []
        for file in _files_below(self._root):
            if file.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    about = file.stat()
                    found.append((about.st_mtime, about.st_size, file.path))
            elif _PART in file.name:
                with contextlib.suppress(OSError):
                    if time.time() - file.stat().st_mtime > _PART_LIVES_S:
                        left.append(file.path)
        if self._max_bytes is not None:
            left += oldest(found, self._max_bytes)
        for path in left:
            with contextlib.suppress(OSError):  # another process may remove it at the same time
                os.unlink(path)


def _files_below(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path)
            else:
                yield entry


def oldest(found: Iterable[tuple[float, int, str]], max_bytes: int) -> list[str]:
    """Returns the paths to remove: none while all fit, otherwise those that do not fit into 90 % of the limit beside
    newer ones. The newest stays.

    >>> oldest([(1.0, 5, "a"), (3.0, 5, "b"), (2.0, 5, "c")], 12)
    ['a']
    >>> oldest([(3.0, 5, "new"), (2.0, 95, "large"), (1.0, 5, "old")], 100)
    ['large']
    """
    newest_first = sorted(found, key=lambda one: one[:2], reverse=True)
    if sum(size for _, size, _ in newest_first) <= max_bytes:
        return []
    total, removed = 0, []
    for _, size, path in newest_first:
        if total and total + size > max_bytes * _KEPT:
            removed.append(path)
        else:
            total += size
    return removed
