"""Measures how datasets of arrays grow with their rows: opening, shuffling, and moving to a position."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import numpy as np

import replicax as rx

_BATCH = 128
_NUM_TIMES = 7


_SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


def measure(most_rows: int) -> dict[str, dict[int, list[float]]]:
    """Returns the values of each row of the table, by the number of rows."""
    values: dict[str, dict[int, list[float]]] = {}
    for num_rows in _SIZES:
        if num_rows <= most_rows:
            for name, some in _measured(num_rows).items():
                values.setdefault(name, {})[num_rows] = some
    return values


def _measured(num_rows: int) -> dict[str, list[float]]:
    # Without memory of their own: else the first read of each page would count.
    arrays = (np.broadcast_to(np.float32(0), (num_rows, 2)), np.broadcast_to(np.int32(0), (num_rows,)))

    def plain() -> object:
        return next(iter(rx.data.from_arrays(arrays).batch(_BATCH)))

    def shuffled() -> object:
        return next(iter(rx.data.from_arrays(arrays).shuffle(seed=1).batch(_BATCH)))

    begun = iter(rx.data.from_arrays(arrays).shuffle(seed=1).batch(_BATCH))
    next(begun)
    position = begun.get_state()
    position["cursor"]["given"] = num_rows // 2

    def resumed() -> object:
        iterator = iter(rx.data.from_arrays(arrays).shuffle(seed=1).batch(_BATCH))
        iterator.set_state(position)
        return next(iterator)

    kinds: dict[str, Callable[[], object]] = {
        "arrays: open and read a batch": plain,
        "shuffled arrays: open and read a batch": shuffled,
        "shuffled arrays: a position in the middle": resumed,
    }
    values: dict[str, list[float]] = {}
    for name, call in kinds.items():
        values[f"{name}, processor time"] = processor_us(call)
        values[f"{name}, memory"] = [peak_kib(call)]
    return values


def processor_us(call: Callable[[], object]) -> list[float]:
    """Returns the processor time of each of several calls, after one that is not counted."""
    call()
    times = []
    for _ in range(_NUM_TIMES):
        before = time.process_time()
        call()
        times.append(1e6 * (time.process_time() - before))
    return times


def peak_kib(call: Callable[[], object]) -> float:
    """Returns the most memory that Python and NumPy have at a time for a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / 1024
    finally:
        tracemalloc.stop()
