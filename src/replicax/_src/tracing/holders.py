"""Counts references to arrays, and nothing else does, so that donation never takes an array from its holder.

A read of a Keras variable is invisible to us, so a mark at each read cannot replace the count: see
``docs/explanation/design/016-count-references.md``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any


def held_elsewhere(values: Sequence[Any], num_own: int) -> Sequence[int]:
    """Returns the positions of the values that somebody else holds too.

    Args:
      values: A list, which holds each value too.
      num_own: How many further references to each value are ours.
    """
    counts = list(map(sys.getrefcount, values))
    limit = num_own + _references_by_list()
    if counts.count(limit) == len(counts) or max(counts) <= limit:  # the first is fast, and almost always so
        return ()
    return [i for i, count in enumerate(counts) if count > limit]


@functools.cache
def _references_by_list() -> int:
    """What Python counts for a value that only the list holds. Versions differ in what the call itself adds."""
    return next(map(sys.getrefcount, [object()]))
