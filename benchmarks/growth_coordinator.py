"""Measures the processor time of a coordinator's rules for one function, with 10 to 1,000 simulated workers.

Real ``Job`` machines have the rules for 100 parameter servers, on virtual time. All tasks answer a heartbeat each
second. A number is the processor time of ``Job.receive`` for all events of a function. Heartbeats are counted apart.
Sockets, messages and threads are not in it; ``growth_workers.py`` has these, with real processes.
"""

from __future__ import annotations

import gc
import heapq
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from replicax._ps.job.actions_out import Action, Ask, OpenWorker, Perform, SendToWorker, Settle
from replicax._ps.job.events_in import Answered, Event, FunctionNeeds, Scheduled, TimePassed, WorkerAnswered
from replicax._ps.job.job_servers import JobServers
from replicax._ps.job.machine import Job
from replicax._ps.job.setup import Setup

_NEEDS: Final = FunctionNeeds(("a program",), ("a constant",), num_bytes=8)
_FUNCTION_S: Final = 0.0002, 0.0004  # of a worker, evenly distributed
_LATENCY_S: Final = 0.0005, 0.0015
_NUM_AHEAD: Final = 5_000  # functions that are queued while others run
_DEPTH: Final = 32  # the most functions that a worker has at a time
_WARM_UP: Final = 60  # functions for each worker, until the depths have settled
_NUM_SERVERS: Final = 100
_NUM_FUNCTIONS: Final = 4_000  # of a case in a round
_NUM_ROUNDS: Final = 3
_HEARTBEAT_S: Final = 3  # simulated seconds without functions
_LONGEST_S: Final = 600.0  # simulated seconds in which so few functions have surely ended


@dataclass(frozen=True)
class Case:
    """How functions are scheduled.

    Attributes:
      name: A row of the table.
      num_ahead: The least number of functions that are queued while others run; 0 if each is scheduled after the last
        has ended.
      max_staleness: As in ``ClusterCoordinator``.
      aggregated: ``replicas_to_aggregate`` for each worker; None for no rounds.
    """

    name: str
    num_ahead: int = _NUM_AHEAD
    max_staleness: int | None = None
    aggregated: float | None = None

    def setup(self, num_workers: int, num_servers: int) -> Setup:
        """Returns the options of a job."""
        return Setup(
            num_workers,
            num_servers,
            ps_addresses=tuple(f"host{n}:1" for n in range(num_servers)),
            snapshot_intervals_s=(60.0,) * num_servers,
            max_staleness=self.max_staleness,
            replicas_to_aggregate=None if self.aggregated is None else round(self.aggregated * num_workers),
        )


CASES: Final = (
    Case("one after another", num_ahead=0),
    Case("many are queued"),
    Case("the same, `max_staleness=2`", max_staleness=2),
    Case("rounds of all workers", aggregated=1.0),
    Case("rounds of nine workers in ten", aggregated=0.9),
)


class SimulatedCluster:
    """A job, and tasks that answer it on virtual time.

    Attributes:
      function_s: The processor time of the job for functions.
      heartbeat_s: The processor time of the job for heartbeats, and for pauses that end.
      num_ended: The number of functions that have ended.
    """

    def __init__(self, case: Case, num_workers: int, num_servers: int):
        self._case = case
        self._round_key = None if case.aggregated is None else "variables"
        self._random = random.Random(num_workers)
        self._now = 0.0
        self._coming: list[tuple[float, int, Event, bool]] = []  # a heap, with True for events of functions
        self._order, self._numbers = count(), count()
        self._free_at: dict[str, float] = {}  # by worker
        self.function_s = self.heartbeat_s = 0.0
        self.num_ended = 0
        instances = [f"ps {n}" for n in range(num_servers)]
        setup = case.setup(num_workers, num_servers)
        self._job = Job(setup, lambda hooks: JobServers(hooks, instances))
        self._carry_out(self._job.start(0.0))
        self.pass_time(0.5)
        assert all(worker["connected"] for worker in self._job.statistics()["workers"].values())
        for _ in range(case.num_ahead + _DEPTH * num_workers if case.num_ahead else 0):
            self._schedule()

    def run(self, num_functions: int) -> None:
        """Runs so many functions. As many are queued before and after, if several are queued."""
        until, latest = self.num_ended + num_functions, self._now + _LONGEST_S
        if not self._case.num_ahead:
            self._schedule()
        while self.num_ended < until:
            assert self._now < latest, "The job gives functions to no worker."
            num_ended = self.num_ended
            self._next()
            for _ in range(self.num_ended - num_ended):
                if self._case.num_ahead or self.num_ended < until:
                    self._schedule()

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, without new functions."""
        until = self._now + seconds
        while self._now < until:
            self._next()

    @property
    def depth(self) -> int:
        """The middle of the depths of the workers: how many functions each may have at a time."""
        return round(
            statistics.median(worker["depth"] for worker in self._job.statistics()["workers"].values())
        )

    def _schedule(self) -> None:
        self._do(Scheduled(next(self._numbers), "f", "f", _NEEDS, self._round_key), is_of_function=True)

    def _next(self) -> None:
        """Lets time pass until the next event."""
        wake_at = self._job.wake_at
        if wake_at is not None and (not self._coming or wake_at < self._coming[0][0]):
            self._now = max(self._now, wake_at)
            self._do(TimePassed(), is_of_function=False)
        else:
            at, _, event, is_of_function = heapq.heappop(self._coming)
            self._now = max(self._now, at)
            self._do(event, is_of_function=is_of_function)

    def _do(self, event: Event, *, is_of_function: bool) -> None:
        before = time.process_time()
        actions = self._job.receive(event, self._now)
        took_s = time.process_time() - before - _CLOCK_S
        if is_of_function:
            self.function_s += took_s
        else:
            self.heartbeat_s += took_s
        self._carry_out(actions)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        assert self._job.bug is None, self._job.bug
        for action in actions:
            match action:
                case Ask(request, task):
                    answer = {"instance": task, "num_devices": 1, "statistics": {"updates": 1, "groups": {}}}
                    self._at(self._now + self._random.uniform(*_LATENCY_S), Answered(request, answer), False)
                case Perform(request):
                    self._at(self._now + self._random.uniform(*_LATENCY_S), Answered(request, None), True)
                case OpenWorker(worker):
                    self._free_at[worker] = self._now
                case SendToWorker(worker, connection, requests):
                    num_functions = sum(request.kind == "closure" for request in requests)
                    takes_s = sum(self._random.uniform(*_FUNCTION_S) for _ in range(num_functions))
                    self._free_at[worker] = max(self._free_at[worker], self._now) + takes_s
                    answers = [{}] * len(requests)
                    self._at(self._free_at[worker], WorkerAnswered(worker, connection, answers), True)
                case Settle(_, error):
                    assert error is None
                    self.num_ended += 1
                case _:
                    raise AssertionError(f"Nothing should be wrong, and the job wants {action}.")

    def _at(self, at: float, event: Event, is_of_function: bool) -> None:
        heapq.heappush(self._coming, (at, next(self._order), event, is_of_function))


def clock_s() -> float:
    """Returns the processor time that two readings of the processor time see of themselves."""
    readings = []
    for _ in range(10_000):
        before = time.process_time()
        readings.append(time.process_time() - before)
    return statistics.median(readings)


_CLOCK_S: Final = clock_s()


def function_us(cluster: SimulatedCluster, num_functions: int) -> float:
    """Returns the processor time for one function."""
    before, num_before = cluster.function_s, cluster.num_ended
    cluster.run(num_functions)
    return 1e6 * (cluster.function_s - before) / (cluster.num_ended - num_before)


def heartbeats_us(cluster: SimulatedCluster) -> float:
    """Returns the processor time for the heartbeats of all tasks in one simulated second."""
    before = cluster.heartbeat_s
    cluster.pass_time(_HEARTBEAT_S)
    return 1e6 * (cluster.heartbeat_s - before) / _HEARTBEAT_S


def alone(measure: Callable[[], float]) -> float:
    """Measures without the garbage of the other clusters, which are in the same process."""
    gc.collect()
    gc.freeze()
    try:
        return measure()
    finally:
        gc.unfreeze()


def measure(num_workers: int) -> dict[str, list[float]]:
    """Returns the values of each row of the table."""
    clusters = {case: SimulatedCluster(case, num_workers, _NUM_SERVERS) for case in CASES}
    for cluster in clusters.values():
        cluster.run(_WARM_UP * num_workers)
    idle = SimulatedCluster(CASES[0], num_workers, _NUM_SERVERS)
    values: dict[str, list[float]] = {}
    for _ in range(_NUM_ROUNDS):
        for case, cluster in clusters.items():
            us = alone(lambda cluster=cluster: function_us(cluster, _NUM_FUNCTIONS))
            values.setdefault(f"{case.name}, processor time for a function", []).append(us)
        us = alone(lambda: heartbeats_us(idle))
        values.setdefault("heartbeats of all tasks, processor time in a second", []).append(us)
    return values
