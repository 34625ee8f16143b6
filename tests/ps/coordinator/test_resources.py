"""Per-worker resources, and what the coordinator knows of them."""

import threading

import numpy as np
import pytest

from replicax._ps.coordinator.resources import Resource, Resources
from replicax._src.vocabulary.errors import ClosureInputError, WaitTimeoutError


@pytest.fixture
def resources():
    resources = Resources()
    resources.add(Resource("dataset 0", "dataset", np.zeros(0, np.uint8)))
    for worker in ("worker 0", "worker 1"):
        resources.back(worker)
    return resources


def test_first_worker_that_made_it_gives_its_spec(resources):
    resources.failed("dataset 0", "worker 0", OSError("no such file"))
    timer = threading.Timer(0.05, lambda: resources.made("dataset 0", "worker 1", {"tree": 0}))
    timer.start()
    assert resources.spec("dataset 0", 20.0) == {"tree": 0}
    timer.join()


def test_resource_that_no_present_worker_could_make_is_an_error(resources):
    resources.failed("dataset 0", "worker 0", OSError("no such file"))
    with pytest.raises(WaitTimeoutError, match=r"'dataset 0'.*0\.05 s"):
        resources.spec("dataset 0", 0.05)
    resources.lost("worker 1")
    with pytest.raises(ClosureInputError, match=r"worker 0.*'dataset 0'.*no such file") as raised:
        resources.spec("dataset 0", 20.0)
    assert isinstance(raised.value.__cause__, OSError)


def test_a_worker_that_comes_back_may_succeed(resources):
    resources.failed("dataset 0", "worker 0", OSError("no such file"))
    assert resources.error(["dataset 0"], "worker 0") is not None
    assert resources.error(["dataset 0"], "worker 1") is None
    resources.lost("worker 0")
    resources.back("worker 0")
    assert resources.error(["dataset 0"], "worker 0") is None


def test_dropped_resource_is_not_made(resources):
    resources.add(Resource("value 1", "value", np.zeros(0, np.uint8)))
    resources.dropped.append("dataset 0")
    assert [resource.name for resource in resources.all()] == ["value 1"]
    with pytest.raises(ClosureInputError, match="'dataset 0'"):
        resources.spec("dataset 0", 0.0)


def test_close_ends_waits(resources):
    timer = threading.Timer(0.05, resources.close)
    timer.start()
    with pytest.raises(ClosureInputError, match="closed before a worker had made"):
        resources.spec("dataset 0", 20.0)
    timer.join()
