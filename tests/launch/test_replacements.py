"""A dead task of a job that goes on is started again, alone. The tasks are small scripts with a status file."""

import os
import re
import sys
import threading
import time

import pytest

from checks import is_there
from replicax._launch import supervisor
from replicax._src.cluster.spec import Task
from scripted_job import LIMIT_S, WAITS_UNTIL_ALL_HAVE_JOINED, ScriptedJob

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def job(tmp_path):
    return ScriptedJob(tmp_path)


# --- it comes back ----------------------------------------------------------------------------------------

# The first processes end when worker 1 is there again, and has entered.
COMES_BACK = """
if restart:
    note(f"pid {task}", str(os.getppid()))
    wait_for_state(task, "entering")
    tell()
    wait_for_state(task, "running")
    note(f"came back {task}")
    print("came back", restart, os.environ["REPLICAX_REPLACEMENT"])
    sys.exit()
"""


@pytest.mark.parametrize("victim", ["worker 2", pytest.param("worker 0", marks=pytest.mark.rest)])
def test_killed_task_is_started_again_alone_and_the_job_succeeds(job, victim):
    code, shown, rows = job.run(
        COMES_BACK
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + f"""
if task == {victim!r}:
    die()
wait("came back {victim}")
print("trained")
""",
        max_restarts=20,
    )
    assert code == 0
    assert (
        f"{victim} was killed by SIGKILL. The others continue; starting it again: restart 1 of 20.\n" in shown
    )
    assert shown.count("| trained") == 2
    assert re.search(rf"{victim} \| came back 1 1", shown)
    assert {name: row.num_restarts for name, row in rows[-1].items()} == {
        f"worker {index}": int(f"worker {index}" == victim) for index in range(3)
    }
    assert list(rows[-1]) == ["worker 0", "worker 1", "worker 2"]
    states = [row[victim].state for row in rows]
    assert states[-1] == "exited with code 0"
    assert "entering" in states


@pytest.mark.rest
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the number of the process group")
def test_controller_of_worker_0_outlives_its_replacements(job):
    """The controller has a session of its own. Nothing is left when the job has ended."""
    code, shown, _ = job.run(
        """
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"]

def is_dead(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True

if task == "worker 0":
    child = subprocess.Popen(SLEEP)
    others = subprocess.Popen(SLEEP, start_new_session=True)
    note(f"pids {restart}", f"{child.pid} {others.pid}")
if restart:
    tell()
    if restart < 3:
        time.sleep(0.5)
        die()
    pids = [open(os.path.join(folder, f"pids {n}")).read().split() for n in range(3)]
    print("left", [[not is_dead(pid) for pid in both] for both in pids])
    note("seen")
    sys.exit()
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 0":
    die()
wait("seen")
""",
        max_restarts=3,
    )
    assert code == 0
    assert "left [[False, True], [False, False], [False, False]]" in shown
    for number in range(4):
        pids = (job.folder / f"pids {number}").read_text().split()
        assert not [pid for pid in pids if is_there(int(pid))]


@pytest.mark.rest
def test_replacement_of_the_first_task_has_the_file_of_the_curves_that_the_others_have(job, monkeypatch):
    monkeypatch.delenv("REPLICAX_STATUS_HISTORY", raising=False)
    code, shown, _ = job.run(
        """
if restart:
    print("found", open(os.environ["REPLICAX_STATUS_HISTORY"]).read())
"""
        + COMES_BACK
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 0":
    die()
if task == "worker 1":
    with open(os.environ["REPLICAX_STATUS_HISTORY"], "w") as file:
        file.write("curves")
wait("came back worker 0")
print("found", open(os.environ["REPLICAX_STATUS_HISTORY"]).read())
""",
        max_restarts=1,
    )
    assert code == 0
    assert len(re.findall(r"worker [12] \| found curves", shown)) == 2


@pytest.mark.rest
def test_task_that_raised_is_made_up_for_by_a_replacement_that_enters(job):
    code, shown, _ = job.run(
        COMES_BACK
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    tell("raised")
    raise ValueError("no such file")
wait("came back worker 1")
""",
        max_restarts=1,
    )
    assert code == 0
    note = "worker 1 exited with code 1. The others continue; starting it again: restart 1 of 1. Its last lines:\n"
    assert "    ValueError: no such file\n" in shown.partition(note)[2]


@pytest.mark.rest
def test_replacement_that_dies_after_it_has_entered_is_replaced_again(job):
    code, shown, _ = job.run(
        """
if restart == 1:
    wait_for_state(task, "entering")
    tell()
    wait_for_state(task, "running")
    sys.exit(5)
"""
        + COMES_BACK
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    die()
wait("came back worker 1")
""",
        max_restarts=2,
    )
    assert code == 0
    assert (
        "worker 1 exited with code 5. The others continue; starting it again: restart 2 of 2. It waits 1 s."
        in shown
    )
    assert "came back 2" in shown


# --- it does not come back --------------------------------------------------------------------------------


@pytest.mark.rest
@pytest.mark.parametrize("says_raised", [False, True], ids=["", "raised"])
def test_replacement_that_ends_before_it_has_entered_is_no_failure(job, says_raised):
    code, shown, rows = job.run(
        f"""
if restart:
    if {says_raised}:
        tell("raised", tolerates_failures=False)
    note(f"failed {{restart}}")
    sys.exit("this package is gone")
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    die()
wait_until_shown("the others continue without it.")
""",
        max_restarts=2,
    )
    assert code == 0
    first, second = (
        shown.partition(f"The replacement of worker 1 exited with code 1 before it had entered; {then}\n")[2]
        for then in (
            "starting another one: restart 2 of 2. It waits 1 s. Its last lines:",
            "the others continue without it. Its last lines:",
        )
    )
    assert first.startswith("    this package is gone\n")
    assert second.startswith("    this package is gone\n")
    assert "first to fail" not in shown
    assert rows[-1]["worker 1"].state == "died (exit code 1); continued without it"


@pytest.mark.rest
def test_replacement_that_has_not_entered_is_ended_with_the_job(job):
    code, shown, _ = job.run(
        """
if restart:
    note("waits", str(os.getpid()))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    die()
wait("waits")
""",
        max_restarts=2,
    )
    assert code == 0
    assert "The training has ended. The replacement of worker 1 had not entered, and is ended.\n" in shown
    assert "Waiting up to" not in shown
    assert not is_there(int((job.folder / "waits").read_text()))


@pytest.mark.rest
def test_replacement_that_waits_for_its_start_does_not_delay_the_end(job):
    began = time.monotonic()
    code, shown, rows = job.run(
        """
if restart:
    note(f"failed {restart}")
    sys.exit(1)
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    die()
wait_until_shown("restart 5 of 20. It waits 8 s.")
note("ends")
""",
        max_restarts=20,
    )
    assert code == 0
    assert "restart 5 of 20. It waits 8 s." in shown
    assert time.time() - (job.folder / "ends").stat().st_mtime < 5
    assert time.monotonic() - began < LIMIT_S
    assert rows[-1]["worker 1"].state == "died (exit code 1); starts again"


def test_job_that_the_others_have_finished_is_not_started_again(job):
    """A restart of all would find nothing to do. The job fails, because a part of the program has not run."""
    code, shown, _ = job.run(
        """
if restart:
    note("its replacement, which does not enter, is here")
    time.sleep(60)
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    tell("raised")
    raise ValueError("no such file")
wait("its replacement, which does not enter, is here")
""",
        max_restarts=5,
    )
    assert code == 1
    assert "restart 1 of 5" in shown
    assert "Starting all tasks again" not in shown


@pytest.mark.rest
def test_job_fails_if_nobody_has_taken_the_place_of_a_task_that_raised(job):
    code, shown, _ = job.run(
        """
if restart:
    note("failed")
    sys.exit(3)
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    tell("raised")
    raise ValueError("no such file")
wait_until_shown("the others continue without it.")
""",
        max_restarts=1,
    )
    assert code == 1
    assert (
        "    ValueError: no such file\n"
        in shown.partition("worker 1 exited with code 1, the first to fail")[2]
    )


@pytest.mark.rest
def test_error_that_all_raise_costs_one_restart(job, monkeypatch):
    monkeypatch.setattr(supervisor, "_ERROR_SHARED_S", 5.0)  # more than a busy machine needs
    code, shown, rows = job.run(
        WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if restart == 0:
    time.sleep({"worker 0": 0.5, "worker 1": 0, "worker 2": 0.9}[task])
    tell("raised")
    raise ValueError("no such file")
""",
        max_restarts=3,
    )
    assert code == 0
    assert "Starting all tasks again: restart 1 of 3." in shown
    assert [row.num_restarts for row in rows[-1].values()] == [1, 1, 1]


@pytest.mark.rest
def test_signal_ends_a_replacement_too(job):
    def interrupt():
        deadline = time.monotonic() + LIMIT_S
        while not (job.folder / "waits").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), 15)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    code, shown, _ = job.run(
        """
if restart:
    note("waits")
    time.sleep(60)
"""
        + WAITS_UNTIL_ALL_HAVE_JOINED
        + """
if task == "worker 1":
    die()
time.sleep(60)
""",
        max_restarts=1,
    )
    interrupting.join()
    assert code == 143
    assert "SIGTERM: ending worker 0, worker 1, worker 2." in shown


# --- on several hosts -------------------------------------------------------------------------------------


SERVES = "The workers of other hosts continue; its controller serves them here until they end."


@pytest.fixture
def answers(job, monkeypatch):
    """The answers of the controller about the tasks of other hosts, which a test adds."""
    answers = []

    class Hosts:
        def __init__(self, environment):
            assert environment["REPLICAX_TOKEN"] == "t"
            self.answer = answers.pop(0)

    def wait(environment, is_over):
        """The others end when the launcher has said that it waits."""
        deadline = time.monotonic() + LIMIT_S
        while SERVES not in (job.folder / "shown").read_text() and time.monotonic() < deadline:
            if is_over.wait(0.01):
                return

    monkeypatch.setattr(supervisor, "OtherHosts", Hosts)
    monkeypatch.setattr(supervisor, "wait_while_it_serves", wait)
    return answers


@pytest.mark.rest
@pytest.mark.parametrize("index", [0, 1])
def test_each_launcher_restarts_its_own_task_while_other_hosts_continue(job, answers, index):
    answers.append(True)
    code, shown, _ = job.run(
        """
if not restart:
    tell()
    controller = subprocess.Popen(["sleep", "100"], start_new_session=True)
    note("pid", str(controller.pid))
    die()
time.sleep(0.3)
tell()
os.kill(int(open(os.path.join(folder, "pid")).read()), 0)
print("came back")
""",
        tasks=[Task("worker", index)],
        max_restarts=2,
    )
    assert code == 0
    name = f"worker {index}"
    assert f"{name} was killed by SIGKILL. The others continue; starting it again: restart 1 of 2." in shown
    assert f"{name} | came back" in shown
    assert not is_there(int((job.folder / "pid").read_text()))


@pytest.mark.rest
def test_launcher_starts_its_task_for_the_next_run_if_other_hosts_do_not_continue(job, answers):
    answers.extend([True, False])
    code, shown, _ = job.run(
        """
if not restart:
    tell()
    die()
if restart == 1:
    sys.exit(3)
""",
        tasks=[Task("worker", 1)],
        max_restarts=5,
    )
    assert code == 0
    assert "The others continue; starting it again: restart 1 of 5." in shown
    assert "worker 1 exited with code 3, the first to fail." in shown
    assert "Starting all tasks again: restart 2 of 5." in shown


@pytest.mark.rest
def test_launcher_of_worker_0_waits_without_restarts_and_does_not_start_it_when_the_others_have_ended(
    job, answers
):
    answers.extend([True, True])
    folder = job.folder / "saved"
    folder.mkdir()
    code, shown, _ = job.run(
        """
tell()
if restart == 1:
    os.makedirs(os.path.join(folder, "saved", "ckpt-9"))
    with open(os.path.join(folder, "saved", "ckpt-9", "manifest.json"), "w") as file:
        json.dump({"crc32": 0, "contents": {"number": 9}}, file)
die()
""",
        tasks=[Task("worker", 0)],
        max_restarts=1,
        checkpoint_dir=folder,
    )
    assert code == 137
    assert SERVES in shown
    assert "Starting all tasks again" not in shown
