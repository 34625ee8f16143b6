"""Measures whether a coordinator's memory, and its time for a function, grow with the functions that it has scheduled.

A worker and a parameter server are real processes up to 100,000 functions; simulated tasks run up to a million.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable

_REAL = (1_000, 10_000, 100_000)
_SIMULATED = (1_000, 10_000, 100_000, 1_000_000)
_WARM_UP = 500


def measure(num_functions: int) -> dict[str, dict[int, list[float]]]:
    """Returns the values of each row of the table, by the number of functions."""
    us, objects = _real([num for num in _REAL if num <= num_functions])
    simulated_us, simulated_objects = _simulated([num for num in _SIMULATED if num <= num_functions])
    return {
        "real tasks: processor time of the coordinator for a function": us,
        "real tasks: live objects of the coordinator": objects,
        "simulated tasks: processor time of the rules for a function": simulated_us,
        "simulated tasks: live objects": simulated_objects,
    }


Values = dict[int, list[float]]


def _real(numbers: Iterable[int]) -> tuple[Values, Values]:
    import replicax as rx
    from replicax.coordinator import ClusterCoordinator
    from replicax.testing import server_cluster

    with server_cluster(workers=1, ps=1) as cluster:
        with (
            rx.ParameterServerStrategy(cluster.resolver) as strategy,
            ClusterCoordinator(strategy) as coordinator,
        ):
            empty = rx.function(lambda: 0.0)

            def run(count: int) -> None:
                for _ in range(count):
                    coordinator.schedule(empty)
                coordinator.join(600)

            return _sampled(run, numbers)


def _simulated(numbers: Iterable[int]) -> tuple[Values, Values]:
    import growth_coordinator

    case = next(case for case in growth_coordinator.CASES if case.name == "many are queued")
    cluster = growth_coordinator.SimulatedCluster(case, num_workers=4, num_servers=2)
    return _sampled(cluster.run, numbers)


def _sampled(run: Callable[[int], None], numbers: Iterable[int]) -> tuple[Values, Values]:
    """Returns the processor time for each function, and the objects that are there since the warm-up, by number."""
    run(_WARM_UP)
    gc.collect()
    num_before, num_run = len(gc.get_objects()), 0
    us: Values = {}
    objects: Values = {}
    for number in numbers:
        before = time.process_time()
        run(number - num_run)
        us[number] = [1e6 * (time.process_time() - before) / (number - num_run)]
        num_run = number
        gc.collect()
        objects[number] = [float(len(gc.get_objects()) - num_before)]
    return us, objects
