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
      limit_s: The most seconds that one process may take. What it has measured by then counts.
      is_cumulative: True if one process measures all sizes on its way to the largest.
      is_largest_once: True if the largest size is measured in the first round only, because it takes minutes.
    """

    name: str
    module: str
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    rows: tuple[Row, ...]
    num_rounds: int = 3
    limit_s: float = 240.0
    is_cumulative: bool = False
    is_largest_once: bool = False


GROUPS: Final = (
    Group(
        "rows",
        "growth_input",
        (10_000, 100_000, 1_000_000, 10_000_000),
        (10_000, 100_000, 1_000_000),
        (
            Row("arrays: open and read a batch, processor time", "µs", 0.0, floor=100.0),
            Row("arrays: open and read a batch, memory", "KiB", 0.0, floor=16.0),
            Row("shuffled arrays: open and read a batch, processor time", "µs", 0.0, floor=2_000.0),
            Row("shuffled arrays: open and read a batch, memory", "KiB", 0.0, floor=600.0),
            Row("shuffled arrays: a position in the middle, processor time", "µs", 0.0, floor=2_000.0),
            Row("shuffled arrays: a position in the middle, memory", "KiB", 0.0, floor=600.0),
        ),
        num_rounds=1,
        is_cumulative=True,
    ),
    Group(
        "virtual devices",
        "growth_replicas",
        (2, 4, 8, 16),
        (2, 8),
        (
            Row("trace, processor time", "ms", 0.0),
            Row("compile, processor time", "ms", 0.0),
            Row("later steps, processor time for a replica", "ms", 0.0, floor=0.5),
        ),
        num_rounds=2,
    ),
    Group(
        "processes",
        "growth_processes",
        (2, 4, 8),
        (2, 4),
        (
            Row("start-up and first step of a process, processor time", "s", 0.0),
            Row("start to end, processor time for a process", "s", 0.0),
            Row("start-up of a process: messages on the control channel", "messages", 0.0),
            Row("start-up of a process: bytes on the control channel", "bytes", 1.0),
            Row("training: messages of a process in a second", "messages", 0.0, floor=4.0),
        ),
        num_rounds=1,
        limit_s=420.0,
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
        num_rounds=1,
        is_cumulative=True,
    ),
    Group(
        "epochs",
        "growth_epochs",
        (10, 100, 1_000, 10_000),
        (10, 100, 1_000),
        (
            Row("fit: live objects", "objects", 0.0, floor=500.0),
            Row("fit: memory", "MiB", 0.0, floor=8.0),
            Row("a loop: live objects", "objects", 0.0, floor=500.0),
            Row("a loop: memory", "MiB", 0.0, floor=8.0),
        ),
        num_rounds=1,
        limit_s=420.0,
        is_cumulative=True,
    ),
    Group(
        "workers of a coordinator",
        "growth_workers",
        (2, 4, 8, 16),
        (2, 4),
        (
            Row("an empty function, processor time of the coordinator", "µs", 0.0),
            Row("a function that waits for data, processor time of the coordinator", "µs", 0.0),
        ),
        num_rounds=1,
    ),
    Group(
        "simulated workers of parameter servers",
        "growth_coordinator",
        (10, 100, 300, 1_000),
        (10, 100),
        (
            Row("one after another, processor time for a function", "µs", 0.0),
            Row("many are queued, processor time for a function", "µs", 0.0),
            Row("the same, `max_staleness=2`, processor time for a function", "µs", 0.0),
            Row("rounds of all workers, processor time for a function", "µs", 0.0),
            Row("rounds of nine workers in ten, processor time for a function", "µs", 0.0),
            Row("heartbeats of all tasks, processor time in a second", "µs", 1.0),
        ),
        num_rounds=1,
        limit_s=420.0,
    ),
    Group(
        "times that a cell is run",
        "growth_notebook",
        (1, 10, 100),
        (1, 10),
        (
            Row("a cell that defines and runs a step", "programs", 0.0, floor=16.0),
            Row("the same, edited each time", "programs", 0.0, floor=80.0),
            Row("a cell that makes a strategy and a model, and calls fit", "programs", 0.0, floor=16.0),
        ),
        num_rounds=1,
        limit_s=420.0,
        is_cumulative=True,
    ),
    Group(
        "variables",
        "growth_variables",
        (10, 100, 1_000, 10_000),
        (10, 100),
        (
            Row("trace, processor time", "ms", 1.0),
            Row("first step, processor time", "ms", 1.0),
            Row("later steps, processor time", "ms", 1.0),
            Row("checkpoint: save, processor time", "ms", 1.0),
            Row("checkpoint: restore, processor time", "ms", 1.0),
        ),
        num_rounds=2,
        limit_s=330.0,
        is_largest_once=True,
    ),
    Group(
        "scheduled functions",
        "growth_functions",
        (1_000, 10_000, 100_000, 300_000, 1_000_000),
        (1_000, 10_000),
        (
            Row("real tasks: processor time of the coordinator for a function", "µs", 0.0),
            Row("real tasks: live objects of the coordinator", "objects", 0.0, floor=500.0),
            Row("simulated tasks: processor time of the rules for a function", "µs", 0.0),
            Row("simulated tasks: live objects", "objects", 0.0, floor=500.0),
        ),
        num_rounds=1,
        limit_s=960.0,
        is_cumulative=True,
    ),
)
