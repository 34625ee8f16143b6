"""Decides what a snapshot writes of each shard: all of it, the changed rows, or nothing. The caller holds the lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedWriter
from typing import Any, Final, final

import numpy as np

from replicax._src.parameter_servers.errors import SnapshotError
from replicax._src.parameter_servers.store.changed_rows import rows_per_unit
from replicax._src.parameter_servers.store.held_pieces import HeldPiece
from replicax._src.parameter_servers.store.held_values import Spec
from replicax._src.parameter_servers.store.snapshot_manifest import Manifest, PieceRecord
from replicax._src.parameter_servers.store.snapshot_parts import (
    rows_in_turn,
    rows_of_units,
    write_units,
    write_whole,
)

_MOST_CHANGED: Final = 1 / 2
"""The changed part of a shard from which the whole shard is written."""

_MAX_COPIED_BYTES: Final = 1 << 24


@dataclass(frozen=True)
class Entry:
    """A shard as it is written.

    Attributes:
      before: The record in the last snapshot, if not all is written.
      value: A view of the whole value. While it exists, an update needs new memory.
      units: The units whose rows are written. None: all rows if there is a value, else no rows.
      rows: Copies of the rows of ``units``, in place of the value.
    """

    key: str
    spec: Spec
    number: int
    before: PieceRecord | None = None
    value: np.ndarray | None = None
    units: np.ndarray | None = None
    rows: np.ndarray | None = None

    def record(self, *written: Any) -> PieceRecord:
        """Returns the record of the shard, given the parts that were written."""
        before = () if self.before is None else self.before.parts
        return PieceRecord(self.key, self.spec, self.number, rows_per_unit(self.spec), (*before, *written))


def write_entry(file: BufferedWriter, number: int, entry: Entry) -> PieceRecord:
    """Writes a shard's value or changed rows to the file of this number."""
    if entry.units is None:
        return entry.record(*(() if entry.value is None else [write_whole(file, number, entry.value)]))
    if entry.rows is not None:
        rows = iter([entry.rows])
    else:
        assert entry.value is not None
        rows = rows_in_turn(entry.value, entry.units, rows_per_unit(entry.spec))
    return entry.record(write_units(file, number, entry.units, rows))


@final
@dataclass(frozen=True)
class Plan:
    """A plan of what the next snapshot writes.

    Attributes:
      previous: The snapshot that it continues; None if it is a base.
      entries: All shards, in order.
    """

    previous: Manifest | None
    entries: deque[Entry]

    @classmethod
    def of(cls, pieces: Sequence[HeldPiece], previous: Manifest | None) -> Plan:
        """Takes views and copies of the values to write.

        Args:
          pieces: The shards.
          previous: The snapshot that the new one may continue.

        Raises:
          SnapshotError: The value of a shard is lost.
        """
        if lost := [piece.key for piece in pieces if piece.value.is_deleted()]:
            raise SnapshotError(
                f'No snapshot was taken: the value of shard "{lost[0]}" was lost in an update that ran out of memory. '
                "Assign a value, or restart the server from the last snapshot."
            )
        changes = [_Change.of(piece, previous) for piece in pieces]
        num_new_bytes = sum(change.num_bytes for change in changes)
        num_bytes = sum(piece.num_bytes for piece in pieces)
        if previous is not None and not previous.goes_on(num_new_bytes, num_bytes):
            return cls(None, deque(_whole(piece) for piece in pieces))
        left = _MAX_COPIED_BYTES
        entries: dict[str, Entry] = {}
        for change in sorted(changes, key=lambda change: change.num_bytes):
            entries[change.piece.key] = change.entry(is_copied=change.num_bytes <= left)
            left -= change.num_bytes
        return cls(previous, deque(entries[piece.key] for piece in pieces))


@final
@dataclass(frozen=True)
class _Change:
    """The change of a shard since the last snapshot.

    Attributes:
      units: The units of rows that have changed; None if all may have.
      before: The record in the last snapshot; None if it cannot be continued.
    """

    piece: HeldPiece
    units: np.ndarray | None
    before: PieceRecord | None

    @classmethod
    def of(cls, piece: HeldPiece, previous: Manifest | None) -> _Change:
        before = None if previous is None else previous.pieces.get(piece.key)
        if before is None or before.spec != piece.spec:
            return cls(piece, None, None)
        if before.number == piece.number:
            return cls(piece, np.zeros(0, np.int64), before)
        units, at_once = piece.changed.units(), rows_per_unit(piece.spec)
        is_cut_alike = before.rows_per_unit == at_once or len(before.parts) == 1
        if units is None or not is_cut_alike:
            return cls(piece, None, None)
        change = cls(piece, units, before)
        return change if change.num_bytes <= _MOST_CHANGED * piece.num_bytes else cls(piece, None, None)

    @property
    def num_bytes(self) -> int:
        if self.units is None:
            return self.piece.num_bytes
        shape, _ = self.piece.spec
        return (
            len(self.units)
            * rows_per_unit(self.piece.spec)
            * (self.piece.num_bytes // max(1, shape[0] if shape else 1))
        )

    def entry(self, *, is_copied: bool) -> Entry:
        piece = self.piece
        if self.units is None:
            return _whole(piece)
        if not len(self.units):
            return Entry(piece.key, piece.spec, piece.number, self.before)
        if is_copied:
            rows = rows_of_units(piece.view(), self.units, rows_per_unit(piece.spec))
            return Entry(piece.key, piece.spec, piece.number, self.before, units=self.units, rows=rows)
        return Entry(piece.key, piece.spec, piece.number, self.before, piece.view(), self.units)


def _whole(piece: HeldPiece) -> Entry:
    return Entry(piece.key, piece.spec, piece.number, value=piece.view())
