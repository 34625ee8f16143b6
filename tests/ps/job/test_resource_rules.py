"""Datasets and values that each worker makes: sent, made, lost, dropped."""

from driven_job import DrivenJob, connected
from replicax._ps.job.actions_out import SendToWorker
from replicax._ps.job.events_in import FunctionNeeds, ResourceAdded, ResourceDropped
from replicax._ps.job.limits import Limits
from replicax._ps.worker.resources import WORKER_INDEX
from replicax._src.vocabulary.errors import ClosureInputError, InvalidArgumentError


def added(driven, name="dataset 0"):
    driven.do(ResourceAdded(name, "dataset", "read"))


def test_each_worker_makes_each_resource_once_on_a_connection():
    driven = DrivenJob(2)
    added(driven)
    driven.connect("worker 0")
    added(driven, "dataset 1")
    driven.connect("worker 1")
    both = [("resource", "dataset 0"), ("resource", "dataset 1")]
    assert driven.sent("worker 0") == driven.sent("worker 1") == both
    driven.works({}, {}, worker="worker 0")
    driven.schedule(needs=FunctionNeeds(resources=("dataset 0",)))
    assert driven.sent("worker 0") == [("closure", 0)]
    driven.breaks("worker 0")
    driven.connect("worker 0", "b")
    assert driven.sent("worker 0") == both


def test_the_index_of_a_worker_is_neither_made_nor_missing():
    driven = connected(own_resources=frozenset({WORKER_INDEX}))
    added(driven)
    driven.works({})
    for life in ("b", "c"):
        number = driven.schedule(needs=FunctionNeeds(resources=(WORKER_INDEX, "dataset 0")))
        assert driven.sent() == [("closure", number)]
        driven.works({})
        assert driven.settled[number].error is None
        driven.breaks()
        driven.connect(instance=life)
        assert driven.sent() == [("resource", "dataset 0")]
        driven.works({})


def test_a_dropped_resource_is_released_and_made_no_more():
    driven = connected()
    added(driven)
    added(driven, "dataset 1")
    driven.works({}, {})
    driven.do(ResourceDropped("dataset 0"))
    assert driven.sent() == [("release", ("dataset 0",))]
    driven.works({})
    driven.do(ResourceDropped("dataset 0"))
    assert driven.of(SendToWorker) == []
    driven.breaks()
    driven.connect(instance="b")
    assert driven.sent() == [("resource", "dataset 1")]


def test_a_worker_that_comes_back_may_succeed():
    driven = connected()
    added(driven)
    driven.works(OSError("no such file"))
    needs = FunctionNeeds(resources=("dataset 0",))
    number = driven.schedule(needs=needs)
    assert isinstance(driven.settled[number].error, ClosureInputError)
    driven.wait("done")
    driven.breaks()
    driven.connect(instance="b")
    driven.works({"spec": 1})
    number = driven.schedule(needs=needs)
    driven.works({})
    assert driven.settled[number].error is None


def test_a_resource_that_kills_three_workers_is_made_no_more():
    driven = connected()
    added(driven)
    number = driven.schedule(needs=FunctionNeeds(resources=("dataset 0",)))
    wait = driven.wait("resource", "dataset 0")
    for life in range(3):
        assert driven.sent() == [("resource", "dataset 0"), ("closure", number)]
        assert wait not in driven.ended
        driven.breaks()
        driven.connect(instance=str(life))
    assert "'read' of dataset 'dataset 0' probably kills workers: 3 of them" in str(driven.ended[wait].error)
    assert driven.settled[number].error is driven.ended[wait].error
    assert driven.sent() == []
    assert driven.job.statistics()["closures"]["retried"] == 3  # it was the resource, and not the function


def test_an_answer_for_a_dropped_resource_is_ignored():
    driven = connected()
    added(driven)
    driven.do(ResourceDropped("dataset 0"))
    driven.works(OSError("no such file"), {})
    driven.schedule()
    driven.works({})
    assert driven.ended[driven.wait("idle")].error is None


def test_the_error_of_a_lost_worker_decides_nothing():
    driven = connected(2)
    added(driven)
    driven.works(OSError("no such file"), worker="worker 0")
    driven.breaks("worker 0")
    wait = driven.wait("resource", "dataset 0")
    assert wait not in driven.ended  # worker 1 may make it
    driven.breaks("worker 1")
    driven.connect("worker 0", "b")
    assert wait not in driven.ended
    number = driven.schedule(needs=FunctionNeeds(resources=("dataset 0",)))
    assert number not in driven.settled
    assert driven.sent("worker 0") == [("resource", "dataset 0"), ("closure", number)]


def test_a_wait_ends_when_no_worker_is_left_that_could_make_a_resource():
    driven = DrivenJob(2)
    added(driven)
    wait = driven.wait("resource", "dataset 0")
    for worker in ("worker 0", "worker 1"):
        assert wait not in driven.ended
        driven.fail(driven.asked(worker, "hello"), InvalidArgumentError("another version"))
    error = driven.ended[wait].error
    assert isinstance(error, ClosureInputError)
    assert "No worker is left that could make dataset 'dataset 0'" in str(error)
    assert "another version" in str(error)
    assert driven.ended[driven.wait("resource", "dataset 0")].error is not None


def test_a_resource_that_a_worker_made_before_all_were_given_up_has_its_spec():
    driven = connected(limits=Limits(reconnect_s=0.0))
    added(driven)
    driven.works({"spec": 1})
    driven.breaks()
    driven.now += 1.0
    driven.fail(driven.asked("worker 0", "hello"))
    assert driven.ended[driven.wait("idle")].error is not None
    assert driven.ended[driven.wait("resource", "dataset 0")].value == 1
