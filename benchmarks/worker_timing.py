"""The shared part of the workers of ``multi_worker.py``: they time each operation, and read its result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Run = Callable[..., list[float]]


def of_sizes(
    make: Callable[[int], Callable[[], Any]], read: Callable[[Any], np.ndarray], num_workers: int
) -> Run:
    """The seconds of all-reduces.

    Args:
      num_workers: Over how many they are.
      make: From a number of bytes to a function that sums a float32 array of ones over the workers, and waits.
      read: Its result as an array.
    """
    operations: dict[int, Callable[[], Any]] = {}

    def run(count: int, size: int) -> list[float]:
        if size not in operations:
            operations[size] = make(size)
            total = read(operations[size]())
            assert total.size == size // 4
            assert (total == num_workers).all()
        operations[size]()
        return _timed(operations[size], count)

    return run


def of_steps(once: Callable[[], Any], read: Callable[[Any], float]) -> Run:
    """The seconds of training steps.

    Args:
      once: A step, and the wait for it.
      read: The loss that it returned.
    """

    def run(count: int) -> list[float]:
        assert math.isfinite(read(once()))
        return _timed(once, count)

    return run


def _timed(once: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of ``count`` calls. An earlier call lets all workers start at the same time."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return seconds
