"""``Tenancy``: whose messages a task answers, without a clock or threads."""

import functools

import pytest

from checks import message
from replicax._src.ps.errors import StaleCoordinatorError, UnavailableError
from replicax._src.ps.tenancy import Tenancy


@pytest.fixture
def tenancy():
    return Tenancy("ps 0", silence_timeout_s=60.0, now=0.0)


def test_hello_begins_it_once(tenancy):
    assert tenancy.incarnation is None
    assert tenancy.hello("a", now=1.0)
    assert not tenancy.hello("a", now=2.0)
    assert tenancy.incarnation == "a"
    tenancy.check("a")


def test_the_next_one_takes_over_for_good(tenancy):
    tenancy.hello("a", now=1.0)
    assert tenancy.hello("b", now=2.0)
    tenancy.check("b")
    for call in (
        lambda: tenancy.check("a"),
        lambda: tenancy.beat("a", now=3.0),
        lambda: tenancy.hello("a", now=3.0),
    ):
        message(StaleCoordinatorError, call, "ps 0", "coordinator a", "another coordinator has taken over")
    assert tenancy.incarnation == "b"


def test_who_has_left_does_not_come_back(tenancy):
    tenancy.hello("a", now=1.0)
    tenancy.leave("b", now=1.5)
    assert tenancy.incarnation == "a"
    tenancy.leave("a", now=2.0)
    assert tenancy.incarnation is None
    message(StaleCoordinatorError, lambda: tenancy.hello("a", now=3.0), "it has left")


def test_a_task_that_was_started_again_knows_nobody(tenancy):
    """A beat tells nothing then: the instance in its answer does. Other messages need what is gone."""
    tenancy.beat("a", now=1.0)
    assert tenancy.incarnation is None
    text = message(UnavailableError, lambda: tenancy.check("a"), "ps 0", "it was started again since")
    assert "coordinator a" in text
    assert tenancy.hello("a", now=2.0)


def test_a_stranger_is_not_answered_while_there_is_another(tenancy):
    tenancy.hello("a", now=1.0)
    for call in (lambda: tenancy.check("b"), lambda: tenancy.beat("b", now=2.0)):
        message(StaleCoordinatorError, call, "works for the coordinator a, not for b")


def test_silence_ends_it(tenancy):
    tenancy.hello("a", now=0.0)
    tenancy.beat("a", now=50.0)
    assert not tenancy.is_silent(now=110.0)
    assert tenancy.is_silent(now=110.1)
    tenancy.give_up(now=110.1)
    assert not tenancy.is_silent(now=1000.0)
    message(StaleCoordinatorError, lambda: tenancy.beat("a", now=111.0), "nothing was heard of it for 60 s")


def test_who_was_silent_and_knows_begins_anew_unless_another_one_has_come(tenancy):
    tenancy.hello("a", now=0.0)
    tenancy.give_up(now=100.0)
    message(StaleCoordinatorError, lambda: tenancy.hello("a", now=101.0), "nothing was heard")
    assert tenancy.hello("a", now=102.0, again=True)
    assert not tenancy.hello("a", now=103.0)
    tenancy.check("a")
    tenancy.give_up(now=200.0)
    tenancy.hello("b", now=201.0)
    message(StaleCoordinatorError, lambda: tenancy.hello("a", now=202.0, again=True), "nothing was heard")
    tenancy.leave("b", now=203.0)
    for name in "ab":
        again = functools.partial(tenancy.hello, name, now=204.0, again=True)
        message(StaleCoordinatorError, again, f"coordinator {name}")


def test_how_long_it_has_waited(tenancy):
    assert tenancy.waited_s(now=5.0) == 5.0
    tenancy.hello("a", now=6.0)
    assert tenancy.waited_s(now=100.0) == 0.0
    tenancy.leave("a", now=10.0)
    assert tenancy.waited_s(now=12.0) == 2.0


def test_a_hello_that_led_to_nothing_may_be_said_again(tenancy):
    tenancy.hello("a", now=1.0)
    tenancy.withdraw()
    assert tenancy.incarnation is None
    assert tenancy.hello("a", now=2.0)


def test_what_is_remembered_is_bounded(tenancy):
    for number in range(2000):
        tenancy.hello(str(number), now=0.0)
    assert len(tenancy._past) == 1000


def test_a_time_that_several_share_ends_with_the_last_of_them(tenancy):
    tenancy.hello("a", now=1.0, member="chief 0")
    tenancy.hello("a", now=1.0, member="worker 0")
    members = ("chief 0", "worker 0", "worker 1")
    assert not tenancy.leave("a", now=2.0, member="chief 0", members=members)
    assert not tenancy.leave("a", now=3.0, member="worker 0", members=members)
    assert not tenancy.hello("a", now=4.0, member="worker 0")  # started again
    assert not tenancy.leave("a", now=5.0, member="worker 1", members=members)
    tenancy.check("a")
    assert tenancy.leave("a", now=6.0, member="worker 0", members=members)
    message(StaleCoordinatorError, lambda: tenancy.hello("a", now=7.0, member="worker 0"), "it has left")


def test_who_left_before_is_not_counted_for_the_next_one(tenancy):
    members = ("worker 0", "worker 1")
    tenancy.hello("a", now=1.0, member="worker 0")
    tenancy.leave("a", now=2.0, member="worker 0", members=members)
    tenancy.hello("b", now=3.0, member="worker 1")
    assert not tenancy.leave("b", now=4.0, member="worker 1", members=members)
    assert tenancy.incarnation == "b"
