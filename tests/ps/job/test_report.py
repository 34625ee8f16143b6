"""A rule that raises is a bug: the job ends with a report of the last events, and callers are not left waiting."""

import logging

import pytest

from driven_job import NoServers, connected
from replicax._ps.job.actions_out import CloseWorker, EndWait, Log, Settle
from replicax._ps.job.events_in import Closed, FunctionNeeds, Scheduled, TimePassed, WaitBegan, WorkerAnswered
from replicax._ps.job.machine import Job
from replicax._ps.job.setup import Setup


@pytest.fixture
def broken(monkeypatch):
    """A job with a function in flight, a queued one and a join, whose next event raises."""
    driven = connected()
    driven.schedule()
    driven.schedule("the user's name")
    driven.wait("idle")

    def raises(*args, **kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr(type(driven.job._functions), "answered", raises)
    number = driven.connections["worker 0"]
    driven.actions = driven.job.receive(WorkerAnswered("worker 0", number, [{"loss": "secret"}]), 1.0)
    return driven


def test_a_bug_ends_functions_waits_and_connections_and_is_logged(broken):
    bug = broken.job.bug
    assert isinstance(bug, KeyError)
    assert [(each.number, each.error) for each in broken.of(Settle)] == [(0, bug), (1, bug)]
    assert [each.error for each in broken.of(EndWait)] == [bug]
    assert len(broken.of(CloseWorker)) == 1
    [line] = broken.of(Log)
    assert line.level == logging.ERROR
    assert line.error is bug
    assert broken.job.wake_at is None


class Unreadable(Exception):
    def __str__(self):
        raise KeyError("text")


def test_a_function_that_has_left_the_queue_when_a_rule_raises_is_settled():
    driven = connected()
    numbers = [driven.schedule() for _ in range(3)]
    driven.actions = driven.job.receive(
        WorkerAnswered("worker 0", driven.connections["worker 0"], [Unreadable()]), 1.0
    )
    bug = driven.job.bug
    assert isinstance(bug, KeyError)
    assert [(each.number, each.error) for each in driven.of(Settle)] == [(number, bug) for number in numbers]


@pytest.mark.parametrize("event", [Scheduled(1, "f", "f", FunctionNeeds()), WaitBegan(7, "idle"), object()])
def test_an_event_that_cannot_be_recorded_ends_the_job(monkeypatch, event):
    driven = connected()
    driven.schedule()

    def raises(*args):
        raise KeyError("a bug")

    monkeypatch.setattr(type(driven.job._record), "add", raises)
    driven.actions = driven.job.receive(event, 1.0)
    bug = driven.job.bug
    assert isinstance(bug, KeyError)
    numbers = [0, 1] if isinstance(event, Scheduled) else [0]
    assert [(each.number, each.error) for each in driven.of(Settle)] == [(number, bug) for number in numbers]
    waits = [(7, bug)] if isinstance(event, WaitBegan) else []
    assert [(each.wait, each.error) for each in driven.of(EndWait)] == waits


def test_a_rule_that_raises_at_the_start_ends_the_job():
    class Servers(NoServers):
        def start(self, now):
            raise KeyError("a bug")

    job = Job(Setup(1), lambda hooks: Servers())
    [line] = job.start(0.0)
    assert isinstance(job.bug, KeyError)
    assert line.error is job.bug
    [settled] = job.receive(Scheduled(0, "f", "f", FunctionNeeds()), 0.0)
    assert settled.error is job.bug


def test_a_function_that_the_queue_does_not_take_is_settled():
    driven = connected()
    driven.do(Scheduled(3, "f", "f", FunctionNeeds()))
    driven.actions = driven.job.receive(Scheduled(2, "f", "f", FunctionNeeds()), 1.0)
    assert {each.number for each in driven.of(Settle)} == {2, 3}


def test_the_report_has_the_last_events_with_names_and_numbers_but_no_data(broken):
    [note] = broken.job.bug.__notes__
    lines = note.splitlines()
    assert lines[-1] == "1.000000 WorkerAnswered('worker 0', 1, None)"
    assert "0.000000 Scheduled(1, None)" in lines
    assert "0.000000 WaitBegan(1, 'idle', '')" in lines
    assert "secret" not in note
    assert "the user's name" not in note


def test_the_report_has_at_most_200_events():
    driven = connected()
    for _ in range(300):
        driven.do(TimePassed())
    driven.schedule()
    lines = driven.job._record.text().splitlines()
    assert len(lines) == 200
    assert lines[-1].endswith("Scheduled(0, None)")


def test_after_a_bug_callers_get_its_error(broken):
    job, bug = broken.job, broken.job.bug
    [settled] = job.receive(Scheduled(2, "f", "f", FunctionNeeds()), 2.0)
    assert settled.error is bug
    [end] = job.receive(WaitBegan(7, "idle"), 2.0)
    assert end.error is bug
    assert job.receive(Closed(), 2.0) == []
