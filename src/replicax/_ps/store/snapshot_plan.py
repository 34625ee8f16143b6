"""Decides what a snapshot writes of each shard: all of it, the changed rows, or nothing. Pure: sizes only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from replicax._ps.store.snapshot_rules import Chain, extends

_MOST_CHANGED: Final = 1 / 2
"""The changed part of a shard from which the whole shard is written."""

MAX_COPIED_BYTES: Final = 1 << 24
"""The most bytes of changed rows that are copied at once. A copy does not delay the updates of its shard."""


class WriteMode(StrEnum):
    """What a snapshot writes of a shard."""

    ALL = "all"
    ROWS = "rows"
    """The changed rows, read from the value later. Until then an update needs new memory."""
    COPIED_ROWS = "copied rows"
    """Copies of the changed rows."""
    NOTHING = "nothing"


@final
@dataclass(frozen=True)
class RecordedShard:
    """A shard in the snapshot that may be continued.

    Attributes:
      spec: Its shape and dtype.
      number: The number of its version.
      rows_per_unit: The number of rows that are written together.
      is_in_parts: True if some of its rows were replaced.
    """

    spec: Hashable
    number: int
    rows_per_unit: int
    is_in_parts: bool


@final
@dataclass(frozen=True)
class ShardSize:
    """A shard as it is now.

    Attributes:
      spec: Its shape and dtype.
      number: The number of its version.
      rows_per_unit: The number of rows that are written together.
      num_bytes: The number of bytes of its value.
      num_changed_bytes: The number of bytes of its units that have changed; None if any may have changed.
    """

    key: str
    spec: Hashable
    number: int
    rows_per_unit: int
    num_bytes: int
    num_changed_bytes: int | None

    def changed(self, before: RecordedShard | None) -> int | None:
        """Returns the number of bytes to write after a snapshot; None if the whole shard has to be written."""
        if before is None or before.spec != self.spec:
            return None
        if before.number == self.number:
            return 0
        is_cut_alike = before.rows_per_unit == self.rows_per_unit or not before.is_in_parts
        if self.num_changed_bytes is None or not is_cut_alike:
            return None
        return self.num_changed_bytes if self.num_changed_bytes <= _MOST_CHANGED * self.num_bytes else None


@final
@dataclass(frozen=True)
class WritePlan:
    """What a snapshot writes.

    Attributes:
      is_base: True if it writes everything, and continues no other.
      written: What it writes of each shard, in their order.
    """

    is_base: bool
    written: Sequence[WriteMode]


def write_plan(
    shards: Sequence[ShardSize], before: Sequence[RecordedShard | None], chain: Chain | None
) -> WritePlan:
    """Plans a snapshot of shards.

    Args:
      shards: The shards.
      before: Their records in the snapshot that may be continued, in the same order.
      chain: The chain of that snapshot; None if there is none.
    """
    changes = [shard.changed(record) for shard, record in zip(shards, before, strict=True)]
    sizes = [shard.num_bytes if new is None else new for shard, new in zip(shards, changes)]
    if chain is None or not extends(chain, sum(sizes), sum(shard.num_bytes for shard in shards)):
        return WritePlan(True, [WriteMode.ALL] * len(shards))
    left = MAX_COPIED_BYTES
    written = [WriteMode.ALL] * len(shards)
    for index in sorted(range(len(shards)), key=sizes.__getitem__):  # small changes are copied first
        if changes[index] is not None:
            rows = WriteMode.COPIED_ROWS if sizes[index] <= left else WriteMode.ROWS
            written[index] = rows if sizes[index] else WriteMode.NOTHING
        left -= sizes[index]
    return WritePlan(False, written)
