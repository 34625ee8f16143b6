"""A job whose tasks tolerate failures goes on when one of them dies. The tasks are small scripts with a status file."""

import os
import re
import signal
import sys
import threading
import time

import pytest

from checks import is_there
from replicax._launch import supervisor
from replicax._launch.supervisor import Supervisor
from replicax._src.cluster.spec import Task
from scripted_job import LIMIT_S, WAITS_UNTIL_ALL_HAVE_JOINED, WORKERS, ScriptedJob

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def job(tmp_path):
    return ScriptedJob(tmp_path)


# --- the others continue ----------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["worker 0", pytest.param("worker 2", marks=pytest.mark.rest)])
def test_killed_task_is_named_and_the_job_succeeds(job, victim):
    code, shown, rows = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + f"""
if task == {victim!r}:
    die()
wait_for_state({victim!r}, "continued without it")
print("trained")
"""
    )
    assert code == 0
    assert f"{victim} died (SIGKILL); the other workers continue.\n" in shown
    assert shown.count("| trained") == 2
    assert "Waiting up to" not in shown
    assert "first to fail" not in shown
    row = rows[-1][victim]
    assert (row.state, row.num_restarts, row.steps_per_s) == ("died (SIGKILL); continued without it", 0, None)


def test_the_others_finish_without_a_task_that_raised_and_the_job_fails_then(job):
    code, shown, _ = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    tell("raised")
    raise ValueError("no such file")
wait_for_state("worker 1", "continued without it")
print("finished")
"""
    )
    assert code == 1
    assert shown.count("| finished") == 2
    note = shown.partition("worker 1 died (exit code 1); the other workers continue. Its last lines:\n")[2]
    assert "    ValueError: no such file\n" in note


def test_a_task_that_has_begun_to_end_is_no_survivor_of_one_that_dies_later(job):
    """All raise, and the first to begin ends its process last."""
    code, shown, _ = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 2":
    wait("worker 0 leaves")
    wait("worker 1 leaves")
tell("raised", left_at=time.monotonic())
note(f"{task} leaves")
if task != "worker 2":
    time.sleep(3)
sys.exit(1)
"""
    )
    assert code == 1
    assert "worker 2 died" not in shown


@pytest.mark.rest
def test_all_but_one_may_die(job):
    code, shown, rows = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    die()
wait_for_state("worker 1", "continued without it")
if task == "worker 0":
    sys.exit(7)
wait_for_state("worker 0", "continued without it")
"""
    )
    assert code == 0
    assert "worker 1 died (SIGKILL)" in shown
    assert "worker 0 died (exit code 7)" in shown
    assert rows[-1]["worker 2"].state == "exited with code 0"


def test_death_is_survived_by_tasks_that_have_finished_before_the_launcher_looks(job, monkeypatch):
    is_decided = Supervisor._is_decided

    def decided_late(self, restarts):
        is_running = any(process.is_running for process in self._processes.values())
        return not is_running and is_decided(self, restarts)

    monkeypatch.setattr(Supervisor, "_is_decided", decided_late)
    code, shown, _ = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    die()
wait_for_state("worker 1", "was killed")
"""
    )
    assert code == 0
    assert "worker 1 died (SIGKILL); the other workers continue." in shown


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the number of the process group")
def test_children_of_a_dead_task_end_with_it_and_its_controller_stays(job):
    """The controller has a session of its own. Nothing is left when the job has ended."""
    code, shown, _ = job.run(
        """
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"]
if task == "worker 0":
    child = subprocess.Popen(SLEEP)
    controller = subprocess.Popen(SLEEP, start_new_session=True)
    note("pids", f"{child.pid} {controller.pid}")

def is_dead(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 0":
    die()
child, controller = open(os.path.join(folder, "pids")).read().split()
while not is_dead(child):
    time.sleep(0.01)
time.sleep(0.2)
print("controller", "ended" if is_dead(controller) else "stays")
"""
    )
    assert code == 0
    assert shown.count("controller stays") == 2
    _, controller = (job.folder / "pids").read_text().split()
    assert not is_there(int(controller))


def test_next_chief_finds_the_curves_of_the_dead_one(job, monkeypatch):
    monkeypatch.delenv("REPLICAX_STATUS_HISTORY", raising=False)
    code, shown, _ = job.run(
        """
if task == "worker 0":
    with open(os.environ["REPLICAX_STATUS_HISTORY"], "w") as file:
        file.write("curves")
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 0":
    die()
wait_for_state("worker 0", "continued without it")
print("found", open(os.environ["REPLICAX_STATUS_HISTORY"]).read())
"""
    )
    assert code == 0
    assert shown.count("found curves") == 2


@pytest.mark.rest
def test_script_may_write_the_status_file_after_its_task_has_joined(job):
    """Its own status does not say whether the task tolerates failures, so what was said before holds."""
    code, shown, _ = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
time.sleep(1.5)
with open(os.environ["REPLICAX_STATUS_FILE"], "w") as file:
    json.dump({"step": 4, "time": time.time(), "state": "training"}, file)
if task == "worker 1":
    die()
wait_for_state("worker 1", "continued without it")
"""
    )
    assert code == 0
    assert "worker 1 died (SIGKILL); the other workers continue." in shown


# --- the job fails ----------------------------------------------------------------------------------------


def test_lost_run_fails_and_all_restart(job):
    """Worker 1 dies, the others continue, and lose the run later."""
    code, shown, rows = job.run(
        """
if task == "worker 1" and restart == 1:
    note("its replacement, which does not enter, is here")
    time.sleep(60)
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if restart == 0 and task == "worker 1":
    die()
if restart == 0:
    wait("its replacement, which does not enter, is here")
    tell(tolerates_failures=False)
    print("too few workers")
    sys.exit(1)
""",
        max_restarts=2,
    )
    assert code == 0
    assert "worker 1 was killed by SIGKILL. The others continue; starting it again: restart 1 of 2." in shown
    assert re.search(
        r"worker [02] exited with code 1, the first to fail after worker 1 died. Its last lines:", shown
    )
    assert "Starting all tasks again: restart 2 of 2." in shown
    assert [row.num_restarts for row in rows[-1].values()] == [1, 2, 1]
    assert {row.state for row in rows[-1].values()} == {"exited with code 0"}


def test_death_that_is_one_too_many_is_the_failure(job, monkeypatch):
    """The others learn within milliseconds that the run is lost, so nobody is said to continue."""
    monkeypatch.setattr(supervisor, "_LOSS_SAID_S", 6.0)  # more than a busy machine needs
    code, shown, _ = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    note("dies")
    die()
wait("dies")
tell(tolerates_failures=False)
time.sleep(0.5)
sys.exit(1)
"""
    )
    assert code == 137
    assert "worker 1 was killed by SIGKILL, the first to fail." in shown
    assert "the other workers continue" not in shown


@pytest.mark.rest
def test_the_last_task_that_dies_ends_the_job(job):
    code, shown, _ = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task != "worker 1":
    wait_for_state("worker 1", "continued without it")
if task == "worker 2":
    wait_for_state("worker 0", "continued without it")
sys.exit({"worker 1": 5, "worker 0": 6, "worker 2": 7}[task])
"""
    )
    assert code == 7
    assert shown.count("the other workers continue") == 2
    assert "worker 2 exited with code 7, the first to fail after worker 0, worker 1 died." in shown


def test_task_that_dies_after_the_others_have_finished_is_a_failure(job):
    """Nobody has continued its work: it may have saved the model."""
    code, shown, _ = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 0":
    wait_for_state("worker 1", "exited with code 0")
    wait_for_state("worker 2", "exited with code 0")
    sys.exit(3)
"""
    )
    assert code == 3
    assert "worker 0 exited with code 3, the first to fail. Its last lines:" in shown


def test_stopped_task_that_the_others_have_finished_without_is_killed(job, monkeypatch):
    monkeypatch.setenv("REPLICAX_SILENCE_TIMEOUT_S", "2.5")
    code, shown, rows = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    os.kill(os.getpid(), signal.SIGSTOP)
if task == "worker 2":  # it finishes later than worker 0, and is not silent
    for _ in range(35):
        tell()
        time.sleep(0.1)
"""
    )
    assert code == 0
    assert shown.count("is killed") == 1
    assert (
        "worker 1 has been silent for 2.5 s, and the other workers have finished without it. It is killed."
        in shown
    )
    assert rows[-1]["worker 1"].state == "died (SIGKILL); continued without it"


def test_task_that_was_given_up_and_wakes_after_the_others_have_finished_is_no_failure(job):
    code, shown, rows = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    wait_for_state("worker 0", "exited with code 0")
    wait_for_state("worker 2", "exited with code 0")
    tell("given up")
    sys.exit("the others continue without this process")
"""
    )
    assert code == 0
    note = "worker 1 exited with code 1: the others had given it up, and have gone on without it. Its last lines:\n"
    assert "    the others continue without this process\n" in shown.partition(note)[2]
    assert rows[-1]["worker 1"].state == "died (exit code 1); continued without it"


def test_task_that_has_begun_to_end_may_be_silent(job, monkeypatch):
    """It may write the last results after it has left the others."""
    monkeypatch.setenv("REPLICAX_SILENCE_TIMEOUT_S", "0.2")
    code, shown, _ = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
tell(left_at=time.monotonic())
note(f"left {task}")
for index in range(3):
    wait(f"left worker {index}")
if task == "worker 1":
    time.sleep(1.5)
    print("written")
"""
    )
    assert code == 0
    assert "is killed" not in shown
    assert "| written" in shown


@pytest.mark.parametrize("said", ["", "tell(tolerates_failures=False)"], ids=["not joined", "today's mode"])
def test_task_that_does_not_tolerate_failures_ends_the_job(job, said):
    code, shown, _ = job.run(
        f"""
if task != "worker 1":
    tell()
    time.sleep(60)
{said}
time.sleep(0.2)
sys.exit(4)
""",
        grace_s=0.1,
    )
    assert code == 4
    assert "worker 1 exited with code 4, the first to fail." in shown


def test_evaluator_that_fails_ends_the_job(job):
    code, shown, _ = job.run(
        """
if task == "evaluator 0":
    time.sleep(0.2)
    sys.exit(9)
tell()
time.sleep(60)
""",
        tasks=[*WORKERS[:2], Task("evaluator", 0)],
        grace_s=0.1,
    )
    assert code == 9
    assert "evaluator 0 exited with code 9, the first to fail." in shown


@pytest.mark.rest
def test_preempted_task_ends_the_job_as_without_tolerance(job):
    """Exit code 42 after a death: all save and restart, and it is not counted."""
    code, shown, _ = job.run(
        """
if task == "worker 1" and restart == 1:
    note("its replacement, which does not enter, is here")
    time.sleep(60)
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if restart == 0 and task == "worker 1":
    die()
if restart == 0:
    wait("its replacement, which does not enter, is here")
    if task == "worker 2":
        wait_for_state("worker 0", "exited with code 42")
    sys.exit(42)
""",
        max_restarts=2,
    )
    assert code == 0
    assert "worker 0 exited with code 42: it was preempted, and has saved." in shown
    assert shown.count("The others continue") == 1


def test_signal_ends_the_tasks_that_are_left(job):
    def interrupt():
        deadline, states = time.monotonic() + LIMIT_S, job.folder / "states"
        while time.monotonic() < deadline:
            if states.exists() and "continued without it" in states.read_text():
                break
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    code, shown, _ = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    die()
time.sleep(60)
"""
    )
    interrupting.join()
    assert code == 143
    assert "SIGTERM: ending worker 0, worker 2." in shown


# --- on several hosts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "said", "options", "waits"),
    [
        (0, "tell(); die()", {}, True),
        (1, "tell(); die()", {}, False),
        (0, "tell(tolerates_failures=False); die()", {}, False),
        (0, "tell(); sys.exit(42)", {}, False),
        (0, "tell(); die()", {"max_restarts": 1}, False),
    ],
    ids=["worker 0", "worker 1", "no tolerance", "preempted", "restarts"],
)
def test_launcher_of_worker_0_waits_while_its_controller_serves_other_hosts(
    job, monkeypatch, index, said, options, waits
):
    served = []

    says = "The workers of other hosts continue; its controller serves them here until they end."

    def wait(environment, is_over):
        deadline = time.monotonic() + LIMIT_S
        while says not in (job.folder / "shown").read_text() and time.monotonic() < deadline:
            is_over.wait(0.01)
        served.append(environment["REPLICAX_TOKEN"])

    monkeypatch.setattr(supervisor, "wait_while_it_serves", wait)
    code, shown, _ = job.run(said, tasks=[Task("worker", index)], grace_s=0.1, **options)
    assert code == (42 if "42" in said else 137)
    assert served == ["t"] * waits
    assert (says in shown) == waits
