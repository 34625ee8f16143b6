"""Epochs of snapshots, and the return of all servers to the last one, in orders that real servers rarely show."""

import itertools

import pytest
from scripted_servers import Lost, ScriptedJob, kept

from replicax._src.vocabulary.errors import UnavailableError


def rewinding(**options):
    """A job that has taken its first epoch, with 3 functions."""
    job = ScriptedJob(how="rewind", **options)
    job.num_finished = 3
    assert job.run_until(lambda: last(job) == 1, 5.0)
    job.run(1.5)
    return job


def last(job):
    return job.servers._together.last


def ops(server, *names):
    return [each for each in server.asked if each[0] in names]


def have_gone_back(job):
    """True if functions run and all servers are at the last epoch."""
    return job.may_run and job.servers.instances == [ps.instance for ps in job.ps]


def run_and_watch(job, seconds, is_so):
    """Runs, and checks that functions run only while the accepted processes are all that there are.

    A restart is unknown until a heartbeat, so servers of the script restart only while the job is paused.
    """

    def is_over():
        if job.may_run:
            assert job.servers.instances == [ps.instance for ps in job.ps]
        return is_so()

    return job.run_until(is_over, seconds)


# --- epochs -----------------------------------------------------------------------------------------------


def test_servers_take_snapshots_together_soon_after_variables_are_made_and_then_at_intervals():
    job = rewinding()
    assert [ops(ps, "snapshot") for ps in job.ps] == [[("snapshot", 1)]] * 2
    job.run(25.0)
    assert last(job) == 1
    assert job.run_until(lambda: last(job) == 2, 10.0)
    job.num_made = 2
    assert job.run_until(lambda: last(job) == 3, 5.0)
    assert job.servers.next_epoch == 4
    assert job.may_run


def test_the_next_job_of_a_session_goes_back_to_an_epoch_of_the_last_one_until_it_has_its_own():
    job = ScriptedJob(how="rewind", last_epoch=4)
    for server in job.ps:
        server.epochs[4] = server.instance
    job.ps[1].restarts(kept())
    assert job.run_until(lambda: "went back to the snapshots of epoch 4" in job.log_text, 10.0)
    assert not job.broken
    assert job.servers.last_epoch == 4
    assert job.run_until(lambda: job.servers.last_epoch == 5 and have_gone_back(job), 5.0)
    assert ("snapshot", 5) in job.ps[0].asked


def test_no_snapshot_is_taken_before_all_functions_and_rounds_have_ended():
    job = ScriptedJob(how="rewind")
    job.num_in_flight = job.num_rounds = 1
    job.run(5.0)
    assert not job.may_run
    job.num_in_flight = 0
    job.run(5.0)
    assert ops(job.ps[0], "snapshot") == []
    job.num_rounds = 0
    assert job.run_until(lambda: last(job) == 1, 5.0)


def test_no_snapshot_is_taken_before_a_function_of_a_lost_worker_has_ended_on_another():
    """The lost worker may have changed one server, and may change another between the snapshots of both."""
    job = rewinding()
    job.num_in_flight = 1
    assert job.run_until(lambda: not job.may_run, 60.0)
    job.num_in_flight, job.has_half_done = 0, True
    assert job.run_until(lambda: job.may_run, 1.0), "or no worker takes it"
    for job.num_in_flight in (0, 1, 0):
        job.run(70.0)
        assert job.may_run
    assert last(job) == 1
    job.has_half_done = False
    assert job.run_until(lambda: last(job) == 2, 1.0)


def test_number_of_an_epoch_that_was_given_up_is_not_used_again():
    job = rewinding()
    job.ps[1].script["snapshot"] = raise_lost
    job.run(40.0)
    assert last(job) == 1
    del job.ps[1].script["snapshot"]
    assert job.run_until(lambda: last(job) > 1, 40.0)
    numbers = [n for _, n in ops(job.ps[0], "snapshot")]
    assert len(numbers) == len(set(numbers))
    assert last(job) not in numbers[:-1]
    assert [n for _, n in ops(job.ps[1], "snapshot")][-1] == last(job)


def raise_lost(server):
    raise Lost


def test_server_whose_snapshot_failed_is_asked_first_the_next_time():
    job = rewinding()
    job.ps[1].refuses["snapshot"] = OSError("No room.")
    assert job.run_until(
        lambda: "no common snapshot of epoch 2 yet; trying again: No room." in job.log_text, 40.0
    )
    num = [len(ops(ps, "snapshot")) for ps in job.ps]
    job.run(70.0)
    assert len(ops(job.ps[0], "snapshot")) == num[0]
    assert len(ops(job.ps[1], "snapshot")) > num[1]
    assert job.log_text.count("no common snapshot") == 1


def test_all_can_go_back_although_servers_fail_by_turns_to_write_later_epochs():
    job = rewinding()
    turns = itertools.count()

    def fail_each_second_time(server):
        if next(turns) % 2:
            raise OSError("No room.")

    for ps in job.ps:
        ps.script["snapshot"] = fail_each_second_time
    job.run(300.0)
    assert last(job) == 1
    assert all(len(ps.epochs) == 3 for ps in job.ps)
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: have_gone_back(job) and "went back" in job.log_text, 60.0)
    assert "went back to the snapshots of epoch 1" in job.log_text


def test_lost_answer_to_status_is_asked_for_once_more():
    job = rewinding()
    losses = [Lost, None, Lost, None]

    def lose_some(server):
        if losses and losses.pop(0) is not None:
            raise Lost

    job.ps[1].script["status"] = lose_some
    assert job.run_until(lambda: last(job) == 2, 40.0)
    assert losses == []


@pytest.mark.parametrize("index", [0, 1])
def test_snapshot_of_a_server_that_restarts_before_it_is_no_epoch(index):
    job = rewinding()
    job.ps[index].script["snapshot"] = lambda ps: ps.restarts(kept())
    assert job.run_until(lambda: len(ops(job.ps[index], "snapshot")) == 2, 40.0)
    job.ps[index].script.clear()
    assert run_and_watch(job, 60.0, lambda: have_gone_back(job))
    assert last(job) == 1
    assert ops(job.ps[index], "restore")[0] == ("restore", 1)


def test_snapshot_of_a_server_that_restarts_after_it_is_no_epoch():
    job = rewinding()
    job.ps[1].script["snapshot"] = lambda ps: job.ps[0].restarts(kept())
    assert job.run_until(lambda: len(ops(job.ps[1], "snapshot")) == 2, 40.0)
    job.ps[1].script.clear()
    assert run_and_watch(job, 60.0, lambda: have_gone_back(job))
    assert last(job) == 1


def test_snapshot_of_a_host_that_vanishes_is_given_up_when_heartbeats_say_so():
    job = rewinding()
    job.ps[0].delays["snapshot"] = 1.0
    assert job.run_until(lambda: getattr(job.sent[-1], "op", "") == "snapshot", 40.0)
    job.ps[0].is_silent = True
    began = job.now
    assert job.run_until(lambda: ("ps", "together") not in job.paused, 60.0)
    assert job.now - began < 15.0
    job.ps[0].delays.clear()
    job.ps[0].is_silent = False
    assert job.run_until(lambda: last(job) == 3, 60.0)


# --- back to an epoch -----------------------------------------------------------------------------------------


def test_servers_that_go_back_learn_which_functions_have_ended():
    """A lost worker may still push for one of these, to one server and not to another."""
    job = rewinding()
    job.next_number, job.unfinished = 20, [12, 15]
    job.ps[1].restarts(kept())
    assert job.run_until(lambda: have_gone_back(job), 60.0)
    assert [ps.ended for ps in job.ps] == [(20, [12, 15])] * 2


def test_all_go_back_to_the_last_epoch():
    job = rewinding()
    job.num_finished = 10
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: not job.may_run, 3.0)
    assert run_and_watch(job, 10.0, lambda: have_gone_back(job))
    assert [ops(ps, "restore") for ps in job.ps] == [[("restore", 1)]] * 2
    assert [each for each in job.operations if each[0] == "restored"] == [
        ("restored", (0, ("w",))),
        ("restored", (1, ("w",))),
    ]
    assert (
        "ps 0 restarted, so all parameter servers went back to the snapshots of epoch 1, which they took together: "
        "the work of 7 scheduled functions that ended since is undone." in job.log_text
    )
    job.run(5.0)
    assert have_gone_back(job)
    job.num_finished = 12
    job.ps[1].restarts(kept())
    assert job.run_until(lambda: "the work of 2 scheduled functions" in job.log_text, 10.0)
    assert job.run_until(lambda: last(job) == 2, 60.0)


def test_no_server_goes_back_while_a_function_runs():
    job = rewinding()
    job.num_in_flight = 1
    job.ps[0].restarts(kept())
    job.run(10.0)
    assert ops(job.ps[1], "restore") == []
    job.num_in_flight = 0
    assert run_and_watch(job, 10.0, lambda: have_gone_back(job))


def test_servers_go_back_although_a_round_waits():
    job = rewinding()
    job.num_rounds = 1
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: not job.may_run, 3.0)
    assert run_and_watch(job, 10.0, lambda: have_gone_back(job))


def test_servers_without_a_common_snapshot_cannot_go_back():
    job = ScriptedJob(how="rewind")
    job.num_made = 0
    job.run(1.5)
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: "ps 0" in job.broken, 3.0)
    assert "no common snapshot to go back to" in str(job.broken["ps 0"])


def test_server_without_a_snapshot_of_the_session_breaks_the_job_until_it_has_one():
    job = rewinding()
    job.ps[0].restarts(None)
    assert job.run_until(lambda: "ps 0" in job.broken, 3.0)
    assert "no snapshot of this coordinator's session" in str(job.broken["ps 0"])
    job.run(10.0)
    assert ops(job.ps[1], "restore") == []
    job.ps[0].restarts(kept())
    assert run_and_watch(job, 20.0, lambda: have_gone_back(job))


def test_server_that_cannot_go_back_breaks_the_job_and_no_function_runs():
    job = rewinding()
    kept_epochs, job.ps[1].epochs = job.ps[1].epochs, {}
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: "ps 1" in job.broken, 10.0)
    assert "ps 1 is another process than before: it cannot go back to the snapshot of epoch 1" in str(
        job.broken["ps 1"]
    )
    assert not job.run_until(lambda: "ps 1" not in job.broken, 30.0)
    job.ps[1].epochs = kept_epochs
    assert run_and_watch(job, 30.0, lambda: have_gone_back(job))


def test_variables_that_are_newer_than_the_epoch_break_the_job():
    job = rewinding()
    job.missing[1] = ["dense/kernel"]
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: "ps 1" in job.broken, 10.0)
    assert "dense/kernel" in str(job.broken["ps 1"])


def test_two_servers_that_restart_at_once_go_back_together():
    job = rewinding(num_servers=3, intervals_s=(60.0, 60.0, 60.0))
    job.ps[0].restarts(kept())
    job.ps[2].restarts(kept())
    job.ps[2].delays["heartbeat"] = 0.7
    assert job.run_until(lambda: not job.may_run, 3.0)
    assert run_and_watch(job, 20.0, lambda: have_gone_back(job))
    job.run(5.0)
    assert have_gone_back(job)
    assert "went back to the snapshots of epoch 1" in job.log_text


@pytest.mark.parametrize("op", ["status", "restore", "heartbeat"])
@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize("restarting", [0, 1])
@pytest.mark.parametrize("asked", [0, 1])
def test_server_that_restarts_in_the_middle_has_all_go_back_again(op, when, restarting, asked):
    job = rewinding()
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: not job.may_run, 3.0)
    times = iter(range(1, 1000))

    def restart_once(server):
        if next(times) == when and not job.may_run:
            job.ps[restarting].restarts(kept())

    job.ps[asked].script[op] = restart_once
    if op == "status" and restarting != asked:  # it may restart after it was last asked, and nobody knows yet
        assert job.run_until(lambda: have_gone_back(job), 60.0)
    else:
        assert run_and_watch(job, 60.0, lambda: have_gone_back(job))
    job.ps[asked].script.clear()
    job.run(10.0)
    assert have_gone_back(job)
    assert all(ps.restored == kept() and ops(ps, "restore") for ps in job.ps)


def test_server_that_restarts_while_the_restore_of_another_runs_has_all_go_back_again():
    job = rewinding()
    job.ps[0].delays["restore"] = 5.0
    job.ps[0].restarts(kept())
    assert job.run_until(
        lambda: "restore" in [action.op for action in job.sent if hasattr(action, "op")], 10.0
    )
    job.run(1.0)
    job.ps[1].restarts(kept())
    assert run_and_watch(job, 60.0, lambda: have_gone_back(job))
    assert ops(job.ps[1], "restore")


def test_answer_of_a_restore_that_is_lost_has_all_go_back_again():
    job = rewinding()
    answers = [Lost]

    def lose_the_first(server):
        if answers:
            server._restore({"epoch": 1, "stop": 0, "unfinished": []})
            raise answers.pop()

    job.ps[1].script["restore"] = lose_the_first
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: not answers, 10.0)
    assert run_and_watch(job, 30.0, lambda: have_gone_back(job))
    assert len(ops(job.ps[0], "restore")) == 2


def test_restore_of_a_host_that_vanishes_is_given_up_when_heartbeats_say_so():
    job = rewinding()
    job.ps[1].delays["restore"] = 1.0
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: ops(job.ps[0], "restore"), 10.0)
    job.ps[1].is_silent = True
    job.run(20.0)
    job.ps[1].delays.clear()
    job.ps[1].is_silent = False
    began = job.now
    assert run_and_watch(job, 30.0, lambda: have_gone_back(job))
    assert job.now - began < 10.0


def test_restore_that_a_process_has_taken_with_it_is_given_up():
    job = rewinding()
    job.ps[1].delays["restore"] = 500.0
    job.ps[0].restarts(kept())
    restores = lambda: [each.task for each in job.sent if getattr(each, "op", "") == "restore"]  # noqa: E731
    assert job.run_until(lambda: "ps 1" in restores(), 10.0)
    job.ps[1].delays.clear()
    job.ps[1].restarts(kept())
    assert run_and_watch(job, 40.0, lambda: have_gone_back(job))


def test_server_that_restarts_after_its_last_answer_has_all_go_back_again_if_a_heartbeat_says_so():
    job = rewinding()
    job.ps[1].delays["status"] = 4.0
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: ops(job.ps[0], "restore"), 10.0)
    num = len(ops(job.ps[0], "status"))
    assert job.run_until(lambda: len(ops(job.ps[0], "status")) > num, 10.0)
    job.ps[0].restarts(kept())
    assert run_and_watch(job, 60.0, lambda: have_gone_back(job))
    assert len(ops(job.ps[0], "restore")) == 2


def test_nothing_goes_back_while_a_restarted_server_has_no_snapshot():
    job = rewinding()
    job.ps[0].restarts(kept())
    job.ps[1].restarts(None)
    assert job.run_until(lambda: "ps 1" in job.broken, 10.0)
    job.run(10.0)
    assert ops(job.ps[0], "restore") == []


def test_late_heartbeat_of_the_earlier_process_does_not_resume_the_job():
    job = rewinding()
    first = job.ps[0].instance
    job.num_in_flight = 1
    job.ps[0].restarts(kept())
    assert job.run_until(lambda: not job.may_run and ops(job.ps[0], "status")[-1:], 5.0)
    job.run(2.0)
    job.ps[0]._heartbeat = lambda header: {"instance": first, "statistics": {}}
    assert not job.run_until(lambda: job.may_run, 5.0)


def test_loss_of_another_server_while_servers_go_back_is_waited_for():
    job = rewinding(reconnect_s=1000.0)
    job.ps[1].is_down = True
    job.run(1.5)
    job.ps[0].restarts(kept())
    job.run(60.0)
    assert not job.may_run
    assert not job.broken
    assert ops(job.ps[0], "restore") == []
    job.ps[1].restarts(kept())
    assert run_and_watch(job, 30.0, lambda: have_gone_back(job))


@pytest.mark.parametrize("op", ["status", "restore"])
def test_close_while_servers_go_back_sends_nothing_more(op):
    job = rewinding()
    job.ps[0].restarts(kept())
    num = len(ops(job.ps[0], op))
    assert job.run_until(lambda: len(ops(job.ps[0], op)) > num, 10.0)
    job.close()
    job.run(700.0)
    assert job.sent == []
    assert job.procedures.wake_at is None


def test_close_while_snapshots_are_taken_sends_nothing_more():
    job = ScriptedJob(how="rewind")
    assert job.run_until(lambda: ops(job.ps[0], "snapshot"), 10.0)
    job.close()
    job.run(700.0)
    assert job.sent == []


def test_job_that_breaks_in_the_middle_of_an_epoch_takes_none():
    job = rewinding()
    job.ps[0].script["snapshot"] = lambda ps: job.broke(UnavailableError("All workers are lost."), "workers")
    job.run(40.0)
    assert last(job) == 1
    assert ops(job.ps[1], "snapshot") == [("snapshot", 1)]
