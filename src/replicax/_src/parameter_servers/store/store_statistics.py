"""Counts of what a store has done since its coordinator came. The owner of these counts has the lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Staleness:
    """Counts by how many updates of others the values were older that closures computed their own updates with."""

    num: int = 0
    total: int = 0
    max: int = 0
    buckets: Counter[int] = field(default_factory=Counter)  # number of bits -> how many

    def count(self, staleness: int) -> None:
        """One update has been applied."""
        self.num += 1
        self.total += staleness
        self.max = max(self.max, staleness)
        self.buckets[staleness.bit_length()] += 1

    def described(self) -> dict[str, Any]:
        """``histogram``: the lowest staleness of each bucket, 0, 1, 2, 4, 8, ..., and how many updates are in it."""
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
      updates: The number of updates that were applied, of closures and others.
      duplicates: The updates that were not, because their closure had been applied, or had ended.
      pulls: Answers with values or rows.
      pieces_sent: Values in these; those that had not changed are not among them.
      rows_sent: The rows of all pieces in these.
      staleness: The staleness of updates whose closures said which versions they had.
    """

    updates: int = 0
    duplicates: int = 0
    pulls: int = 0
    pieces_sent: int = 0
    rows_sent: int = 0
    staleness: Staleness = field(default_factory=Staleness)

    def count_pull(self, values: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> None:
        """An answer has these."""
        self.pulls += 1
        self.pieces_sent += len(values)
        self.rows_sent += sum(map(len, rows))

    def described(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return {**vars(self), "staleness": self.staleness.described()}
