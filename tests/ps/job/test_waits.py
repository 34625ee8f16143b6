"""What callers wait for: room, failures, the end of all functions, a dataset, the end of the job."""

import pytest

from driven_job import DrivenJob, connected
from replicax._ps.job.actions_out import EndWait
from replicax._ps.job.events_in import Closed, ResourceAdded, WaitGivenUp
from replicax._src.vocabulary.errors import ClosureInputError, ContextError, RemoteError

ERROR = RemoteError("failed", "ValueError", "worker 0")


def test_room_comes_when_a_worker_takes_a_function():
    driven = connected(capacity=2)
    assert driven.ended[driven.wait("room")].error is None
    for _ in range(3):  # one is in flight
        driven.schedule()
    wait = driven.wait("room")
    assert wait not in driven.ended
    driven.works({})
    assert driven.ended[wait].error is None


def test_a_caller_that_waited_for_room_with_others_may_be_over_the_capacity():
    driven = DrivenJob(capacity=1)
    waits = [driven.wait("room") for _ in range(2)]
    numbers = [driven.schedule() for _ in waits]
    driven.connect()
    driven.works({})
    driven.works({})
    assert list(driven.settled) == numbers


@pytest.mark.parametrize("kind", ["room", "done", "idle"])
def test_a_failure_is_raised_once_when_nothing_is_in_flight(kind):
    driven = connected(2)
    driven.schedule()
    driven.schedule()
    driven.works(ERROR, worker="worker 0")
    waits = [driven.wait(kind), driven.wait("idle")]
    assert not driven.ended
    driven.works({}, worker="worker 1")
    assert [driven.ended[wait].error for wait in waits] == [ERROR, None]


def test_a_full_queue_ends_with_the_failure():
    driven = connected(capacity=1)
    driven.schedule()
    driven.schedule()
    wait = driven.wait("room")
    driven.works(ERROR)
    assert driven.ended[wait].error is ERROR


def test_without_a_failure_a_caller_learns_whether_all_have_ended():
    driven = connected()
    assert driven.ended[driven.wait("done")].value is True
    driven.schedule()
    assert driven.ended[driven.wait("done")].value is False


def test_a_wait_that_was_given_up_does_not_end_and_takes_no_failure():
    driven = connected()
    driven.schedule()
    first, second = driven.wait("idle"), driven.wait("idle")
    driven.do(WaitGivenUp(first))
    driven.works(ERROR)
    assert first not in driven.ended
    assert driven.ended[second].error is ERROR
    driven.do(WaitGivenUp(second))  # both were on their way


def test_a_failure_that_an_interrupted_caller_has_not_seen_is_kept_for_the_next_one():
    """Ctrl-C comes when the wait has ended, and before the caller looks."""
    driven = connected()
    driven.schedule()
    wait = driven.wait("idle")
    driven.works(ERROR)
    assert driven.ended[wait].error is ERROR
    driven.do(WaitGivenUp(wait))
    late = driven.schedule()
    assert "after this: failed" in str(driven.settled[late].error)
    assert driven.ended[driven.wait("done")].error is ERROR
    driven.do(WaitGivenUp(wait))
    assert driven.ended[driven.wait("done")].error is None


def test_a_breakage_that_an_interrupted_caller_has_not_seen_is_over_once_it_is_mended():
    driven = connected()
    driven.servers.hooks.broke(ERROR, "ps 0")
    wait = driven.wait("idle")
    driven.servers.hooks.mended("ps 0")
    driven.do(WaitGivenUp(wait))
    assert driven.ended[driven.wait("idle")].error is None


def test_callers_see_without_a_wait_whether_there_is_room():
    driven = DrivenJob(capacity=1)
    assert driven.job.room
    driven.schedule()
    assert not driven.job.room
    driven.connect()
    assert driven.job.room
    driven.works(ERROR)
    assert not driven.job.room
    driven.wait("done")
    assert driven.job.room
    driven.do(Closed())
    assert not driven.job.room


def test_a_join_ends_with_the_last_function_and_not_before():
    driven = connected(2)
    driven.schedule()
    driven.schedule()
    wait = driven.wait("idle")
    driven.works({}, worker="worker 1")
    driven.breaks("worker 0")
    assert wait not in driven.ended
    driven.works({}, worker="worker 1")
    assert driven.ended[wait].error is None


def test_a_wait_ends_after_what_it_waits_for_is_settled():
    driven = connected()
    driven.schedule()
    driven.wait("idle")
    driven.works({})
    assert [type(each).__name__ for each in driven.actions] == ["Settle", "EndWait"]


def test_the_first_worker_that_makes_a_dataset_decides():
    driven = connected(2)
    driven.do(ResourceAdded("dataset 0", "dataset", "read"))
    wait = driven.wait("resource", "dataset 0")
    driven.works(OSError("no such file"), worker="worker 0")
    assert wait not in driven.ended
    driven.works({"spec": {"tree": 0}}, worker="worker 1")
    assert driven.ended[wait].value == {"tree": 0}
    assert driven.ended[driven.wait("resource", "dataset 0")].value == {"tree": 0}


def test_a_dataset_that_no_connected_worker_can_make_is_an_error():
    driven = connected(2)
    driven.do(ResourceAdded("dataset 0", "dataset", "read"))
    wait = driven.wait("resource", "dataset 0")
    driven.works(OSError("no such file"), worker="worker 0")
    driven.breaks("worker 1")
    error = driven.ended[wait].error
    assert isinstance(error, ClosureInputError)
    assert "worker 0 could not make dataset 'dataset 0'" in str(error)
    assert isinstance(error.__cause__, OSError)


def test_an_unknown_dataset_is_an_error_at_once():
    driven = connected()
    assert "There is no 'dataset 3'" in str(driven.ended[driven.wait("resource", "dataset 3")].error)


def test_the_end_of_the_job_ends_every_wait():
    driven = DrivenJob()
    driven.do(ResourceAdded("dataset 0", "dataset", "read"))
    driven.schedule()
    waits = {"idle": driven.wait("idle")}
    waits["resource"] = driven.wait("resource", "dataset 0")
    assert not driven.ended
    driven.do(Closed())
    assert driven.ended[waits["idle"]].error is None
    assert "closed before a worker had made" in str(driven.ended[waits["resource"]].error)
    assert isinstance(driven.ended[driven.wait("room")].error, ContextError)
    assert driven.ended[driven.wait("done")].error is None
    driven.do(Closed())
    assert driven.of(EndWait) == []
