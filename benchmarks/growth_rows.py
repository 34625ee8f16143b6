"""The rows of the table of growth: what is measured at which sizes, and the largest exponent that it may have.

The exponents were written before anything was measured. A row whose fitted exponent is larger has a defect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Row:
    """A quantity that is measured at every size of its group.

    Attributes:
      name: What is measured.
      unit: Of the values.
      exponent: The largest that it may have; 0 for what must not grow.
      floor: Smaller values count as this one, because they are noise.
    """

    name: str
    unit: str
    exponent: float
    floor: float = 0.0


@dataclass(frozen=True)
class Group:
    """Rows that one process measures together, one process for each size and round.

    Attributes:
      name: What grows.
      module: The file with ``measure(size)``, which returns the values of each row.
      sizes: In ascending order.
      quick_sizes: The same for ``--quick``.
      rows: What is measured.
      num_rounds: The number of processes for each size. The sizes alternate.
      limit_s: The most seconds that one process may take.
      is_cumulative: True if one process measures all sizes on its way to the largest.
    """

    name: str
    module: str
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    rows: tuple[Row, ...]
    num_rounds: int = 3
    limit_s: float = 240.0
    is_cumulative: bool = False


GROUPS: Final = (
    Group(
        "variables",
        "growth_variables",
        (10, 100, 1_000, 10_000),
        (10, 100, 1_000),
        (
            Row("trace, processor time", "ms", 1.0),
            Row("first step, processor time", "ms", 1.0),
            Row("later steps, processor time", "ms", 1.0),
            Row("checkpoint: save, processor time", "ms", 1.0),
            Row("checkpoint: restore, processor time", "ms", 1.0),
        ),
    ),
    Group(
        "rows",
        "growth_input",
        (10_000, 100_000, 1_000_000, 10_000_000),
        (10_000, 100_000, 1_000_000),
        (
            Row("arrays: open and read a batch, processor time", "µs", 0.0, floor=100.0),
            Row("arrays: open and read a batch, memory", "KiB", 0.0, floor=16.0),
            Row("shuffled arrays: open and read a batch, processor time", "µs", 0.0, floor=100.0),
            Row("shuffled arrays: open and read a batch, memory", "KiB", 0.0, floor=16.0),
            Row("shuffled arrays: a position in the middle, processor time", "µs", 0.0, floor=100.0),
            Row("shuffled arrays: a position in the middle, memory", "KiB", 0.0, floor=16.0),
        ),
    ),
    Group(
        "simulated members of the control channel",
        "growth_controller",
        (16, 64, 250, 1_000),
        (16, 64, 250),
        (
            Row("start: a member joins, processor time for each", "µs", 0.0, floor=5.0),
            Row("an all-gather: a member offers, processor time for each", "µs", 0.0, floor=5.0),
            Row("steps: a heartbeat, processor time for each", "µs", 0.0, floor=5.0),
            Row("steps: a tick, processor time for each", "µs", 0.0, floor=5.0),
            Row("end: a member leaves and the others are told, processor time for each", "µs", 1.0),
        ),
    ),
)
