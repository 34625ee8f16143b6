"""``TaskSession``: the rules for whose messages a task answers, one order of events at a time; no clock, no threads."""

import math

import pytest

from checks import message
from replicax._ps.task.session_rules import BeginWork, DropWork, EndTask, TaskSession
from replicax._src.vocabulary.errors import StaleCoordinatorError, UnavailableError

LEFT, TAKEN_OVER, SILENT = "it has left", "another coordinator has taken over", "it was silent for 60 s"


@pytest.fixture
def session():
    return TaskSession("ps 0", silence_timeout_s=60.0, now=0.0)


def drops(incarnation, why):
    return (DropWork(incarnation, why),)


def is_refused(session, incarnation, why, *, now=1000.0):
    """Every message of a coordinator is refused with the reason, and changes nothing."""
    before = session.incarnation
    for call in (
        lambda: session.check(incarnation),
        lambda: session.heartbeat(incarnation, now=now),
        lambda: session.hello(incarnation, now=now),
    ):
        message(StaleCoordinatorError, call, f"ps 0 no longer serves the coordinator {incarnation}: {why}")
    assert session.leave(incarnation, now=now) == ()
    assert session.incarnation == before


# --- one coordinator --------------------------------------------------------------------------------------


def test_hello_begins_the_work_and_its_repetition_does_not(session):
    assert session.incarnation is None
    assert session.hello("a", now=1.0) == (BeginWork("a"),)
    assert session.hello("a", now=2.0) == ()
    assert session.hello("a", now=2.0) == ()
    assert session.incarnation == "a"
    session.check("a")


def test_a_late_hello_of_a_coordinator_that_left_is_refused(session):
    session.hello("a", now=1.0)
    assert session.leave("a", now=2.0) == drops("a", LEFT)
    is_refused(session, "a", LEFT)
    assert session.leave("a", now=3.0) == ()  # repeated


def test_a_leave_of_a_stranger_changes_nothing(session):
    session.hello("a", now=1.0)
    assert session.leave("b", now=2.0) == ()
    session.check("a")


def test_a_restarted_task_knows_no_coordinator(session):
    """It ignores a heartbeat: the instance in the answer shows the restart. Other messages need data that is lost."""
    session.heartbeat("a", now=1.0)
    assert session.incarnation is None
    text = message(UnavailableError, lambda: session.check("a"), "ps 0", "the task has restarted")
    assert "coordinator a" in text
    message(UnavailableError, lambda: session.check(None), "the coordinator of a message")
    assert session.hello("a", now=2.0) == (BeginWork("a"),)


def test_work_that_failed_may_be_begun_again(session):
    session.hello("a", now=1.0)
    session.work_failed()
    assert session.incarnation is None
    message(UnavailableError, lambda: session.check("a"), "does not know the coordinator a")
    assert session.time_passed(now=1000.0) == ()  # there is no work to drop
    assert session.hello("a", now=1001.0) == (BeginWork("a"),)


# --- silence ----------------------------------------------------------------------------------------------


def test_a_session_ends_between_two_messages(session):
    session.hello("a", now=0.0)
    session.heartbeat("a", now=50.0)
    assert session.time_passed(now=110.0) == ()
    session.check("a")
    assert session.time_passed(now=110.1) == drops("a", SILENT)
    assert session.time_passed(now=1000.0) == ()
    is_refused(session, "a", SILENT)


def test_messages_without_a_heartbeat_do_not_keep_a_session(session):
    session.hello("a", now=0.0)
    for now in (20.0, 40.0, 60.0):
        session.check("a")
        assert session.time_passed(now) == ()
    assert session.time_passed(now=60.1) == drops("a", SILENT)


@pytest.mark.parametrize("keep", ["hello", "heartbeat"])
def test_hello_and_heartbeat_keep_a_session(session, keep):
    session.hello("a", now=0.0)
    getattr(session, keep)("a", now=59.0)
    assert session.time_passed(now=119.0) == ()
    assert session.time_passed(now=119.1) == drops("a", SILENT)


def test_heartbeats_of_others_do_not_keep_a_session(session):
    session.hello("a", now=0.0)
    message(
        StaleCoordinatorError, lambda: session.heartbeat("b", now=59.0), "serves the coordinator a, not b"
    )
    assert session.time_passed(now=61.0) == drops("a", SILENT)


def test_a_message_before_the_time_is_noticed_is_answered(session):
    """Only ``time_passed`` ends a session: a heartbeat that comes late, but before it, keeps the session."""
    session.hello("a", now=0.0)
    session.heartbeat("a", now=61.0)
    assert session.time_passed(now=62.0) == ()
    session.check("a")


def test_a_silent_coordinator_that_knows_it_begins_again(session):
    session.hello("a", now=0.0)
    session.time_passed(now=100.0)
    message(StaleCoordinatorError, lambda: session.hello("a", now=101.0), SILENT)
    assert session.hello("a", now=102.0, again=True) == (BeginWork("a"),)
    assert session.hello("a", now=103.0) == ()
    assert session.hello("a", now=103.0, again=True) == ()  # its data is not dropped twice
    session.check("a")


def test_a_silent_coordinator_does_not_come_back_after_another_one(session):
    session.hello("a", now=0.0)
    session.time_passed(now=100.0)
    session.hello("b", now=101.0)
    for _ in range(2):
        message(StaleCoordinatorError, lambda: session.hello("a", now=102.0, again=True), SILENT)
    assert session.incarnation == "b"
    session.leave("b", now=103.0)
    for incarnation in "ab":
        message(
            StaleCoordinatorError,
            lambda incarnation=incarnation: session.hello(incarnation, now=104.0, again=True),
            f"coordinator {incarnation}",
        )


def test_only_silence_lets_a_coordinator_begin_again(session):
    session.hello("a", now=0.0)
    session.leave("a", now=1.0)
    message(StaleCoordinatorError, lambda: session.hello("a", now=2.0, again=True), LEFT)


# --- two coordinators -------------------------------------------------------------------------------------


def test_the_next_coordinator_takes_over_for_good(session):
    session.hello("a", now=1.0)
    assert session.hello("b", now=2.0) == (DropWork("a", TAKEN_OVER), BeginWork("b"))
    session.check("b")
    is_refused(session, "a", TAKEN_OVER)
    assert session.incarnation == "b"
    assert session.time_passed(now=63.0) == drops("b", SILENT)  # the messages of a did not count for b


def test_two_coordinators_in_turn(session):
    """Each takes over once. A coordinator that has lost its task never gets it back."""
    session.hello("a", now=1.0)
    session.hello("b", now=2.0)
    message(StaleCoordinatorError, lambda: session.hello("a", now=3.0), TAKEN_OVER)
    assert session.hello("c", now=4.0) == (DropWork("b", TAKEN_OVER), BeginWork("c"))
    for incarnation in "abab":
        is_refused(session, incarnation, TAKEN_OVER)
    session.check("c")


def test_a_stranger_is_not_answered(session):
    session.hello("a", now=1.0)
    for call in (lambda: session.check("b"), lambda: session.heartbeat("b", now=2.0)):
        message(StaleCoordinatorError, call, "serves the coordinator a, not b")
    message(StaleCoordinatorError, lambda: session.check(None), "serves the coordinator a, not None")


def test_work_that_failed_for_the_next_coordinator_does_not_bring_the_former_back(session):
    session.hello("a", now=1.0)
    session.hello("b", now=2.0)
    session.work_failed()
    is_refused(session, "a", TAKEN_OVER)
    assert session.hello("b", now=4.0) == (BeginWork("b"),)


def test_remembered_incarnations_are_bounded(session):
    for number in range(2000):
        session.hello(str(number), now=0.0)
    assert len(session._past) == 1000


# --- several programs -------------------------------------------------------------------------------------

MEMBERS = ("chief 0", "worker 0", "worker 1")


def test_a_shared_session_ends_with_its_last_member(session):
    assert session.hello("a", now=1.0, member="chief 0") == (BeginWork("a"),)
    assert session.hello("a", now=1.0, member="worker 0") == ()
    assert session.leave("a", now=2.0, member="chief 0", members=MEMBERS) == ()
    assert session.leave("a", now=3.0, member="worker 0", members=MEMBERS) == ()
    assert session.leave("a", now=3.0, member="worker 0", members=MEMBERS) == ()  # repeated
    assert session.hello("a", now=4.0, member="worker 0") == ()  # it is back
    assert session.leave("a", now=5.0, member="worker 1", members=MEMBERS) == ()
    session.check("a")
    assert session.leave("a", now=6.0, member="worker 0", members=MEMBERS) == drops("a", LEFT)
    message(StaleCoordinatorError, lambda: session.hello("a", now=7.0, member="worker 0"), LEFT)


def test_a_shared_session_that_all_have_left_begins_again_for_a_member_that_knows_it(session):
    for member in ("group 0", "group 1"):
        session.hello("a", now=1.0, member=member, again=True)
    session.leave("a", now=2.0, member="group 0", members=("group 0", "group 1"))
    assert session.hello("a", now=3.0, member="group 0", again=True) == ()
    for member in ("group 0", "group 1"):
        session.leave("a", now=4.0, member=member, members=("group 0", "group 1"))
    message(StaleCoordinatorError, lambda: session.hello("a", now=5.0, member="group 0"), LEFT)
    assert session.hello("a", now=5.0, member="group 0", again=True) == (BeginWork("a"),)


def test_an_earlier_member_does_not_count_for_the_next_session(session):
    members = ("worker 0", "worker 1")
    session.hello("a", now=1.0, member="worker 0")
    session.leave("a", now=2.0, member="worker 0", members=members)
    session.hello("b", now=3.0, member="worker 1")
    assert session.leave("b", now=4.0, member="worker 1", members=members) == ()
    assert session.incarnation == "b"


def test_a_member_that_leaves_keeps_the_session_of_the_others(session):
    session.hello("a", now=0.0, member="chief 0")
    session.leave("a", now=50.0, member="worker 0", members=MEMBERS)
    assert session.time_passed(now=100.0) == ()


# --- the end of the task ----------------------------------------------------------------------------------


def test_a_task_waits_for_a_coordinator_for_a_limited_time():
    session = TaskSession("ps 0", silence_timeout_s=60.0, now=10.0, wait_timeout_s=30.0)
    assert session.time_passed(now=40.0) == ()
    ends = (EndTask("no coordinator has connected for 30 s"),)
    assert session.time_passed(now=40.1) == ends
    session.hello("a", now=50.0)
    assert session.time_passed(now=100.0) == ()
    session.leave("a", now=100.0)
    assert session.time_passed(now=130.0) == ()
    assert session.time_passed(now=130.1) == ends


def test_the_wait_begins_when_silence_is_noticed():
    session = TaskSession("ps 0", silence_timeout_s=60.0, now=0.0, wait_timeout_s=30.0)
    session.hello("a", now=0.0)
    assert session.time_passed(now=500.0) == drops("a", SILENT)
    assert session.time_passed(now=530.0) == ()
    assert session.time_passed(now=530.1) == (EndTask("no coordinator has connected for 30 s"),)


def test_a_task_ends_with_its_coordinator_if_it_should():
    session = TaskSession("ps 0", silence_timeout_s=60.0, now=0.0, ends_with_coordinator=True)
    assert session.time_passed(now=1e9) == ()  # it still waits for the first one
    session.hello("a", now=1e9)
    session.hello("b", now=1e9)
    assert session.time_passed(now=1e9) == ()  # another one took over
    assert session.time_passed(now=math.inf) == (DropWork("b", SILENT), EndTask("lost its coordinator"))


def test_a_task_whose_first_work_failed_waits_for_another_coordinator():
    session = TaskSession("ps 0", silence_timeout_s=60.0, now=0.0, ends_with_coordinator=True)
    session.hello("a", now=1.0)
    session.work_failed()
    assert session.time_passed(now=100.0) == ()
