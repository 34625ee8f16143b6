"""Heartbeats of parameter servers, and a server that goes on with its snapshot."""

import pytest
from scripted_servers import ScriptedJob, kept

from checks import message
from replicax._src.vocabulary.errors import InvalidArgumentError, StaleCoordinatorError, UnavailableError


def asked(job, index, *ops):
    return [op for op, _ in job.ps[index].asked if op in ops]


def test_options_that_do_not_fit_the_servers_are_refused():
    message(InvalidArgumentError, lambda: ScriptedJob(how="stop"), "'stop'", "'continue' or 'rewind'")
    message(
        InvalidArgumentError, lambda: ScriptedJob(how="rewind", copies=True), "replication=2", "'continue'"
    )
    some = (60.0, None)
    ScriptedJob(intervals_s=some)
    message(InvalidArgumentError, lambda: ScriptedJob(intervals_s=some, how="rewind"), "ps 1 takes none")


def test_job_goes_on_while_servers_answer():
    job = ScriptedJob()
    job.ps[0].num_updates = 7
    job.run(10.0)
    assert job.may_run
    assert 18 <= sum(action.op == "heartbeat" for action in job.sent) <= 22
    assert job.servers.statistics()["ps"]["ps 0"] == {
        "connected": True,
        "restarts": 0,
        "statistics": job.ps[0].statistics,
    }
    assert job.servers.statistics()["replication"] is None
    assert job.servers.primaries_for_workers() is None


def test_server_without_snapshots_that_refuses_connections_breaks_the_job():
    job = ScriptedJob(intervals_s=(None, None))
    job.run(1.5)
    job.ps[1].is_down = True
    assert job.run_until(lambda: job.broken, 3.0)
    error = job.broken["ps 1"]
    assert isinstance(error, UnavailableError)
    assert "ps 1 is lost" in str(error)
    assert "snapshot_dir" in str(error)
    assert not job.servers.statistics()["ps"]["ps 1"]["connected"]


def test_silent_server_is_waited_for_and_goes_on():
    job = ScriptedJob(intervals_s=(None, None))
    job.run(1.5)
    job.ps[1].is_silent = True
    job.run(30.0)
    assert job.paused == {"ps 1"}
    assert not job.broken
    assert "ps 1 does not answer. Waiting up to 60 s for it" in job.log_text
    job.ps[1].is_silent = False
    assert job.run_until(lambda: job.may_run, 5.0)
    assert job.servers.statistics()["ps"]["ps 1"]["connected"]


def test_silent_server_breaks_the_job_after_its_time_and_mends_it():
    job = ScriptedJob(intervals_s=(None, None))
    job.ps[1].is_silent = True
    assert job.run_until(lambda: "ps 1" in job.broken, 80.0)
    assert 60.0 <= job.now <= 70.0
    assert "The coordinator waited 60 s for it." in str(job.broken["ps 1"])
    job.ps[1].is_silent = False
    assert job.run_until(lambda: job.may_run, 5.0)


@pytest.mark.parametrize("copies", [False, True])
def test_silent_server_that_loses_a_connection_is_still_waited_for(copies):
    job = ScriptedJob(intervals_s=(None, None), copies=copies)
    if copies:  # so that only this server has the variables
        job.ps[0].is_down = True
        job.run(5.0)
        job.ps[0].is_down = False
    job.ps[1].is_silent = True
    job.run(5.0)
    num_sent = len(job.sent)
    job.ps[1].is_silent, job.ps[1].is_down = False, True
    assert job.run_until(lambda: "ps 1" in [action.task for action in job.sent[num_sent:]], 5.0)
    job.run(0.05)  # this heartbeat finds no connection
    job.ps[1].is_silent, job.ps[1].is_down = True, False
    job.run(20.0)
    assert not job.broken
    job.ps[1].is_silent, job.ps[1].is_down = False, True  # it ends
    assert job.run_until(lambda: "ps 1" in job.broken, 10.0)


def test_server_that_has_ended_the_session_breaks_the_job():
    job = ScriptedJob()
    job.ps[0].refuses["heartbeat"] = StaleCoordinatorError("It serves another coordinator.")
    assert job.run_until(lambda: "ps 0" in job.broken, 3.0)
    job.run(5.0)
    assert asked(job, 0, "hello") == []


def test_failed_function_pauses_the_job_until_the_server_answers():
    job = ScriptedJob()
    job.run(1.5)
    num_sent = len(job.sent)
    assert job.servers.note_failure("ps 1", job.now)
    assert job.paused == {"ps 1"}
    job.run(0.1)
    assert [action.task for action in job.sent[num_sent:]] == ["ps 1"]
    assert job.may_run
    assert job.servers.note_failure(None, job.now)
    assert job.paused == {"ps 0", "ps 1"}
    job.run(0.1)
    assert job.may_run


def test_failure_during_a_heartbeat_has_another_one_sent_at_once():
    job = ScriptedJob()
    job.run(0.005)
    job.servers.note_failure("ps 1", job.now)
    job.run(0.05)
    assert [action.task for action in job.sent].count("ps 1") == 2


def test_without_snapshots_a_failed_function_does_not_pause():
    job = ScriptedJob(intervals_s=(None, None))
    assert not job.servers.note_failure("ps 1", job.now)
    assert job.may_run


def test_snapshot_that_fails_is_logged_once():
    job = ScriptedJob()
    statistics = {"updates": 1, "snapshot_error": "the disk is full"}
    job.ps[0]._heartbeat = lambda header: {"instance": job.ps[0].instance, "statistics": statistics}
    job.run(5.0)
    assert job.log_text.count("continues without a new snapshot, and will try again: the disk is full") == 1


# --- a server continues with its snapshot ---------------------------------------------------------------


def test_server_continues_with_its_snapshot():
    job = ScriptedJob()
    job.names = [f"w{n}" for n in range(7)]
    job.ps[0].num_updates, job.next_number = 8, 20
    job.run(1.5)
    job.ps[0].num_updates = 0
    job.ps[0].restarts(kept(age_s=14.2, applied=[4, 6]))
    assert job.run_until(lambda: job.servers.instances[0] == job.ps[0].instance, 3.0)
    job.run(3.0)
    assert job.may_run
    assert [each for each in job.operations if each[0] == "restored"] == [("restored", (0, ("w",)))]
    assert "14 s before: about 5 updates" in job.log_text
    assert "w0, w1, w2, w3, w4 and 2 more" in job.log_text
    assert "of 20 scheduled functions" in job.log_text
    assert "the first 4, and some of the next 2" in job.log_text
    assert job.servers.statistics()["ps"]["ps 0"]["restarts"] == 1


def test_updates_that_are_lost_once_are_not_counted_again():
    job = ScriptedJob()
    job.ps[0].num_updates = 8
    job.run(1.5)
    for _ in range(2):
        job.ps[0].num_updates = 3
        job.ps[0].restarts(kept())
        assert job.run_until(lambda: job.servers.instances[0] == job.ps[0].instance, 3.0)
    assert "about 5 updates" in job.lines[0]
    assert "about 0 updates" in job.lines[1]


@pytest.mark.parametrize(
    ("restored", "missing", "says"),
    [
        (None, [], "no snapshot of this coordinator's session"),
        (kept(incarnation="another"), [], "no snapshot of this coordinator's session"),
        (kept(), ["dense/kernel"], "dense/kernel"),
    ],
)
def test_server_that_returns_without_the_variables_is_lost(restored, missing, says):
    job = ScriptedJob()
    job.run(1.5)
    job.missing[0] = missing
    job.ps[0].restarts(restored)
    assert job.run_until(lambda: "ps 0" in job.broken, 3.0)
    assert says in str(job.broken["ps 0"])
    job.run(5.0)
    assert job.servers.instances[0] == "0.0"
    assert not job.may_run
    job.missing.clear()
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: job.may_run, 5.0)


def test_server_without_snapshots_that_restarts_breaks_the_job():
    job = ScriptedJob(intervals_s=(None, None))
    job.run(1.5)
    job.ps[0].restarts()
    assert job.run_until(lambda: "ps 0" in job.broken, 3.0)
    assert "its variables are lost. With snapshot_dir" in str(job.broken["ps 0"])


def test_server_that_restarts_before_its_first_heartbeat_is_another_process():
    job = ScriptedJob()
    job.ps[0].restarts()
    assert job.run_until(lambda: "ps 0" in job.broken, 3.0)
    assert "no snapshot of this coordinator's session" in str(job.broken["ps 0"])


def test_server_that_restarts_while_its_programs_are_sent_is_resumed_again():
    job = ScriptedJob()
    job.run(1.5)
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: ("names_on", (0,)) in job.operations, 3.0)
    before = job.ps[0].instance
    job.ps[0].restarts(kept(keys=["w", "v"]))
    assert job.run_until(lambda: job.servers.instances[0] == job.ps[0].instance, 3.0)
    assert before != job.ps[0].instance
    assert job.operations[-2] == ("restored", (0, ("w", "v")))
    assert job.log_text.count("restarted from its last snapshot") == 1


def test_answer_that_comes_after_a_heartbeat_of_the_next_process_is_not_accepted():
    job = ScriptedJob()
    job.run(1.5)
    zero = job.ps[0]
    zero.restarts(kept())
    assert job.run_until(lambda: ("names_on", (0,)) in job.operations, 3.0)
    zero.late["status"] = 3.0
    num_asked = len(asked(job, 0, "status"))
    assert job.run_until(lambda: len(asked(job, 0, "status")) > num_asked, 1.0)
    zero.restarts(kept(keys=["w", "v"]))
    zero.late.clear()
    assert job.run_until(lambda: job.servers.instances[0] != "0.0", 10.0)
    assert job.servers.instances[0] == zero.instance
    assert job.operations[-2] == ("restored", (0, ("w", "v")))


def test_job_stays_paused_while_a_restarted_server_is_resumed():
    job = ScriptedJob()
    job.run(1.5)
    job.ps[0].restarts(kept())
    job.ps[0].delays["status"] = 5.0
    assert job.run_until(lambda: "ps 0" in job.paused, 10.0)
    assert not job.run_until(lambda: job.may_run, 9.0)
    assert job.run_until(lambda: job.may_run, 4.0)


def test_restarted_server_that_never_says_what_it_has_breaks_the_job_at_last():
    job = ScriptedJob(reconnect_s=100.0)
    job.run(1.5)
    job.ps[0].restarts(kept())
    job.ps[0].refuses["status"] = UnavailableError("It is busy.")
    job.run(50.0)
    assert job.paused == {"ps 0"}
    assert job.run_until(lambda: "ps 0" in job.broken, 100.0)


def test_close_while_a_server_is_resumed_sends_nothing_more():
    job = ScriptedJob()
    job.run(1.5)
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: ("status", None) in job.ps[0].asked, 3.0)
    job.close()
    job.run(30.0)
    assert job.sent == []
    assert job.procedures.wake_at is None
