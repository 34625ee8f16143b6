"""Measures whether a coordinator's memory, and its time for a function, grow with the functions that it has scheduled.

A worker and a parameter server are simulated at first, and then real processes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator

_NUMBERS = (1_000, 10_000, 100_000, 300_000, 1_000_000)
_WARM_UP = 500
_QUEUED = 10_000  # functions that are scheduled before the next ``join``
_ROWS = {
    kind: (f"{kind}: processor time of the {whose} for a function", f"{kind}: live objects{of}")
    for kind, whose, of in (
        ("simulated tasks", "rules", ""),
        ("real tasks", "coordinator", " of the coordinator"),
    )
}

Values = dict[int, list[float]]
"""Values by the number of functions."""


def measure(num_functions: int) -> Iterator[dict[str, Values]]:
    """Yields the values of rows of the table, by the number of functions."""
    numbers = [number for number in _NUMBERS if number <= num_functions]
    for kind, samples in (("simulated tasks", _simulated(numbers)), ("real tasks", _real(numbers))):
        us, objects = _ROWS[kind]
        for number, function_us, num_objects in samples:
            yield {us: {number: [function_us]}, objects: {number: [num_objects]}}


Sample = tuple[int, float, float]
"""The number of functions, the processor time for each, and the objects that are there since the warm-up."""


def _real(numbers: Iterable[int]) -> Iterator[Sample]:
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

            yield from _sampled(run, numbers)


def _simulated(numbers: Iterable[int]) -> Iterator[Sample]:
    import growth_coordinator

    case = next(case for case in growth_coordinator.CASES if case.name == "many are queued")
    cluster = growth_coordinator.SimulatedCluster(case, num_workers=4, num_servers=2)
    yield from _sampled(cluster.run, numbers)


def _sampled(run: Callable[[int], None], numbers: Iterable[int]) -> Iterator[Sample]:
    run(_WARM_UP)
    gc.collect()
    num_before, num_run = len(gc.get_objects()), 0
    for number in numbers:
        before = time.process_time()
        for begin in range(num_run, number, _QUEUED):
            run(min(_QUEUED, number - begin))
        function_us = 1e6 * (time.process_time() - before) / (number - num_run)
        num_run = number
        gc.collect()
        yield number, function_us, float(len(gc.get_objects()) - num_before)
