"""What a worker was doing when its connection ended."""

import pytest

from replicax._ps.job.actions_out import ToWorker
from replicax._ps.job.closures import Closure
from replicax._ps.job.events_in import FunctionNeeds
from replicax._ps.job.worker_state import WorkerState


@pytest.fixture
def worker():
    worker = WorkerState("worker 0")
    worker.opened(1)
    return worker


def function(worker, number, group):
    closure = Closure(number, "f", "f", FunctionNeeds(num_bytes=10))
    worker.sent(ToWorker("closure", number), closure, group, 0.0)
    return closure


def test_the_functions_of_the_first_group_may_have_run(worker):
    worker.sent(ToWorker("program", "p"), None, 1, 0.0)
    first = [function(worker, 0, 1)]
    second = [function(worker, number, 2) for number in (1, 2)]
    assert worker.running() == first
    worker.answered()
    worker.answered()
    assert worker.running() == second
    worker.answered()
    assert worker.running() == second[1:]
    assert worker.making() is None


def test_a_worker_that_made_a_resource_ran_no_function(worker):
    worker.sent(ToWorker("resource", "dataset 0"), None, 1, 0.0)
    function(worker, 0, 1)
    assert worker.making() == "dataset 0"
    assert worker.running() == []
    worker.answered()
    assert worker.making() is None


def test_bytes_count_until_they_are_answered(worker):
    function(worker, 0, 1)
    function(worker, 1, 1)
    assert worker.num_bytes_unanswered == 20
    worker.answered()
    assert worker.num_bytes_unanswered == 10
    worker.opened(2)
    assert worker.num_bytes_unanswered == 0
    assert worker.running() == []
