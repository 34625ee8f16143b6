"""One function costs the same however many workers there are, and leaves nothing behind."""

import gc
import sys
from collections import deque

import pytest

from driven_job import connected
from replicax._ps.job.actions_out import Perform, SendToWorker
from replicax._ps.job.events_in import Answered, FunctionNeeds, Scheduled, WorkerAnswered

NEEDS = FunctionNeeds()


class Load:
    """Has workers answer in their order, one answer for each function that is scheduled, with all of them busy."""

    def __init__(self, num_workers, round_key=None, **options):
        driven = connected(num_workers, **options)
        self.job, self.round_key = driven.job, round_key
        self.now, self.number = driven.now, 0
        self.sent = deque()
        for _ in range(num_workers):
            self._schedule()

    def run(self, num):
        for _ in range(num):
            self._schedule()
            worker, connection, num_requests = self.sent.popleft()
            self._do(WorkerAnswered(worker, connection, [{}] * num_requests))

    def _schedule(self):
        self._do(Scheduled(self.number, "f", "f", NEEDS, self.round_key))
        self.number += 1

    def _do(self, event):
        self.now += 0.00001
        for action in self.job.receive(event, self.now):
            if isinstance(action, SendToWorker):
                self.sent.append((action.worker, action.connection, len(action.requests)))
            elif isinstance(action, Perform):
                self._do(Answered(action.request, None))


def num_calls(load, num):
    """Returns the number of calls of Python functions for one scheduled function."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        load.run(num)
    finally:
        sys.setprofile(None)
    return calls / num


@pytest.mark.parametrize("mode", ["asynchronous", "staleness", "rounds"])
def test_a_function_costs_the_same_with_10_and_with_300_workers(mode):
    costs = []
    for num_workers in (10, 300):
        options = {
            "asynchronous": {},
            "staleness": {"max_staleness": 2},
            "rounds": {"replicas_to_aggregate": num_workers, "round_key": "v"},
        }[mode]
        load = Load(num_workers, **options)
        load.run(2 * num_workers)
        costs.append(num_calls(load, 1200))
        assert load.job.statistics()["closures"]["finished"] >= 1000
    assert costs[1] < 1.15 * costs[0]


def test_a_function_that_is_done_leaves_nothing_behind():
    load = Load(4)
    load.run(1000)
    gc.collect()
    before = len(gc.get_objects())
    load.run(3000)
    gc.collect()
    assert len(gc.get_objects()) - before < 100


def test_a_function_costs_the_same_while_many_workers_wait_for_the_slowest_one():
    costs = []
    for num_workers in (10, 300):
        load = Load(num_workers, max_staleness=0)
        for _ in range(num_workers - 1):
            load.sent.rotate(1)
            worker, connection, _ = load.sent.popleft()
            load._do(WorkerAnswered(worker, connection, [{}]))
        load._schedule()  # no worker may take it
        costs.append(num_calls(_Scheduling(load), 100))
        assert load.job.statistics()["closures"]["queued"] == 101
    assert costs[1] < 1.15 * costs[0]


class _Scheduling:
    def __init__(self, load):
        self.load = load

    def run(self, num):
        for _ in range(num):
            self.load._schedule()
