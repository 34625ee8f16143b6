"""How a quantity grows: the exponent of a power law through its medians, and the size at which it bends."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Self

TOLERANCE: Final = 0.1
"""A fitted exponent may be so much above the largest that is allowed, for noise."""

BEND: Final = 0.25
"""A row bends where the exponent between two sizes is so much above the largest that is allowed."""


@dataclass(frozen=True)
class Growth:
    """How the values of a row grow with the size.

    Attributes:
      medians: The median value of each size.
      exponent: Of the power law through the medians: the least squares of the logarithms.
      lowest: The lowest exponent of a single round.
      highest: The highest exponent of a single round.
      bends_at: The first size that is too far above the one before it, by its median and by its best value; None if
        there is none.
      is_above: True if the exponent is larger than the allowed one.
    """

    medians: dict[int, float]
    exponent: float
    lowest: float
    highest: float
    bends_at: int | None
    is_above: bool

    @classmethod
    def fitted(
        cls, values: Mapping[int, Sequence[float]], allowed: float = math.inf, floor: float = 0.0
    ) -> Self:
        """Fits the values of all rounds, by size. Values below the floor count as the floor."""
        sizes = sorted(values)
        raised = {size: [max(value, floor) for value in values[size]] for size in sizes}
        medians = {size: statistics.median(raised[size]) for size in sizes}
        best = {size: min(raised[size]) for size in sizes}
        exponent = fitted_exponent(medians)
        num_rounds = max(map(len, raised.values()))  # a size with fewer values repeats its last one
        single = [
            fitted_exponent({size: raised[size][min(n, len(raised[size]) - 1)] for size in sizes})
            for n in range(num_rounds)
        ]
        bends = (
            large
            for small, large in pairwise(sizes)
            if min(local_exponent(of, small, large) for of in (medians, best)) > allowed + BEND
        )
        is_above = exponent > allowed + TOLERANCE
        return cls(medians, exponent, min(single), max(single), next(bends, None), is_above)


def fitted_exponent(values: Mapping[int, float]) -> float:
    """Returns the slope of the logarithms of values over those of their sizes."""
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(
        [math.log(size) for size in values], [math.log(value) for value in values.values()]
    ).slope


def local_exponent(values: Mapping[int, float], small: int, large: int) -> float:
    """Returns the exponent between two sizes."""
    return math.log(values[large] / values[small]) / math.log(large / small)
