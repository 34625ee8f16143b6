"""Decides what a snapshot writes of each shard: all of it, the changed rows, or nothing. The caller holds the lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedWriter
from typing import Any, Final, final

import numpy as np

from replicax._ps.store.changed_rows import rows_per_unit
from replicax._ps.store.held_shards import HeldShard
from replicax._ps.store.held_values import Spec
from replicax._ps.store.snapshot_manifest import Manifest, ShardRecord
from replicax._ps.store.snapshot_parts import (
    rows_in_turn,
    rows_of_units,
    write_units,
    write_whole,
)
from replicax._src.program_kit.errors import SnapshotError

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
    before: ShardRecord | None = None
    value: np.ndarray | None = None
    units: np.ndarray | None = None
    rows: np.ndarray | None = None

    def record(self, *written: Any) -> ShardRecord:
        """Returns the record of the shard, given the parts that were written."""
        before = () if self.before is None else self.before.parts
        return ShardRecord(self.key, self.spec, self.number, rows_per_unit(self.spec), (*before, *written))


def write_entry(file: BufferedWriter, number: int, entry: Entry) -> ShardRecord:
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
    def of(cls, shards: Sequence[HeldShard], previous: Manifest | None) -> Plan:
        """Takes views and copies of the values to write.

        Args:
          shards: The shards.
          previous: The snapshot that the new one may continue.

        Raises:
          SnapshotError: The value of a shard is lost.
        """
        if lost := [shard.key for shard in shards if shard.value.is_deleted()]:
            raise SnapshotError(
                f'No snapshot was taken: the value of shard "{lost[0]}" was lost in an update that ran out of memory. '
                "Assign a value, or restart the server from the last snapshot."
            )
        changes = [_Change.of(shard, previous) for shard in shards]
        num_new_bytes = sum(change.num_bytes for change in changes)
        num_bytes = sum(shard.num_bytes for shard in shards)
        if previous is not None and not previous.extends_chain(num_new_bytes, num_bytes):
            return cls(None, deque(_whole(shard) for shard in shards))
        left = _MAX_COPIED_BYTES
        entries: dict[str, Entry] = {}
        for change in sorted(changes, key=lambda change: change.num_bytes):
            entries[change.shard.key] = change.entry(is_copied=change.num_bytes <= left)
            left -= change.num_bytes
        return cls(previous, deque(entries[shard.key] for shard in shards))


@final
@dataclass(frozen=True)
class _Change:
    """The change of a shard since the last snapshot.

    Attributes:
      units: The units of rows that have changed; None if all may have.
      before: The record in the last snapshot; None if it cannot be continued.
    """

    shard: HeldShard
    units: np.ndarray | None
    before: ShardRecord | None

    @classmethod
    def of(cls, shard: HeldShard, previous: Manifest | None) -> _Change:
        before = None if previous is None else previous.shards.get(shard.key)
        if before is None or before.spec != shard.spec:
            return cls(shard, None, None)
        if before.number == shard.number:
            return cls(shard, np.zeros(0, np.int64), before)
        units, at_once = shard.changed.units(), rows_per_unit(shard.spec)
        is_cut_alike = before.rows_per_unit == at_once or len(before.parts) == 1
        if units is None or not is_cut_alike:
            return cls(shard, None, None)
        change = cls(shard, units, before)
        return change if change.num_bytes <= _MOST_CHANGED * shard.num_bytes else cls(shard, None, None)

    @property
    def num_bytes(self) -> int:
        if self.units is None:
            return self.shard.num_bytes
        shape, _ = self.shard.spec
        return (
            len(self.units)
            * rows_per_unit(self.shard.spec)
            * (self.shard.num_bytes // max(1, shape[0] if shape else 1))
        )

    def entry(self, *, is_copied: bool) -> Entry:
        shard = self.shard
        if self.units is None:
            return _whole(shard)
        if not len(self.units):
            return Entry(shard.key, shard.spec, shard.number, self.before)
        if is_copied:
            rows = rows_of_units(shard.view(), self.units, rows_per_unit(shard.spec))
            return Entry(shard.key, shard.spec, shard.number, self.before, units=self.units, rows=rows)
        return Entry(shard.key, shard.spec, shard.number, self.before, shard.view(), self.units)


def _whole(shard: HeldShard) -> Entry:
    return Entry(shard.key, shard.spec, shard.number, value=shard.view())
