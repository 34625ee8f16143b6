"""The rows of tables that lookups need, their places, and the gradients that are sent back. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from replicax._ps.programs.programs import Shard


@dataclass(frozen=True)
class RowsWanted:
    """The rows that one lookup of a table needs.

    Attributes:
      num_ids: The number of ids, duplicates included. The unique ids are padded to this number.
      positions: int32, of the ids' shape: the position of each id among the unique ones. It is ``num_ids`` for an id
        that
        the table does not have, which is then out of the range of the rows, too.
      parts: The server, the key and the row numbers (int32, increasing, counted from the shard's first row) of each
        shard
        that has some of the ids. Together they are the unique ids, in order.
      has_all: True if the table has all of the ids.
    """

    num_ids: int
    positions: np.ndarray
    parts: Sequence[tuple[int, str, np.ndarray]]
    has_all: bool

    @classmethod
    def of(cls, ids: np.ndarray, shards: Sequence[Shard], num_rows: int) -> Self:
        """Finds the rows at ``ids`` in a table of ``num_rows`` rows in ``shards``."""
        ids = np.asarray(ids)
        unique, inverse = np.unique(ids, return_inverse=True)
        positions = inverse.reshape(ids.shape).astype(np.int32)
        first, end = np.searchsorted(unique, [0, num_rows])
        has_all = end - first == len(unique)
        if not has_all:
            positions = np.where((positions >= first) & (positions < end), positions - first, ids.size)
            positions, unique = positions.astype(np.int32), unique[first:end]
        return cls(ids.size, positions, _parts(unique, shards), bool(has_all))


def _parts(unique: np.ndarray, shards: Sequence[Shard]) -> list[tuple[int, str, np.ndarray]]:
    if len(shards) == 1:
        cuts = [0, len(unique)]
    else:
        cuts = np.searchsorted(unique, [*(_start(shard) for shard in shards), _stop(shards[-1])])
    parts = [
        (shard.ps, shard.key, (unique[low:high] - _start(shard)).astype(np.int32))
        for shard, low, high in zip(shards, cuts[:-1], cuts[1:], strict=True)
    ]
    # Keep one part even if there are no rows: it has their dtype and shape.
    return [part for part in parts if part[2].size] or parts[:1]


def _start(shard: Shard) -> int:
    return 0 if shard.rows is None else shard.rows[0]


def _stop(shard: Shard) -> int:
    assert shard.rows is not None  # one of several
    return shard.rows[1]


def padded(parts: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Joins the rows of ``parts``, and pads them with zeros to ``num_rows`` rows."""
    if len(parts) == 1 and len(parts[0]) == num_rows:
        return parts[0]
    rows = np.zeros((num_rows, *parts[0].shape[1:]), parts[0].dtype)
    start = 0
    for part in parts:
        rows[start : start + len(part)] = part
        start += len(part)
    return rows


def gradient_operands(
    wanted: RowsWanted, gradients: np.ndarray, key: str, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Selects the gradients of a lookup's rows that belong to one shard. Returns the row numbers and their gradients.

    Both are padded to ``num_ids``, so that one program serves all lookups. The padding is row ``num_rows``, which the
    shard
    does not have.

    Args:
      wanted: The rows of the lookup.
      gradients: [num_ids, ...], the gradients of the unique ids in order, then padding.
      key: The key of the shard.
      num_rows: The number of rows of the shard.
    """
    numbers = np.full(wanted.num_ids, num_rows, np.int32)
    start = 0
    for _, part_key, ours in wanted.parts:
        if part_key == key:
            numbers[: len(ours)] = ours
            if start:
                gradients = padded([gradients[start : start + len(ours)]], wanted.num_ids)
            return numbers, gradients
        start += len(ours)
    return numbers, gradients
