"""Counts references to arrays, so that donation never takes an array that somebody else holds. No other file does.

A read of a Keras variable is invisible to us, so a mark at each read cannot replace the count: see
``docs/explanation/design/016-count-references.md``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any


def held_elsewhere(values: Sequence[Any], num_own: int) -> Sequence[int]:
    """Returns the positions of values that somebody else also holds.

    Args:
      values: A list, which also holds a reference to each value.
      num_own: The number of further references to each value that replicax holds.
    """
    counts = list(map(sys.getrefcount, values))
    limit = num_own + _references_by_list()
    if (
        counts.count(limit) == len(counts) or max(counts) <= limit
    ):  # the first test is fast and almost always true
        return ()
    return [i for i, count in enumerate(counts) if count > limit]


@functools.cache
def _references_by_list() -> int:
    """Returns Python's reference count of a value that only a list holds. The call itself adds some, by version."""
    return next(map(sys.getrefcount, [object()]))
