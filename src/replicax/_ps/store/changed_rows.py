"""``ChangedRows``: the rows of a shard that have changed since the last snapshot.

Pure; the caller holds the lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, final

import numpy as np

from replicax._ps.store.held_values import Spec

MIN_TRACKED_BYTES: Final = 1 << 16
"""The size from which changed rows are tracked. A smaller shard is written in full."""

_UNIT_BYTES: Final = 256
"""Rows smaller than this are tracked in units of several rows. One byte per unit costs 1/256 of the shard's size."""


def rows_per_unit(spec: Spec) -> int:
    """Returns the number of rows in one unit of a shard with this shape and dtype."""
    shape, dtype = spec
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    return max(1, -(-_UNIT_BYTES // max(1, row_bytes)))


@final
class ChangedRows:
    """The rows of one shard that have changed. Until the first snapshot, any row may have changed.

    Args:
      spec: The shape and dtype of the shard.
    """

    def __init__(self, spec: Spec):
        self._shape = spec[0]
        self._is_tracked = (
            bool(self._shape) and math.prod(self._shape) * spec[1].itemsize >= MIN_TRACKED_BYTES
        )
        self._rows_per_unit = rows_per_unit(spec)
        self._units: np.ndarray | None = None  # True for each that has changed; None: any may have

    def units(self) -> np.ndarray | None:
        """The numbers of the changed units, ascending; None if any unit may have changed."""
        return None if self._units is None else np.flatnonzero(self._units)

    def change(self, numbers: Iterable[np.ndarray] | None) -> None:
        """Marks these rows as changed; None marks all. Numbers outside of the shard are ignored."""
        if numbers is None:
            self._units = None
        if self._units is None:
            return
        assert numbers is not None
        for each in numbers:
            rows = each[(each >= 0) & (each < self._shape[0])]
            self._units[rows // self._rows_per_unit] = True

    def begin(self) -> np.ndarray | None:
        """Starts a new count, because a snapshot of all changes begins. Returns the old count, for ``put_back``."""
        before = self._units
        if self._is_tracked:
            self._units = np.zeros(-(-self._shape[0] // self._rows_per_unit), bool)
        return before

    def put_back(self, before: np.ndarray | None) -> None:
        """Adds the old count to the new one, because the snapshot failed."""
        if self._units is None or before is None:
            self._units = None
        else:
            self._units |= before
