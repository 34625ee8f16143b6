"""Measures the processor time of the coordinator per scheduled function, with a growing number of workers.

``python benchmarks/growth.py`` starts 2, 4, 8 and 16 workers, each a process, and one parameter server. It
schedules an empty function, and one that takes an element of a slow dataset. In the second case workers wait,
and the coordinator has more of them to track. Times are the coordinator's processor time per function, in
microseconds: the median, the smallest and the largest of the rounds.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("PJRT_NPROC", "1")

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import replicax as rx
from replicax.coordinator import ClusterCoordinator
from replicax.testing import server_cluster

_SLEEP_S = 0.005


def slow_dataset() -> Any:
    """Elements that take five milliseconds each."""

    class Slow:
        def __iter__(self) -> Any:
            import numpy as np

            while True:
                time.sleep(_SLEEP_S)
                yield np.float32(1.0)

    return Slow()


def cpu_us(schedule: Callable[[], Any], count: int, coordinator: ClusterCoordinator) -> float:
    """Processor time of this process per function."""
    before = time.process_time()
    for _ in range(count):
        schedule()
    coordinator.join(600)
    return 1e6 * (time.process_time() - before) / count


def measured(num_workers: int, num_rounds: int, count: int) -> dict[str, list[float]]:
    """Returns the times of the rounds for each kind of function."""
    with server_cluster(workers=num_workers, ps=1) as cluster:
        with (
            rx.ParameterServerStrategy(cluster.resolver) as strategy,
            ClusterCoordinator(strategy) as coordinator,
        ):
            while not all(w["connected"] for w in coordinator.statistics()["workers"].values()):
                time.sleep(0.1)
            iterator = iter(coordinator.create_per_worker_dataset(slow_dataset))
            empty = rx.function(lambda: 0.0)
            take = rx.function(lambda iterator: next(iterator))
            kinds = {
                "empty": (lambda: coordinator.schedule(empty), count),
                "waits": (lambda: coordinator.schedule(take, args=(iterator,)), 40 * num_workers),
            }
            for schedule, _ in kinds.values():  # compiled, and sent to all
                cpu_us(schedule, 20 * num_workers, coordinator)
            rounds: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(num_rounds):
                for name, (schedule, number) in kinds.items():
                    rounds[name].append(cpu_us(schedule, number, coordinator))
    return rounds


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=3000, help="empty functions in a round (3000)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    options = parser.parse_args()
    print("workers   empty function, µs          a function that waits, µs")
    for num_workers in options.workers:
        rounds = measured(num_workers, options.rounds, options.count)
        cells = [
            f"{statistics.median(times):7.0f}  ({min(times):.0f}–{max(times):.0f})"
            for times in rounds.values()
        ]
        print(f"{num_workers:7}   {cells[0]:<26}  {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
