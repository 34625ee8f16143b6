"""The counts of workers agree with loops over all of them."""

import random

import pytest

from driven_job import queued
from replicax._ps.job.closures import ClosureQueue


@pytest.mark.parametrize("seed", range(20))
def test_counts_agree_with_loops(seed):
    choose = random.Random(seed)
    queue = ClosureQueue(max_staleness=choose.choice([None, 0, 2, 100]))
    workers = [f"worker {number}" for number in range(5)]
    for worker in workers:
        queue.lost(worker)
    for _ in range(300):
        worker = choose.choice(workers)
        match choose.randrange(8):
            case 0:
                queue.lost(worker)
            case 1 | 2:
                queue.back(worker)
            case 3 | 4:
                queued(queue, "f", None)
                queue.take(worker)
            case 5 | 6:
                closure = queue.oldest(worker)
                if closure is not None:
                    queue.finished(worker, closure)
            case _:
                closure = queue.oldest(worker)
                if closure is not None:
                    queue.returned(worker, closure)
        _check(queue)


def _check(queue):
    here = [member for member in queue._members.values() if member.is_here]
    slowest = min((member.clock for member in here), default=None)
    assert queue.slowest_clock == slowest
    assert queue._clocks.num_here == len(here)
    idle = [member.clock for member in here if not member.in_flight]
    assert queue._clocks.num_idle == len(idle)
    for clock in range((slowest or 0) - 1, (slowest or 0) + 5):
        assert queue._clocks.num_idle_until(clock) == sum(each <= clock for each in idle)
