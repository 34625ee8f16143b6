"""``Lease``: the rule for whose messages a task answers, without a clock or threads."""

import functools

import pytest

from checks import message
from replicax._ps.task.lease import Lease
from replicax._src.vocabulary.errors import StaleCoordinatorError, UnavailableError


@pytest.fixture
def lease():
    return Lease("ps 0", silence_timeout_s=60.0, now=0.0)


def test_hello_starts_a_lease_once(lease):
    assert lease.incarnation is None
    assert lease.hello("a", now=1.0)
    assert not lease.hello("a", now=2.0)
    assert lease.incarnation == "a"
    lease.check("a")


def test_next_coordinator_takes_over_for_good(lease):
    lease.hello("a", now=1.0)
    assert lease.hello("b", now=2.0)
    lease.check("b")
    for call in (
        lambda: lease.check("a"),
        lambda: lease.heartbeat("a", now=3.0),
        lambda: lease.hello("a", now=3.0),
    ):
        message(StaleCoordinatorError, call, "ps 0", "coordinator a", "another coordinator has taken over")
    assert lease.incarnation == "b"


def test_coordinator_that_left_does_not_come_back(lease):
    lease.hello("a", now=1.0)
    lease.leave("b", now=1.5)
    assert lease.incarnation == "a"
    lease.leave("a", now=2.0)
    assert lease.incarnation is None
    message(StaleCoordinatorError, lambda: lease.hello("a", now=3.0), "it has left")


def test_restarted_task_knows_no_coordinator(lease):
    """A heartbeat has no further effect then: the instance in its answer shows the restart. Other messages need data
    that are gone."""
    lease.heartbeat("a", now=1.0)
    assert lease.incarnation is None
    text = message(UnavailableError, lambda: lease.check("a"), "ps 0", "the task has restarted")
    assert "coordinator a" in text
    assert lease.hello("a", now=2.0)


def test_unknown_coordinator_is_not_answered_during_a_lease(lease):
    lease.hello("a", now=1.0)
    for call in (lambda: lease.check("b"), lambda: lease.heartbeat("b", now=2.0)):
        message(StaleCoordinatorError, call, "serves the coordinator a, not b")


def test_silence_ends_a_lease(lease):
    lease.hello("a", now=0.0)
    lease.heartbeat("a", now=50.0)
    assert not lease.is_silent(now=110.0)
    assert lease.is_silent(now=110.1)
    lease.give_up(now=110.1)
    assert not lease.is_silent(now=1000.0)
    message(StaleCoordinatorError, lambda: lease.heartbeat("a", now=111.0), "it was silent for 60 s")


def test_silent_coordinator_restarts_unless_another_one_came(lease):
    lease.hello("a", now=0.0)
    lease.give_up(now=100.0)
    message(StaleCoordinatorError, lambda: lease.hello("a", now=101.0), "it was silent")
    assert lease.hello("a", now=102.0, again=True)
    assert not lease.hello("a", now=103.0)
    lease.check("a")
    lease.give_up(now=200.0)
    lease.hello("b", now=201.0)
    message(StaleCoordinatorError, lambda: lease.hello("a", now=202.0, again=True), "it was silent")
    lease.leave("b", now=203.0)
    for name in "ab":
        again = functools.partial(lease.hello, name, now=204.0, again=True)
        message(StaleCoordinatorError, again, f"coordinator {name}")


def test_time_since_the_last_lease(lease):
    assert lease.waited_s(now=5.0) == 5.0
    lease.hello("a", now=6.0)
    assert lease.waited_s(now=100.0) == 0.0
    lease.leave("a", now=10.0)
    assert lease.waited_s(now=12.0) == 2.0


def test_failed_hello_may_be_repeated(lease):
    lease.hello("a", now=1.0)
    lease.withdraw()
    assert lease.incarnation is None
    assert lease.hello("a", now=2.0)


def test_remembered_incarnations_are_bounded(lease):
    for number in range(2000):
        lease.hello(str(number), now=0.0)
    assert len(lease._past) == 1000


def test_shared_lease_ends_with_its_last_member(lease):
    lease.hello("a", now=1.0, member="chief 0")
    lease.hello("a", now=1.0, member="worker 0")
    members = ("chief 0", "worker 0", "worker 1")
    assert not lease.leave("a", now=2.0, member="chief 0", members=members)
    assert not lease.leave("a", now=3.0, member="worker 0", members=members)
    assert not lease.hello("a", now=4.0, member="worker 0")  # started again
    assert not lease.leave("a", now=5.0, member="worker 1", members=members)
    lease.check("a")
    assert lease.leave("a", now=6.0, member="worker 0", members=members)
    message(StaleCoordinatorError, lambda: lease.hello("a", now=7.0, member="worker 0"), "it has left")


def test_earlier_member_does_not_count_for_the_next_lease(lease):
    members = ("worker 0", "worker 1")
    lease.hello("a", now=1.0, member="worker 0")
    lease.leave("a", now=2.0, member="worker 0", members=members)
    lease.hello("b", now=3.0, member="worker 1")
    assert not lease.leave("b", now=4.0, member="worker 1", members=members)
    assert lease.incarnation == "b"
