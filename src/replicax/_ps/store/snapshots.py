"""Snapshots of a store, in the files of a folder: each is written atomically and verified when it is read.

``store_contents.py`` says what a snapshot has, and ``snapshot_rules.py`` which files belong together and are kept.
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

from replicax._ps.store.snapshot_entries import Plan, write_entry
from replicax._ps.store.snapshot_manifest import Block, Manifest, ShardRecord
from replicax._ps.store.snapshot_parts import Bytes, read_value
from replicax._ps.store.snapshot_rules import (
    Chain,
    continued,
    is_of_epoch,
    is_whole,
    next_number,
    removable,
    restore_order,
)
from replicax._src.program_kit.errors import SnapshotError
from replicax._src.program_kit.texts import TextError, read_json

log = logging.getLogger("replicax")

_MAGIC: Final = b"rx-ps-01"
_FOOTER: Final = struct.Struct("<QQII8s")  # the header's offset, length and checksum; 0; the magic bytes
_NAME: Final = re.compile(r"snapshot-(\d{10})\.rxps")
_PARTIAL: Final = "snapshot.partial"


@final
class SnapshotFolder:
    """The snapshots of one server.

    Attributes:
      path: The path of the folder.
      last: The snapshot that was last written or restored, which the next one may continue.
    """

    def __init__(self, path: Path):
        self.path = path
        self.last: Manifest | None = None

    def previous(self) -> Manifest | None:
        """``last``, if all of its files still exist."""
        if self.last is None:
            return None
        sizes: dict[int, int] = {}
        for number in self.last.files | {self.last.number}:
            with contextlib.suppress(OSError):
                sizes[number] = self.file(number).stat().st_size
        return self.last if is_whole(self.last.chain, self.last.files, sizes) else None

    def file(self, number: int) -> Path:
        """Returns the path of the file of this number."""
        return self.path / f"snapshot-{number:010}.rxps"

    def write(
        self,
        content: Mapping[str, Any],
        plan: Plan,
        on_written: Callable[[str], None] = lambda key: None,
        kept_epoch: int = 0,
    ) -> tuple[Path, int]:
        """Writes a snapshot, then removes those that are no longer needed.

        It is atomic: the file gets its name once all of it is on the disk.

        Args:
          content: The data that is read first, as JSON.
          plan: The shards. They are removed from the plan as they are written, so that views end early.
          on_written: Called with the key of each shard once it is written.
          kept_epoch: The epoch whose snapshot is needed besides this one; 0 for none.

        Returns:
          The file, and its number of bytes.

        Raises:
          SnapshotError: The snapshot could not be written; earlier ones are unchanged.
        """
        partial, failure = self.path / _PARTIAL, None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            number = next_number(self._numbers())
            with open(partial, "wb") as file:  # overwrites what a killed process left, and so frees its space
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
        if failure is not None:  # raised here without its cause, whose frames hold views
            raise SnapshotError(
                f"No snapshot could be written to {self.path}: {failure}. Earlier snapshots are unchanged. "
                "Give a folder that is writable and has room for four times the variables of the server."
            )
        before, self.last = self.last, manifest
        kept = self._chain_of(kept_epoch, before) if kept_epoch else None
        chain = None if before is None else before.chain
        for number in removable(self._numbers(), chain, manifest.chain, kept):
            with contextlib.suppress(OSError):  # the next snapshot tries again
                self.file(number).unlink()
        return path, num_bytes

    def latest_complete(self, epoch: int | None = None) -> tuple[Snapshot, list[str]] | None:
        """Opens the newest intact snapshot, and says what is wrong with the newer ones.

        Args:
          epoch: The epoch that the snapshot must have; None for any.

        Returns:
          None if there is no snapshot.

        Raises:
          SnapshotError: There are snapshots, but none is intact and of the epoch.
        """
        refused: list[str] = []
        checked: dict[Block, str] = {}
        for number in restore_order(self._numbers()):
            path = self.file(number)
            try:
                snapshot = Snapshot.opened(path, number)
                with contextlib.ExitStack() as closing:
                    closing.callback(snapshot.close)
                    found = snapshot.content["epoch"]
                    if not is_of_epoch(found, epoch):
                        raise SnapshotError(f"it is of epoch {found}, not {epoch}")
                    snapshot.check(checked)
                    closing.pop_all()
            except (SnapshotError, OSError) as error:
                refused.append(f"{path.name}: {error}")
                log.warning("Skipped snapshot %s: %s", path, error)
            else:
                return snapshot, refused
        if refused:
            raise SnapshotError(
                f"None of the snapshots in {self.path} can be restored. {'; '.join(refused)}. "
                "Remove them to start without one, or put intact copies there."
            )
        return None

    def latest_owner(self) -> tuple[float, str] | None:
        """Returns the time of the newest snapshot, and the session id of its coordinator. Reads headers only."""
        for number in restore_order(self._numbers()):
            with contextlib.suppress(SnapshotError, OSError):
                with contextlib.closing(Snapshot.opened(self.file(number), number)) as snapshot:
                    return snapshot.content.get("time", 0.0), str(snapshot.content["incarnation"])
        return None

    def _chain_of(self, epoch: int, before: Manifest | None) -> Chain | None:
        """Returns the chain of the newest snapshot of an epoch, most often the one before; None if there is none."""
        if before is not None and before.content["epoch"] == epoch:
            return before.chain
        for number in restore_order(self._numbers()):
            with contextlib.suppress(SnapshotError, OSError):
                with contextlib.closing(Snapshot.opened(self.file(number), number)) as snapshot:
                    if is_of_epoch(snapshot.content["epoch"], epoch):
                        return snapshot.manifest.chain
        return None

    def _numbers(self) -> list[int]:
        """Returns the numbers of the files."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        return [int(name[1]) for name in found if name is not None]


@final
class Snapshot:
    """An open snapshot.

    Attributes:
      path: The path of its file.
      manifest: The shards, and where their bytes are.
    """

    def __init__(self, file: BufferedReader, number: int, manifest: Manifest):
        self.path = Path(file.name)
        self.manifest = manifest
        self._files = {number: file}

    @classmethod
    def opened(cls, path: Path, number: int) -> Self:
        """Opens the snapshot in a file. Raises SnapshotError if its header is not intact."""
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
        """Reads and verifies everything. Raises SnapshotError if anything is damaged.

        Args:
          checked: The results for blocks that other snapshots share; this call adds its own. "" means intact.
        """
        known = {} if checked is None else checked
        for shard in self.manifest.shards.values():
            for part in shard.parts:
                for block in (part.units, part.values):
                    if block is not None and block not in known:
                        known[block] = self._wrong(block, shard.key)
                    if block is not None and known[block]:
                        raise SnapshotError(known[block])

    def value(self, shard: ShardRecord, device: Any) -> jax.Array:
        """Returns the value of a shard on a device. It needs one block of extra memory.

        Raises:
          SnapshotError: The bytes are damaged.
        """
        return read_value(shard, self._bytes, device)

    def _wrong(self, block: Block, key: str) -> str:
        try:
            self._bytes(block, key).check()
        except SnapshotError as error:
            return str(error)
        return ""

    def _bytes(self, block: Block, key: str) -> Bytes:
        path = self.path.with_name(f"snapshot-{block.file:010}.rxps")
        what = f'shard "{key}"' if path == self.path else f'shard "{key}", whose values are in {path.name},'
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
    shards: dict[str, ShardRecord] = {}
    while plan.entries:
        record = write_entry(file, number, plan.entries.popleft())
        shards[record.key] = record
        on_written(record.key)
    parts = (part for shard in shards.values() for part in shard.parts if part.values.file == number)
    before = None if plan.previous is None else plan.previous.chain
    manifest = Manifest(content, shards, continued(before, number, sum(part.num_bytes for part in parts)))
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
        raise SnapshotError("it does not end like a snapshot: it is truncated, or of another version")
    file.seek(offset)
    header = file.read(length)
    if zlib.crc32(header) != checksum:
        raise SnapshotError("the checksum of its header is wrong")
    try:
        return read_json(header)
    except TextError as error:
        raise SnapshotError(f"its header is not JSON: {error}") from error


def _sync(directory: Path) -> None:
    """Writes the directory entry to the disk, so that the file's new name survives a crash."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
