"""Counts of what a store has done since its coordinator came. The owner of these counts has the lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Staleness:
    """Counts of staleness: by how many other updates the values had changed between a closure's read and its update."""

    num: int = 0
    total: int = 0
    max: int = 0
    buckets: Counter[int] = field(default_factory=Counter)  # number of bits -> how many

    def count(self, staleness: int) -> None:
        """Records one update."""
        self.num += 1
        self.total += staleness
        self.max = max(self.max, staleness)
        self.buckets[staleness.bit_length()] += 1

    def described(self) -> dict[str, Any]:
        """Returns the counts as JSON. ``histogram`` maps the lowest staleness of each bucket (0, 1, 2, 4, 8, ...) to
        a count.
        """
        return {
            "num": self.num,
            "mean": self.total / self.num if self.num else 0.0,
            "max": self.max,
            "histogram": {str((1 << bits) >> 1): self.buckets[bits] for bits in sorted(self.buckets)},
        }


@dataclass
class StoreStatistics:
    """Counts.

    Attributes:
      updates: The number of updates that were applied, by closures and by other calls.
      duplicates: The number of updates that were not, because their closure had been applied or had ended.
      pulls: The number of answers with values or rows.
      shards_sent: The number of values in these answers. Unchanged values are not sent.
      rows_sent: The number of rows in these answers.
      staleness: The staleness of updates whose closures sent the versions that they had read.
    """

    updates: int = 0
    duplicates: int = 0
    pulls: int = 0
    shards_sent: int = 0
    rows_sent: int = 0
    staleness: Staleness = field(default_factory=Staleness)

    def count_pull(self, values: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> None:
        """Records an answer with these values and rows."""
        self.pulls += 1
        self.shards_sent += len(values)
        self.rows_sent += sum(map(len, rows))

    def described(self) -> dict[str, Any]:
        """Returns the counts as JSON."""
        return {**vars(self), "staleness": self.staleness.described()}
