"""Snapshots of a store, in the files of a folder: each is written as one, and checked when it is read.

What is in one is ``store_contents.py``'s; which files belong together, and stay, ``snapshot_manifest.py``'s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, Final, Self, final

import jax

from replicax._src.parameter_servers.errors import SnapshotError
from replicax._src.parameter_servers.store.snapshot_entries import Plan, write_entry
from replicax._src.parameter_servers.store.snapshot_manifest import Block, Manifest, PieceRecord
from replicax._src.parameter_servers.store.snapshot_parts import Bytes, read_value

log = logging.getLogger("replicax")

_MAGIC: Final = b"rx-ps-01"
_FOOTER: Final = struct.Struct("<QQII8s")  # of the header: offset, length, checksum; 0; the magic
_NAME: Final = re.compile(r"snapshot-(\d{10})\.rxps")
_PARTIAL: Final = "snapshot.partial"


@final
class SnapshotFolder:
    """The snapshots of one server.

    Attributes:
      path: The path of the folder.
      last: What was written or restored last, from which the next one may go on.
    """

    def __init__(self, path: Path):
        self.path = path
        self.last: Manifest | None = None

    def previous(self) -> Manifest | None:
        """``last``, if all of its files are still there."""
        if self.last is None:
            return None
        num_bytes = dict(self.last.chain)
        for number in self.last.files | {self.last.number}:
            try:
                if self.file(number).stat().st_size < num_bytes.get(number, 0):
                    return None
            except OSError:
                return None
        return self.last

    def file(self, number: int) -> Path:
        """Returns the path of the file of this number."""
        return self.path / f"snapshot-{number:010}.rxps"

    def write(
        self,
        content: Mapping[str, Any],
        plan: Plan,
        on_written: Callable[[str], None] = lambda key: None,
    ) -> tuple[Path, int]:
        """Writes a snapshot beside those that are there, and then removes those that are not needed any more.

        There is no half of one: it gets its name when all of it is on the disk.

        Args:
          content: What is to be read first, as JSON.
          plan: The pieces. They are taken out as they are written, so that views end early.
          on_written: Told the key of a piece when that is written.

        Returns:
          Its file and how many bytes it has.

        Raises:
          SnapshotError: It could not be written; those before are as they were.
        """
        partial, failure = self.path / _PARTIAL, None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            number = max(self._numbers(), default=0) + 1
            with open(partial, "wb") as file:  # one that a process left here that died gives its room back
                manifest = _write_all(file, number, content, plan, on_written)
                num_bytes = file.tell()
                file.flush()
                os.fsync(file.fileno())
            path = self.file(number)
            partial.rename(path)
            _sync(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            failure = str(error)
        finally:
            plan.entries.clear()
        if failure is not None:  # raised here, without the error before, whose frames have views
            raise SnapshotError(
                f"No snapshot could be written to {self.path}: {failure}. The ones before are as they were. "
                "Give a folder that can be written to, with room for four times the variables of the server."
            )
        before, self.last = self.last, manifest
        if before is not None:
            self._remove_others(before, manifest)
        return path, num_bytes

    def newest_whole(self, epoch: int | None = None) -> tuple[Snapshot, list[str]] | None:
        """The newest snapshot that is whole, opened, and what is wrong with those that are newer.

        Args:
          epoch: The epoch that its content has to name; None: any.

        Returns:
          None if there is no snapshot.

        Raises:
          SnapshotError: There are some, and none that will do.
        """
        refused: list[str] = []
        checked: dict[Block, str] = {}
        for number in sorted(self._numbers(), reverse=True):
            path = self.file(number)
            try:
                snapshot = Snapshot.opened(path, number)
                with contextlib.ExitStack() as closing:
                    closing.callback(snapshot.close)
                    found = snapshot.content["epoch"]
                    if epoch is not None and found != epoch:
                        raise SnapshotError(f"it is of epoch {found}, not {epoch}")
                    snapshot.check(checked)
                    closing.pop_all()
            except (SnapshotError, OSError) as error:
                refused.append(f"{path.name}: {error}")
                log.warning("Snapshot %s is not taken: %s", path, error)
            else:
                return snapshot, refused
        if refused:
            raise SnapshotError(
                f"None of the snapshots in {self.path} can be restored. {'; '.join(refused)}. "
                "Remove them to start without one, or put back copies of them."
            )
        return None

    def newest_owner(self) -> tuple[float, str] | None:
        """Returns the time of the newest snapshot, and the incarnation that took it. Reads headers only."""
        for number in sorted(self._numbers(), reverse=True):
            with contextlib.suppress(SnapshotError, OSError):
                with contextlib.closing(Snapshot.opened(self.file(number), number)) as snapshot:
                    return snapshot.content.get("time", 0.0), str(snapshot.content["incarnation"])
        return None

    def _numbers(self) -> list[int]:
        """Returns the numbers of the files."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        return [int(name[1]) for name in found if name is not None]

    def _remove_others(self, before: Manifest, newest: Manifest) -> None:
        """Keeps the chain of the newest snapshot, and that of the base before.

        So there are two snapshots that have no file in common, once there are two bases. Files with numbers between the
        two snapshots are of a store that has gone back since: they are not needed.
        """
        first = before.base if newest.base == newest.number else 0
        for number in self._numbers():
            if not first <= number <= before.number and number != newest.number:
                with contextlib.suppress(OSError):  # another time
                    self.file(number).unlink()


@final
class Snapshot:
    """A snapshot that is read.

    Attributes:
      manifest: Its pieces, and the places of their bytes.
    """

    def __init__(self, file: BufferedReader, number: int, manifest: Manifest):
        self.path = Path(file.name)
        self.manifest = manifest
        self._files = {number: file}

    @classmethod
    def opened(cls, path: Path, number: int) -> Self:
        """The snapshot in a file. Raises SnapshotError if it has no whole header."""
        file = open(path, "rb")  # noqa: SIM115 - the object closes it
        try:
            return cls(file, number, Manifest.of(_read_header(file), number))
        except BaseException:
            file.close()
            raise

    @property
    def content(self) -> Mapping[str, Any]:
        """The content that was given to ``write``."""
        return self.manifest.content

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def check(self, checked: dict[Block, str] | None = None) -> None:
        """Reads all of it. Raises SnapshotError if something is not as it was written.

        Args:
          checked: What is known of blocks that other snapshots have too, and becomes known: what is wrong, if anything.
        """
        known = {} if checked is None else checked
        for piece in self.manifest.pieces.values():
            for part in piece.parts:
                for block in (part.units, part.values):
                    if block is not None and block not in known:
                        known[block] = self._wrong(block, piece.key)
                    if block is not None and known[block]:
                        raise SnapshotError(known[block])

    def value(self, piece: PieceRecord, device: Any) -> jax.Array:
        """The value of a piece, on a device. There is one block of it besides.

        Raises:
          SnapshotError: It is not as it was written.
        """
        return read_value(piece, self._bytes, device)

    def _wrong(self, block: Block, key: str) -> str:
        try:
            self._bytes(block, key).check()
        except SnapshotError as error:
            return str(error)
        return ""

    def _bytes(self, block: Block, key: str) -> Bytes:
        path = self.path.with_name(f"snapshot-{block.file:010}.rxps")
        what = f'piece "{key}"' if path == self.path else f'piece "{key}", whose values are in {path.name},'
        if block.file not in self._files:
            try:
                self._files[block.file] = open(path, "rb")  # noqa: SIM115 - the object closes it
            except OSError as error:
                raise SnapshotError(f"{what} cannot be read: {error}") from error
        return Bytes(self._files[block.file], block, what)


def _write_all(
    file: BufferedWriter,
    number: int,
    content: Mapping[str, Any],
    plan: Plan,
    on_written: Callable[[str], None],
) -> Manifest:
    file.write(_MAGIC)
    pieces: dict[str, PieceRecord] = {}
    while plan.entries:
        record = write_entry(file, number, plan.entries.popleft())
        pieces[record.key] = record
        on_written(record.key)
    parts = (part for piece in pieces.values() for part in piece.parts if part.values.file == number)
    own = (number, sum(part.num_bytes for part in parts))
    manifest = Manifest(content, pieces, [*(() if plan.previous is None else plan.previous.chain), own])
    header = json.dumps(manifest.described()).encode()
    offset = file.tell()
    file.write(header)
    file.write(_FOOTER.pack(offset, len(header), zlib.crc32(header), 0, _MAGIC))
    return manifest


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
    return json.loads(header)


def _sync(directory: Path) -> None:
    """The name is on the disk, too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
