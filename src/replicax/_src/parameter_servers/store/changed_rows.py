"""``ChangedRows``: which rows of a piece have changed since they were written to a snapshot.

Pure; the caller has the lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, final

import numpy as np

from replicax._src.parameter_servers.store.held_values import Spec

MIN_TRACKED_BYTES: Final = 1 << 16
"""A piece of less is written whole."""

_UNIT_BYTES: Final = 256
"""Rows of less are counted together: a byte for each such unit is a 256th of the piece."""


def rows_per_unit(spec: Spec) -> int:
    """Returns the number of rows of such a piece that are written together."""
    shape, dtype = spec
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    return max(1, -(-_UNIT_BYTES // max(1, row_bytes)))


@final
class ChangedRows:
    """The rows of one piece that have changed: any, until it is once known that it has been written.

    Args:
      spec: The shape and dtype of the piece.
    """

    def __init__(self, spec: Spec):
        self._shape = spec[0]
        self._is_tracked = (
            bool(self._shape) and math.prod(self._shape) * spec[1].itemsize >= MIN_TRACKED_BYTES
        )
        self._rows_per_unit = rows_per_unit(spec)
        self._units: np.ndarray | None = None  # True for each that has changed; None: any may have

    def units(self) -> np.ndarray | None:
        """The numbers, ascending, of the units of rows that have changed; None: any may have."""
        return None if self._units is None else np.flatnonzero(self._units)

    def change(self, numbers: Iterable[np.ndarray] | None) -> None:
        """These rows have other values now; None: any may. Numbers that it does not have are of no row."""
        if numbers is None:
            self._units = None
        if self._units is None:
            return
        assert numbers is not None
        for each in numbers:
            rows = each[(each >= 0) & (each < self._shape[0])]
            self._units[rows // self._rows_per_unit] = True

    def begin(self) -> np.ndarray | None:
        """All is being written: counts anew. Returns what was counted, for ``put_back``."""
        before = self._units
        if self._is_tracked:
            self._units = np.zeros(-(-self._shape[0] // self._rows_per_unit), bool)
        return before

    def put_back(self, before: np.ndarray | None) -> None:
        """It could not be written: what had been counted counts, too."""
        if self._units is None or before is None:
            self._units = None
        else:
            self._units |= before
