"""The life of a worker: met, connected, watched, lost, and met again. Events come one by one, in every order that hurts."""

import logging

import pytest

from driven_job import DrivenJob, connected
from replicax._ps.job.actions_out import Ask, CloseWorker, Log, OpenWorker, SendToWorker
from replicax._ps.job.events_in import Answered, Failed, WorkerAnswered
from replicax._ps.job.limits import Limits
from replicax._src.vocabulary.errors import DeviceError, RemoteError, StaleCoordinatorError, UnavailableError


def workers(driven):
    return driven.job.statistics()["workers"]


def warnings(driven):
    return [
        each.text for each in driven.all_actions if isinstance(each, Log) and each.level == logging.WARNING
    ]


def test_a_worker_is_met_then_opened_then_checked_then_used():
    driven = DrivenJob(ps_addresses=("a:1",))
    driven.schedule()
    hello = driven.asked("worker 0", "hello")
    assert (hello.header, hello.timeout_s) == ({"ps": ["a:1"]}, 5.0)
    driven.answer(hello, {"instance": "a", "pid": 3})
    meet = driven.performed("meet_worker")
    assert meet.arguments == ("worker 0", {"instance": "a", "pid": 3})
    driven.answer(meet)
    [opened], [asked] = driven.of(OpenWorker), driven.of(Ask)
    assert driven.actions.index(opened) < driven.actions.index(asked)
    assert (opened.worker, opened.instance, asked.op) == ("worker 0", "a", "heartbeat")
    assert not workers(driven)["worker 0"]["connected"]
    driven.beat()
    assert driven.sent() == [("closure", 0)]
    told = workers(driven)["worker 0"]
    assert told["connected"]
    assert (told["connections"], told["restarts"], told["task"]["pid"]) == (1, 0, 3)
    assert told["statistics"] == {"n": 1}


def test_a_worker_that_restarts_between_hello_and_its_connection_gets_no_function():
    driven = DrivenJob()
    driven.schedule()
    driven.answer(driven.asked("worker 0", "hello"), {"instance": "a"})
    driven.answer(driven.performed("meet_worker"))
    driven.answer(driven.asked("worker 0", "heartbeat"), {"instance": "b"})
    assert driven.of(SendToWorker) == []
    [closed] = driven.of(CloseWorker)
    assert closed.connection == driven.connections["worker 0"]
    assert workers(driven)["worker 0"]["connections"] == 0
    driven.pass_time(0.1)
    driven.connect("worker 0", "b")
    assert driven.sent() == [("closure", 0)]
    assert workers(driven)["worker 0"]["restarts"] == 1


def test_a_connection_that_cannot_be_opened_is_closed_and_tried_again():
    driven = DrivenJob()
    driven.answer(driven.asked("worker 0", "hello"), {"instance": "a"})
    driven.answer(driven.performed("meet_worker"))
    first = driven.connections["worker 0"]
    driven.breaks()
    assert [each.connection for each in driven.of(CloseWorker)] == [first]
    driven.beat()
    assert driven.of(CloseWorker) == []
    assert not workers(driven)["worker 0"]["connected"]
    driven.pass_time(0.1)
    assert driven.connect() > first
    assert workers(driven)["worker 0"]["connected"]


def test_pauses_between_tries_grow_to_a_second():
    driven = DrivenJob()
    times = []
    for _ in range(7):
        driven.fail(driven.asked("worker 0", "hello"))
        wake_at = driven.job.wake_at
        times.append(round(wake_at - driven.now, 3))
        driven.pass_time(wake_at - driven.now)
    assert times == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


def test_a_worker_that_is_unreachable_for_too_long_is_given_up_and_the_last_one_breaks_the_job():
    driven = DrivenJob(2, limits=Limits(reconnect_s=5.0))
    number = driven.schedule()
    driven.pass_time(5.1)
    driven.fail(driven.asked("worker 0", "hello"))
    assert workers(driven)["worker 0"]["given_up"]
    assert number not in driven.settled
    driven.fail(driven.asked("worker 1", "hello"))
    idle = driven.wait("idle")
    error = driven.ended[idle].error
    assert isinstance(error, UnavailableError)
    assert "Could not reach worker 1 for 5 s, and gave it up: silent" in str(error)
    assert number in driven.settled
    assert not any(isinstance(each, Ask) for each in driven.pending.values())
    assert isinstance(driven.ended[driven.wait("idle")].error, UnavailableError)  # each call raises it


@pytest.mark.parametrize("error", [StaleCoordinatorError("other"), DeviceError("few")])
def test_a_worker_that_does_not_belong_to_the_job_breaks_it_at_once(error):
    driven = DrivenJob(2)
    driven.connect("worker 1")
    number = driven.schedule()
    driven.fail(driven.asked("worker 0", "hello"), error)
    assert driven.settled[number].error is error
    assert workers(driven)["worker 0"]["given_up"]


def test_a_worker_too_small_for_the_job_breaks_it():
    driven = DrivenJob()
    driven.answer(driven.asked("worker 0", "hello"), {"instance": "a"})
    error = DeviceError("few")
    driven.fail(driven.performed("meet_worker"), error)
    assert driven.ended[driven.wait("idle")].error is error


def test_heartbeats_go_on_and_are_kept():
    driven = connected()
    for number in range(3):
        driven.pass_time(1.0)
        asked = driven.asked("worker 0", "heartbeat")
        assert asked.timeout_s == 2.0
        driven.answer(asked, {"instance": "instance of worker 0", "statistics": {"n": number}})
        assert workers(driven)["worker 0"]["statistics"] == {"n": number}
    assert not warnings(driven)


def test_a_worker_is_lost_at_the_second_missed_heartbeat_in_a_row():
    driven = connected()
    number = driven.schedule()
    for is_last in (False, False, True):
        driven.pass_time(1.0)
        driven.fail(driven.asked("worker 0", "heartbeat"))
        if not is_last:
            assert workers(driven)["worker 0"]["connected"]
            driven.pass_time(1.0)
            if not warnings(driven) and driven.now < 3.0:
                driven.beat(instance="instance of worker 0")  # not in a row
    assert not workers(driven)["worker 0"]["connected"]
    [text] = warnings(driven)
    assert text == (
        "Lost worker 0: silent Its in-flight functions will be rescheduled; reconnecting for up to 10 s."
    )
    driven.connect()
    assert driven.sent() == [("closure", number)]


def test_a_heartbeat_of_another_process_is_a_loss():
    driven = connected()
    number = driven.schedule()
    driven.pass_time(1.0)
    driven.beat(instance="b")
    assert [each.worker for each in driven.of(CloseWorker)] == ["worker 0"]
    assert "worker 0 is another process than before" in warnings(driven)[0]
    driven.connect(instance="b")
    assert driven.sent() == [("closure", number)]
    assert workers(driven)["worker 0"]["restarts"] == 1


def test_a_heartbeat_that_belongs_to_another_coordinator_breaks_the_job():
    driven = connected()
    number = driven.schedule()
    driven.pass_time(1.0)
    error = StaleCoordinatorError("other")
    driven.fail(driven.asked("worker 0", "heartbeat"), error)
    assert driven.settled[number].error is error
    assert not workers(driven)["worker 0"]["connected"]


def test_an_answer_to_an_old_connections_heartbeat_does_not_count_for_the_new_one():
    driven = connected()
    driven.pass_time(1.0)
    old = driven.asked("worker 0", "heartbeat")
    driven.breaks()
    del driven.pending[old.request]
    driven.connect(instance="b")
    driven.do(Answered(old.request, {"instance": "instance of worker 0", "statistics": {"n": 99}}))
    assert workers(driven)["worker 0"]["connected"]
    assert workers(driven)["worker 0"]["statistics"] == {"n": 1}
    driven.do(Failed(old.request, UnavailableError("silent", "worker 0")))
    driven.pass_time(1.0)
    driven.fail(driven.asked("worker 0", "heartbeat"))
    assert workers(driven)["worker 0"]["connected"]  # one missed, not two


def test_events_of_an_old_connection_are_ignored():
    driven = connected()
    number = driven.schedule()
    old = driven.connections["worker 0"]
    driven.breaks()
    driven.breaks(connection=old)
    new = driven.connect(instance="b")
    assert new != old
    driven.do(WorkerAnswered("worker 0", old, [{}]))
    assert number not in driven.settled
    driven.breaks(connection=old)
    assert workers(driven)["worker 0"]["connected"]
    driven.works({})
    assert driven.settled[number].error is None


def test_a_function_whose_answer_comes_before_the_loss_is_not_run_again():
    """Both are on their way to the job at once. The order in which they are handled decides, and nothing in between."""
    driven = connected()
    first, second = driven.schedule(), driven.schedule()
    driven.works({})
    driven.works({"signature": "x"})
    driven.breaks()
    driven.connect(instance="b")
    assert driven.sent() == []
    assert {first, second} == set(driven.settled)


def test_a_function_whose_answer_comes_after_the_loss_runs_again_and_ends_once():
    driven = connected()
    number = driven.schedule()
    old = driven.connections["worker 0"]
    driven.pass_time(1.0)
    driven.fail(driven.asked("worker 0", "heartbeat"))
    driven.pass_time(1.0)
    driven.fail(driven.asked("worker 0", "heartbeat"))
    driven.do(WorkerAnswered("worker 0", old, [{}]))
    assert number not in driven.settled
    driven.connect(instance="b")
    driven.works({})
    assert driven.settled[number].error is None
    assert driven.job.statistics()["closures"]["retried"] == 1


def test_the_connection_ends_with_a_workers_own_unavailability_but_not_with_a_servers():
    driven = connected()
    first, second = driven.schedule(), driven.schedule()
    driven.works({})  # so that more than one travel
    driven.works(UnavailableError("no server", "ps 0"))
    assert driven.servers.failures == ["ps 0"]
    assert workers(driven)["worker 0"]["connected"]
    driven.works(UnavailableError("ended", "worker 0"))
    assert not workers(driven)["worker 0"]["connected"]
    driven.connect()
    driven.works({})
    assert {first, second} == set(driven.settled)


def test_an_answer_without_a_request_ends_the_connection():
    driven = connected()
    driven.do(WorkerAnswered("worker 0", driven.connections["worker 0"], [{}]))
    assert not workers(driven)["worker 0"]["connected"]
    assert "without a request" in warnings(driven)[0]


def test_a_function_that_kills_three_workers_fails():
    driven = connected()
    number = driven.schedule("bad")
    for life in range(3):
        assert number not in driven.settled
        driven.breaks()
        driven.connect(instance=str(life))
    error = driven.settled[number].error
    assert isinstance(error, RemoteError)
    assert "'bad' probably kills workers: 3 of them died" in str(error)


def test_workers_are_told_the_primaries_when_they_connect_and_when_these_change():
    driven = DrivenJob()
    driven.servers.views = [{"group": 0, "epoch": 1}]
    driven.servers.hooks.tell_workers_primaries()  # none is connected
    driven.answer(driven.asked("worker 0", "hello"), {"instance": "a"})
    driven.answer(driven.performed("meet_worker"))
    told = driven.asked("worker 0", "primaries")
    assert told.header == {"views": [{"group": 0, "epoch": 1}]}
    assert driven.of(OpenWorker) == []
    driven.answer(told, {})
    driven.servers.views = [{"group": 0, "epoch": 2}]  # changes before the connection is used
    driven.beat()
    assert driven.asked("worker 0", "primaries").header == {"views": [{"group": 0, "epoch": 2}]}
    driven.fail(driven.asked("worker 0", "primaries"))  # it finds out itself
    assert workers(driven)["worker 0"]["connected"]
    driven.servers.views = [{"group": 0, "epoch": 3}]
    driven.servers.hooks.tell_workers_primaries()
    driven.schedule()
    assert driven.has_asked("worker 0", "primaries")
