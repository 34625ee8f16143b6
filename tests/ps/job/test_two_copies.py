"""Two copies of each group: servers that are lost, replaced, cut off, or come back with snapshots, in every order."""

import pytest
from scripted_servers import ScriptedJob, part

from replicax._ps.client.groups import Groups
from replicax._ps.store.group_rules import View
from replicax._ps.store.log import Position
from replicax._src.vocabulary.errors import StaleCoordinatorError, UnavailableError


def copied(**options):
    """A job that knows all roles."""
    job = ScriptedJob(copies=True, intervals_s=(60.0, 60.0), **options)
    job.run(2.5)
    for server in job.ps:
        for held in server.groups.values():
            held.update(position=[1, 60], updates=60)
    job.run(2.5)
    return job


def snapshot(position, *groups, **what):
    """A snapshot of this session on a server, and the server's copies of the groups."""
    described = {str(group): {"position": list(position), "keys": ["w"], **what} for group in groups}
    return {
        "restored": {"incarnation": "me", "groups": described},
        "groups": {str(group): part(position, updates=position[1]) for group in groups},
    }


def caught_up(job):
    """Has all joining backups be in sync."""
    for server in job.ps:
        for group, held in server.groups.items():
            if held["backup"] == "joining":
                held["backup"] = "in sync"
                other = next(ps for ps in job.ps if ps is not server)
                other.groups[group].update(position=held["position"], updates=held["updates"])


def tells(job):
    """The views that were sent, each with the name of the server."""
    return [(each.task, each.header["view"]) for each in job.sent if getattr(each, "op", "") == "group"]


def ops(server, *names):
    return [op for op, _ in server.asked if op in names]


def test_job_goes_on_while_both_servers_answer():
    job = copied()
    assert job.may_run
    assert job.servers.statistics()["replication"] == {"primaries": [0, 1], "unprotected": [], "lost": []}
    assert [view["epoch"] for view in job.servers.primaries_for_workers()] == [1, 1]
    assert job.operations == []
    assert job.lines == []


def test_lost_server_leaves_its_groups_to_the_other():
    job = copied()
    job.ps[1].is_down = True
    assert job.run_until(lambda: job.operations, 5.0)
    assert job.groups.primaries == [0, 0]
    assert job.operations == [("use_primaries", (job.groups.views,))]
    assert job.num_told_workers == 1
    assert job.ps[0].views[1]["primary"] == 0
    assert (
        "ps 1 is lost. No acknowledged update is lost: the other copy of its variables is used, on ps 0. The "
        in (job.log_text)
    )
    assert job.may_run


def test_restarted_server_joins_and_is_told_backup_first():
    job = copied()
    job.ps[1].restarts()
    assert job.run_until(lambda: job.groups.views[0].backup == 1 and job.groups.views[1].backup == 1, 10.0)
    job.run(2.0)
    assert job.servers.instances[1] == job.ps[1].instance
    assert "ps 1 restarted. No acknowledged update is lost" in job.log_text
    for group in (0, 1):
        joining = [task for task, view in tells(job) if view["group"] == group and view["is_joining"]]
        assert joining[:2] == ["ps 1", "ps 0"]
    assert all(not view.since for view in job.groups.views)
    caught_up(job)
    job.run(3.0)
    assert job.servers.statistics()["replication"]["unprotected"] == []
    assert "All variables are on two parameter servers again." in job.log_text
    assert job.may_run


def test_server_that_missed_a_view_gets_it_after_its_next_heartbeat():
    job = copied()
    job.ps[0].refuses["group"] = UnavailableError("It is busy.")
    job.ps[1].is_down = True
    job.run(10.0)
    assert job.ps[0].views[1]["primary"] == 1
    job.ps[0].refuses.clear()
    job.run(2.0)
    assert job.ps[0].views[1]["primary"] == 0


def test_server_cut_off_for_long_becomes_a_backup_again():
    job = copied()
    one = job.ps[1]
    one.is_silent = True
    assert job.run_until(lambda: job.groups.primaries == [0, 0], 20.0)
    one.refuses["heartbeat"] = StaleCoordinatorError("Its coordinator was silent.")
    one.is_silent = False

    def reclaimed(server):
        server.restarts()
        server.refuses.clear()
        server.script.clear()

    one.script["hello"] = reclaimed
    assert job.run_until(lambda: all(view.backup == 1 and view.is_joining for view in job.groups.views), 20.0)
    assert not job.broken


@pytest.mark.parametrize("first_back", [0, 1])
def test_silent_servers_of_a_group_keep_it_until_one_of_them_is_back(first_back):
    job = ScriptedJob(copies=True, intervals_s=(None, None))
    job.run(1.5)
    job.ps[0].is_silent = True
    job.run(1.5)
    job.ps[1].is_silent = True
    job.run(40.0)
    assert job.groups.primaries == [0, 1]
    assert job.groups.unprotected == []
    assert not job.may_run
    job.ps[first_back].is_silent = False
    assert job.run_until(lambda: job.groups.primaries == [first_back] * 2, 5.0)
    assert job.run_until(lambda: job.may_run, 5.0)
    assert f"ps {1 - first_back} is lost. No acknowledged update is lost" in job.log_text
    job.ps[1 - first_back].is_silent = False
    assert job.run_until(lambda: all(view.backup == 1 - first_back for view in job.groups.views), 10.0)


def test_servers_that_are_silent_together_for_a_minute_break_the_job():
    job = ScriptedJob(copies=True, intervals_s=(None, None))
    job.ps[0].is_silent = job.ps[1].is_silent = True
    assert job.run_until(lambda: job.groups.lost, 55.0)
    assert job.now > 45.0
    assert job.run_until(lambda: job.broken, 20.0)


def test_server_that_has_ended_is_replaced_by_one_that_is_silent():
    job = ScriptedJob(copies=True, intervals_s=(None, None))
    job.run(1.5)
    job.ps[1].is_silent = True
    job.run(1.0)
    job.ps[0].is_down = True
    assert job.run_until(lambda: job.groups.primaries == [1, 1], 5.0)
    job.run(20.0)
    job.ps[1].is_silent = False
    assert job.run_until(lambda: job.may_run, 5.0)


def test_unprotected_server_that_is_lost_breaks_a_job_without_snapshots():
    job = ScriptedJob(copies=True, intervals_s=(None, None))
    job.run(1.5)
    job.ps[1].is_down = True
    job.run(5.0)
    job.ps[0].is_down = True
    assert job.run_until(lambda: job.broken, 5.0)
    assert "ps 0 is lost, and ps 1, which should have the other copy of its variables" in str(
        job.broken["ps 0"]
    )
    job.ps[0].restarts()
    job.ps[1].restarts()
    job.run(20.0)
    assert not job.may_run


def test_copy_that_the_primary_drops_is_made_again():
    job = copied()
    job.ps[0].groups["0"].update(backup="lost", error="It did not answer.")
    assert job.run_until(lambda: job.groups.views[0].is_joining, 5.0)
    assert "The variables of ps 0 are on ps 0 alone for now. The copy on ps 1 is dropped" in job.log_text
    assert "It did not answer." in job.log_text


# --- both servers of a group are lost ----------------------------------------------------------------------


def lose_both(job, gap_s=5.0):
    job.ps[1].is_down = True
    job.run(gap_s)
    job.ps[0].is_down = True
    assert job.run_until(lambda: job.groups.lost == [0, 1], 10.0)
    assert not job.may_run
    assert not job.broken


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("gap_s", [0.0, 0.3, 2.0, 20.0])
@pytest.mark.parametrize("lost_apart_s", [0.1, 5.0])
def test_servers_that_return_with_nothing_break_the_job(order, gap_s, lost_apart_s):
    job = copied()
    lose_both(job, lost_apart_s)
    for index in order:
        job.ps[index].restarts()
        job.run(gap_s)
    assert job.run_until(lambda: job.broken, 25.0)
    assert any("should have the other copy of its variables" in str(error) for error in job.broken.values())
    job.run(30.0)
    assert not job.may_run


@pytest.mark.parametrize("gap_s", [0.0, 0.5, 1.5])
def test_servers_that_restart_with_nothing_before_anything_is_missed_break_the_job(gap_s):
    job = copied()
    job.ps[0].restarts()
    job.run(gap_s)
    job.ps[1].restarts()
    assert job.run_until(lambda: job.broken, 25.0)
    job.run(30.0)
    assert not job.may_run


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_lost_groups_resume_from_the_newer_snapshot(order):
    job = copied()
    lose_both(job)
    assert "Lost ps 0, ps 1, which had the variables of ps 0. Waiting up to 3600 s for them" in job.log_text
    job.next_number = 100
    restarts = {0: snapshot((1, 40), 0, 1), 1: snapshot((1, 50), 0, 1, age_s=7.0, applied=[30, 31])}
    for index in order:
        job.ps[index].restarts(**restarts[index])
        job.run(2.0)
    assert job.run_until(lambda: job.may_run, 10.0)
    assert job.groups.primaries == [1, 1]
    assert ("restored", (0, ["w"])) in job.operations
    assert (
        "ps 0, ps 1 restarted. The variables of ps 0 resume from the newest snapshot, on ps 1, taken 7 s before: "
        "about 10 acknowledged updates are lost." in job.log_text
    )
    assert "of 100 scheduled functions they include the updates of the first 30, and some of the next 1" in (
        job.log_text
    )
    assert job.run_until(lambda: all(view.backup == 0 for view in job.groups.views), 10.0)


def test_primary_that_returns_alone_is_used_after_a_minute():
    job = copied()
    lose_both(job)
    job.ps[0].restarts(**snapshot((1, 40), 0, 1))
    job.run(50.0)
    assert not job.may_run
    assert job.run_until(lambda: job.may_run, 20.0)
    assert job.groups.primaries == [0, 0]


def test_servers_that_do_not_return_break_the_job_at_last():
    job = copied(reconnect_s=100.0)
    lose_both(job)
    job.run(80.0)
    assert not job.broken
    assert job.run_until(lambda: job.broken, 60.0)


def test_last_primary_that_was_only_cut_off_goes_on():
    job = copied()
    job.ps[1].is_down = True
    job.run(5.0)
    job.ps[0].is_silent = True
    assert job.run_until(lambda: job.groups.lost == [0, 1], 20.0)
    assert not job.may_run
    job.ps[0].is_silent = False
    assert job.run_until(lambda: job.may_run, 10.0)
    assert job.groups.primaries == [0, 0]


def test_snapshot_that_lacks_variables_breaks_the_job():
    job = copied()
    lose_both(job)
    job.missing[0] = ["dense/kernel"]
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40), 0, 1))
    assert job.run_until(lambda: job.broken, 20.0)
    job.run(20.0)
    assert not job.may_run
    [error] = job.broken.values()
    assert "was taken before these variables were created: dense/kernel" in str(error)


def test_primary_that_is_lost_while_it_resumes_is_waited_for_again():
    job = copied()
    lose_both(job)
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40), 0, 1))
    assert job.run_until(lambda: any(name == "restored" for name, _ in job.operations), 20.0)
    job.ps[0].is_down = job.ps[1].is_down = True
    job.run(20.0)
    assert not job.may_run
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40), 0, 1))
    assert job.run_until(lambda: job.may_run, 20.0)


def test_log_does_not_say_that_nothing_is_lost_while_a_group_resumes_from_a_snapshot():
    job = copied()
    lose_both(job)
    job.operation_s = 5.0
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40), 0, 1))
    assert job.run_until(lambda: any(getattr(each, "operation", "") == "restored" for each in job.sent), 20.0)
    before = len(job.lines)
    job.ps[1].is_down = True
    assert job.run_until(lambda: job.may_run, 60.0)
    assert job.servers.statistics()["ps"]["ps 1"]["connected"] is False
    assert "about 20 acknowledged updates are lost" in job.log_text
    assert "No acknowledged update is lost" not in "\n".join(job.lines[before:])


@pytest.mark.parametrize("how", ["delays", "late"])
@pytest.mark.parametrize("after_s", [0.2, 0.5, 0.8, 1.1, 1.4, 1.7, 2.0, 2.3])
def test_copy_that_is_complete_since_the_last_heartbeat_is_not_taken_for_nothing(how, after_s):
    job = copied()
    job.ps[1].restarts()
    assert job.run_until(lambda: all(view.backup == 1 and view.is_joining for view in job.groups.views), 10.0)
    getattr(job.ps[1], how)["heartbeat"] = 1.9  # it is asked late, or its answer comes late
    job.run(after_s)
    assert not job.broken
    caught_up(job)
    job.ps[0].restarts()
    assert job.run_until(lambda: "which had the variables of ps 0" in job.log_text, 10.0)
    assert job.run_until(lambda: job.may_run, 20.0)
    assert job.groups.primaries == [1, 1]
    assert "about 0 acknowledged updates are lost" in job.log_text


# --- a server is not what it has said ------------------------------------------------------------------------


def test_server_that_restarts_between_status_and_hello_is_not_taken_for_what_it_had():
    job = copied()
    lose_both(job)
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40 + index), 0, 1))
    once = iter([True])

    def restarts_empty(server):
        if next(once, False):
            server.restarts()

    job.ps[1].script["hello"] = restarts_empty
    assert job.run_until(lambda: job.may_run, 30.0)
    assert job.groups.primaries == [0, 0]
    assert all(view["since"] != (1, 41) for _, view in tells(job))


def test_copy_that_is_dropped_after_its_position_was_told_is_not_chosen_again():
    job = copied()
    lose_both(job)
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40 + index), 0, 1))
    one = job.ps[1]

    def drops(server):
        for held in server.groups.values():
            held.update(position=[0, 0], updates=0)

    one.script["group"] = drops
    assert job.run_until(lambda: job.may_run, 30.0)
    assert job.groups.primaries == [0, 0]
    assert sum(view["since"] == (1, 41) and view["group"] == 0 for _, view in tells(job)) == 1


def test_refused_position_is_forgotten_until_the_server_says_again_what_it_has():
    groups = Groups(2)
    groups.server_lost(1)
    groups.server_lost(0)
    groups.returned(0, {"0": {"position": [1, 40]}})
    groups.returned(1, {"0": {"position": [1, 50]}})
    [view] = groups.restart()
    assert view == View(0, 3, 1, None, since=Position(1, 50))
    groups.refused(view)
    [view] = groups.restart()
    assert (view.primary, view.since) == (0, Position(1, 40))


def test_server_that_restarts_twice_at_once_joins_with_what_it_has_at_last():
    job = copied()
    job.ps[1].restarts(**snapshot((1, 50), 0, 1))
    job.run(0.6)
    job.ps[1].restarts()
    assert job.run_until(lambda: job.groups.views[0].is_joining, 10.0)
    job.run(2.0)
    assert job.servers.instances[1] == job.ps[1].instance
    assert job.may_run


def test_hello_that_comes_after_a_heartbeat_of_the_next_process_is_not_accepted():
    job = copied()
    one = job.ps[1]
    one.late["hello"] = 3.0
    one.restarts(**snapshot((1, 50), 0, 1))
    assert job.run_until(lambda: ops(one, "hello"), 3.0)
    one.restarts()
    one.late.clear()
    assert job.run_until(lambda: job.servers.instances[1] != "1.0", 10.0)
    assert job.servers.instances[1] == one.instance


def test_server_that_never_takes_part_again_does_not_stop_the_job():
    job = copied()
    job.ps[1].restarts()
    job.ps[1].refuses["status"] = UnavailableError("It is busy.")
    job.run(100.0)
    assert job.may_run
    assert job.groups.primaries == [0, 0]


def test_close_while_groups_resume_sends_nothing_more():
    job = copied()
    lose_both(job)
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40), 0, 1))
    assert job.run_until(lambda: any(name == "restored" for name, _ in job.operations), 20.0)
    job.close()
    job.run(100.0)
    assert job.sent == []


def joining_one_that_is_silent():
    """A job that tells a server of the view in which it joins, and gets no answer."""
    job = copied()
    job.ps[1].restarts()
    assert job.run_until(lambda: job.servers.instances[1] == job.ps[1].instance, 10.0)
    assert job.run_until(lambda: job.groups.views[0].is_joining, 5.0)
    job.ps[1].is_silent = True
    job.run(0.1)
    assert tells(job)[-1][0] == "ps 1"
    return job


def test_newer_view_does_not_wait_for_a_server_that_does_not_take_the_older():
    job = joining_one_that_is_silent()
    job.servers._copies.lost(job.servers._watches[1], UnavailableError("It is gone."))
    job.run(0.5)
    assert job.ps[0].views[0]["epoch"] == job.groups.views[0].epoch


def test_view_of_a_group_that_is_lost_meanwhile_is_told_to_nobody():
    job = joining_one_that_is_silent()
    num = len(tells(job))
    job.servers._copies.lost(job.servers._watches[0], UnavailableError("It is gone."))
    job.ps[0].is_down = True
    job.run(10.0)
    assert job.groups.lost == [0, 1]
    assert tells(job)[num:] == []


def test_group_that_is_lost_again_while_it_resumes_does_not_go_on():
    job = copied()
    lose_both(job)
    job.operation_s = 20.0
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40), 0, 1))
    is_resumed = lambda: any(getattr(each, "operation", "") == "restored" for each in job.sent)  # noqa: E731
    assert job.run_until(is_resumed, 20.0)
    job.ps[0].is_down = job.ps[1].is_down = True
    job.run(60.0)
    assert "resume from the newest snapshot" not in job.log_text
    assert not job.may_run
    job.operation_s = 0.01
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40), 0, 1))
    assert job.run_until(lambda: job.may_run, 20.0)
    assert job.log_text.count("resume from the newest snapshot") == 2


def test_log_says_what_is_lost_if_the_server_of_a_group_is_silent_while_it_resumes():
    job = copied()
    lose_both(job)
    job.operation_s = 20.0
    for index in (0, 1):
        job.ps[index].restarts(**snapshot((1, 40), 0, 1))
    assert job.run_until(lambda: any(getattr(each, "operation", "") == "restored" for each in job.sent), 20.0)
    job.ps[0].is_silent = job.ps[1].is_silent = True
    job.run(70.0)
    assert job.groups.lost == [0, 1]
    assert "resume from the newest snapshot" not in job.log_text
    job.operation_s = 0.01
    job.ps[0].is_silent = job.ps[1].is_silent = False
    assert job.run_until(lambda: job.may_run, 20.0)
    assert job.log_text.count("about 20 acknowledged updates are lost") == 2


def test_updates_of_a_group_that_are_lost_once_are_not_counted_again():
    job = copied()
    for _ in range(2):
        job.ps[0].is_down = job.ps[1].is_down = True
        assert job.run_until(lambda: job.groups.lost == [0, 1], 10.0)
        for index in (0, 1):
            job.ps[index].restarts(**snapshot((1, 40), 0, 1))
        before = len(job.lines)
        assert job.run_until(lambda: job.may_run, 20.0)
    assert "about 20 acknowledged updates" in job.log_text
    assert "about 0 acknowledged updates" in "\n".join(job.lines[before:])
