"""Synchronous rounds: the servers apply each complete round once, before the next one begins."""

from driven_job import connected
from replicax._ps.job.actions_out import Perform
from replicax._ps.job.events_in import Closed
from replicax._src.vocabulary.errors import RemoteError, StaleCoordinatorError, UnavailableError


def with_round(num=2, **setup):
    """A job with one complete round, and a function of the next one."""
    driven = connected(num, replicas_to_aggregate=num, **setup)
    for _ in range(num + 1):
        driven.schedule(round_key="v")
    for number in range(num):
        driven.works({}, worker=f"worker {number}")
    return driven


def test_a_complete_round_is_applied_and_then_the_next_one_begins():
    driven = with_round(first_round=7)
    apply = driven.performed("apply_round")
    assert apply.arguments == (7, 7, (0, 1))
    assert not any(driven.outbox.values())
    idle = driven.wait("idle")
    driven.answer(apply)
    assert not any(driven.outbox.values())  # values are read again first
    driven.answer(driven.performed("renew"))
    [request] = driven.outbox["worker 1"]  # it became idle last
    assert (request.what, request.header["round"]) == (2, 8)
    driven.works({}, worker="worker 1")
    assert driven.ended[idle].error is None  # the last gradient waits for another one
    assert driven.job.num_waiting_gradients == 1
    assert driven.job.statistics()["closures"]["rounds"] == 1
    assert driven.job.next_round == 9


def test_a_round_is_tried_again_while_a_server_is_away():
    driven = with_round()
    for _ in range(3):
        apply = driven.performed("apply_round")
        driven.fail(apply, UnavailableError("away", "ps 1"))
        assert driven.of(Perform) == []
        driven.pass_time(0.2)
        [again] = driven.of(Perform)
        assert again.arguments == apply.arguments
    assert driven.servers.failures == ["ps 1"] * 3


def test_a_round_that_cannot_be_applied_is_a_failure():
    driven = with_round()
    idle = driven.wait("idle")
    error = RemoteError("no memory", "MemoryError", "ps 0")
    driven.fail(driven.performed("apply_round"), error)
    assert driven.ended[idle].error is error
    assert "gradients could not be applied: no memory" in str(driven.settled[2].error)
    assert not any(isinstance(each, Perform) for each in driven.pending.values())


def test_a_round_after_which_values_cannot_be_read_again_is_a_failure():
    driven = with_round()
    idle = driven.wait("idle")
    driven.answer(driven.performed("apply_round"))
    error = RemoteError("no memory", "MemoryError", "ps 0")
    driven.fail(driven.performed("renew"), error)
    assert driven.ended[idle].error is error
    for _ in range(2):
        driven.schedule(round_key="v")
    assert driven.sent("worker 0")


def test_a_round_is_applied_again_if_a_server_is_away_when_values_are_to_be_read_again():
    driven = with_round()
    driven.answer(driven.performed("apply_round"))
    driven.fail(driven.performed("renew"), UnavailableError("away", "ps 1"))
    assert driven.servers.failures == ["ps 1"]
    driven.pass_time(0.2)
    driven.answer(driven.performed("apply_round"))
    driven.answer(driven.performed("renew"))
    assert driven.job.statistics()["closures"]["rounds"] == 1


def test_a_round_of_another_coordinator_breaks_the_job():
    driven = with_round()
    error = StaleCoordinatorError("other")
    driven.fail(driven.performed("apply_round"), error)
    assert driven.ended[driven.wait("idle")].error is error


def test_a_round_is_not_tried_again_after_the_job_broke():
    driven = with_round()
    driven.servers.hooks.broke(UnavailableError("lost", "ps 0"), "ps 0")
    driven.fail(driven.performed("apply_round"), UnavailableError("away", "ps 0"))
    driven.pass_time(1.0)
    assert not any(isinstance(each, Perform) for each in driven.pending.values())
    driven.servers.hooks.mended("ps 0")
    for _ in range(2):
        driven.schedule(round_key="v")
    for number in (1, 0):  # worker 1 became idle last, so it got the first function
        driven.works({}, worker=f"worker {number}")
    assert driven.performed("apply_round").arguments == (1, 1, (3, 4))


def test_an_error_of_a_round_that_comes_after_a_break_is_not_kept():
    driven = with_round()
    driven.servers.hooks.broke(UnavailableError("lost", "ps 0"), "ps 0")
    driven.servers.hooks.mended("ps 0")
    driven.fail(driven.performed("apply_round"), RemoteError("no memory", "MemoryError", "ps 0"))
    assert driven.ended[driven.wait("idle")].error is None


def test_the_end_of_the_job_ends_a_round():
    driven = with_round()
    apply = driven.performed("apply_round")
    driven.do(Closed())
    driven.answer(apply)
    assert driven.of(Perform) == []
