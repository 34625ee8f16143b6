"""Takes views and copies of what a snapshot writes of each shard, as ``snapshot_plan.py`` decides.

The caller holds the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedWriter
from typing import Any, final

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
from replicax._ps.store.snapshot_plan import RecordedShard, ShardSize, WriteMode, write_plan
from replicax._src.program_kit.errors import SnapshotError


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
        per_unit = rows_per_unit(self.spec) if written or self.before is None else self.before.rows_per_unit
        return ShardRecord(self.key, self.spec, self.number, per_unit, (*before, *written))


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
        units = [shard.changed.units() for shard in shards]
        before = [None if previous is None else previous.shards.get(shard.key) for shard in shards]
        plan = write_plan(
            [_size_of(shard, each) for shard, each in zip(shards, units)],
            [None if record is None else _recorded(record) for record in before],
            None if previous is None else previous.chain,
        )
        entries = deque(map(_entry, shards, plan.written, before, units))
        return cls(None if plan.is_base else previous, entries)


def _size_of(shard: HeldShard, units: np.ndarray | None) -> ShardSize:
    shape, _ = shard.spec
    per_unit, row_bytes = rows_per_unit(shard.spec), shard.num_bytes // max(1, shape[0] if shape else 1)
    changed = None if units is None else len(units) * per_unit * row_bytes
    return ShardSize(shard.key, shard.spec, shard.number, per_unit, shard.num_bytes, changed)


def _recorded(record: ShardRecord) -> RecordedShard:
    return RecordedShard(record.spec, record.number, record.rows_per_unit, len(record.parts) > 1)


def _entry(
    shard: HeldShard, written: WriteMode, before: ShardRecord | None, units: np.ndarray | None
) -> Entry:
    match written:
        case WriteMode.ALL:
            return Entry(shard.key, shard.spec, shard.number, value=shard.view())
        case WriteMode.NOTHING:
            return Entry(shard.key, shard.spec, shard.number, before)
        case WriteMode.ROWS:
            return Entry(shard.key, shard.spec, shard.number, before, shard.view(), units)
        case WriteMode.COPIED_ROWS:
            assert units is not None
            rows = rows_of_units(shard.view(), units, rows_per_unit(shard.spec))
            return Entry(shard.key, shard.spec, shard.number, before, units=units, rows=rows)
