"""Measures the processor time of the coordinator per scheduled function, with a growing number of workers.

Each worker is a process; there is one parameter server. One function is empty, and one takes an element of a slow
dataset. In the second case workers wait, and the coordinator has more of them to track.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("PJRT_NPROC", "1")

import time
from collections.abc import Callable
from typing import Any

import replicax as rx
from replicax.coordinator import ClusterCoordinator
from replicax.testing import server_cluster

_SLEEP_S = 0.005
_NUM_ROUNDS = 3
_NUM_EMPTY = 1_000  # functions in a round


def made_slow_dataset() -> Callable[[], Any]:
    """Returns what makes elements that take five milliseconds each. Workers cannot import this module."""

    def slow_dataset() -> Any:
        class Slow:
            def __iter__(self) -> Any:
                import numpy as np

                while True:
                    time.sleep(_SLEEP_S)
                    yield np.float32(1.0)

        return Slow()

    return slow_dataset


def cpu_us(schedule: Callable[[], Any], count: int, coordinator: ClusterCoordinator) -> float:
    """Processor time of this process per function."""
    before = time.process_time()
    for _ in range(count):
        schedule()
    coordinator.join(600)
    return 1e6 * (time.process_time() - before) / count


def measure(num_workers: int) -> dict[str, list[float]]:
    """Returns the values of each row of the table."""
    with server_cluster(workers=num_workers, ps=1) as cluster:
        with (
            rx.ParameterServerStrategy(cluster.resolver) as strategy,
            ClusterCoordinator(strategy) as coordinator,
        ):
            while not all(w["connected"] for w in coordinator.statistics()["workers"].values()):
                time.sleep(0.1)
            iterator = iter(coordinator.create_per_worker_dataset(made_slow_dataset()))
            empty = rx.function(lambda: 0.0)
            take = rx.function(lambda iterator: next(iterator))
            kinds = {
                "an empty function": (lambda: coordinator.schedule(empty), _NUM_EMPTY),
                "a function that waits for data": (
                    lambda: coordinator.schedule(take, args=(iterator,)),
                    40 * num_workers,
                ),
            }
            for schedule, _ in kinds.values():  # compiled, and sent to all
                cpu_us(schedule, 20 * num_workers, coordinator)
            rounds: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(_NUM_ROUNDS):
                for name, (schedule, number) in kinds.items():
                    rounds[name].append(cpu_us(schedule, number, coordinator))
    return {f"{name}, processor time of the coordinator": times for name, times in rounds.items()}
