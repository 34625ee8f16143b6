"""Which arrays are exchanged together, and at which steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


def split_evenly(sizes: Sequence[int], count: int) -> list[range]:
    """Splits arrays, which stay whole and in order, into so many runs of sizes as equal as they can be.

    Args:
      sizes: The size of each array; at least ``count`` of them.
      count: The number of runs. None is empty.

    >>> split_evenly([4, 1, 1, 2, 4], 3)
    [range(0, 1), range(1, 4), range(4, 5)]
    """
    before = [0, *accumulate(sizes)]
    ends = [0]
    for number in range(1, count):
        goal = before[-1] * number / count
        allowed = range(ends[-1] + 1, len(sizes) - (count - number) + 1)
        ends.append(min(allowed, key=lambda end: abs(before[end] - goal)))
    return [range(*bounds) for bounds in zip(ends, [*ends[1:], len(sizes)], strict=True)]


def offsets_of(every: int, num_fragments: int) -> list[int]:
    """Returns the step of each fragment at which it is exchanged, modulo ``every``: one after the other.

    >>> offsets_of(30, 4), offsets_of(1, 2)
    ([7, 15, 22, 0], [0, 0])
    """
    return [(number * every // num_fragments) % every for number in range(1, num_fragments + 1)]


def allowed_steps(every: int, num_fragments: int) -> list[int]:
    """Returns the numbers of steps that may be counted at once: between such steps lie all boundaries.

    >>> allowed_steps(24, 4), allowed_steps(30, 4)
    ([1, 2, 3, 6], [1])
    """
    shared = math.gcd(every, *offsets_of(every, num_fragments))
    return [number for number in range(1, shared + 1) if not shared % number]
