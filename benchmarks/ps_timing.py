"""The shared part of the coordinators of ``parameter_server.py``: they schedule and take the time; on Linux
also the CPU time."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import task_costs

Run = Callable[..., Any]


def of_scheduled(
    coordinator: Any, fn: Any, args: Sequence[Any] = (), read: Callable[[Any], float] | None = None
) -> Run:
    """Seconds from the first of ``count`` calls of ``schedule`` to the end of ``join``.

    Args:
      read: The loss as a number: it is looked at.
    """

    def run(count: int) -> float:
        start = time.perf_counter()
        last = None
        for _ in range(count):
            last = coordinator.schedule(fn, args=args)
        coordinator.join()
        seconds = time.perf_counter() - start
        assert last is not None
        assert read is None or math.isfinite(read(last.fetch()))
        return seconds

    return run


def of_fetches(coordinator: Any, fn: Any) -> Run:
    """``count`` times the median of seconds from ``schedule`` to its result."""

    def run(count: int) -> float:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            assert float(coordinator.schedule(fn).fetch()) == 1
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * count

    return run


def of_transfers(ways: Mapping[str, Callable[[int], Any]]) -> Run:
    """For each way ``count`` times its median of seconds. The ways alternate: a pull comes after a change."""

    def run(count: int) -> dict[str, float]:
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(count):
            for way, once in ways.items():
                start = time.perf_counter()
                once(number)
                seconds[way].append(time.perf_counter() - start)
        return {way: statistics.median(each) * count for way, each in seconds.items()}

    return run


def with_cpu_time(run: Run, pids: Mapping[str, int]) -> Run:
    """The result of ``run``, and the CPU time of each process for one operation."""

    def run_and_look(count: int) -> dict[str, Any]:
        before = task_costs.cpu_s(pids)
        result = run(count)
        cpu = task_costs.since(before, task_costs.cpu_s(pids))
        return {"seconds": result, "cpu": {name: s / count for name, s in cpu.items()}}

    return run_and_look


class MemoryPhases:
    """MiB of a process at the end of each phase, and the peak within it.

    Args:
      pid: Of the process, now.

    Attributes:
      found: By phase: ``settled`` and ``peak``.
    """

    SETTLE_S = 1.0

    def __init__(self, pid: Callable[[], int]):
        self._pid = pid
        self.found: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def of(self, name: str, is_new: bool = False) -> Iterator[None]:
        """Measures a phase. ``is_new``: the process started with this phase."""
        if not is_new:
            task_costs.forget_peak(self._pid())
        yield
        time.sleep(self.SETTLE_S)
        pid = self._pid()
        self.found[name] = {"settled": task_costs.resident_mib(pid), "peak": task_costs.peak_mib(pid)}
