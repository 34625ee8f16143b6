"""Processes that write a checkpoint together are killed or stopped at any moment: no checkpoint is ever partial."""

import collections
import contextlib
import os
import random
import re
import time
from pathlib import Path

import pytest

from changing_state import differing, saving
from checks import path_of_programs
from replicax._src.checkpoint.directory import paths_in
from replicax._src.checkpoint.saved import SavedCheckpoint

pytestmark = [pytest.mark.rest, pytest.mark.timeout(400)]
LIMIT_S = 120
SOON_S = 45  # before a process that is only silent would be given up, after 60 s
PROGRAMS = f"{path_of_programs()}{os.pathsep}{Path(__file__).parents[1]}"
MANY_SAVES = "100000"
# Those after "agreed" are moments of the chief.
MOMENTS = ["made", "half", "written", "agreed", "named", "renamed", "removing"]


def names_in(folder):
    return sorted(os.listdir(folder)) if folder.exists() else []


def value_at(saved, key):
    """A value of a checkpoint, by its key."""
    return saved.array(key).read() if key in saved.contents.arrays else saved.contents.states[key][0][0]


def checkpoints_in(folder):
    """The numbers of the checkpoints, oldest first, after reading all of each: none may be partial."""
    numbers = []
    for path in paths_in(str(folder), "ckpt"):
        saved = SavedCheckpoint(path)
        state = {key.partition("/")[2]: value_at(saved, key) for key in saved.contents.arrays}
        state["step"] = value_at(saved, "state/step")
        numbers.append(int(path.rpartition("-")[2]))
        assert len(state) == 5
        assert differing(state, numbers[-1]) == []
    return numbers


class Trials:
    """Starts of a program in one directory, each of which ends by kills.

    Args:
      folder: The directory.
      local_cluster: The fixture.

    Attributes:
      counts: What was seen, for the log.
    """

    def __init__(self, folder, local_cluster):
        self._folder, self._local_cluster = folder, local_cluster
        self._left = []
        self.counts = collections.Counter()

    @contextlib.contextmanager
    def started(self, num_processes, *args, **environment):
        """Starts processes, and checks what they restore. Afterwards no checkpoint is partial, and survivors have
        named the dead.
        """
        newest = (checkpoints_in(self._folder) or [None])[-1]
        cluster = self._local_cluster(
            num_processes, environment={"PYTHONPATH": PROGRAMS, **environment}, timeout_s=LIMIT_S
        )
        cluster.start(saving, [str(self._folder), MANY_SAVES, *args])
        tasks = [cluster.tasks["worker", number] for number in range(num_processes)]
        for task in tasks:
            task.wait_for_report("restored")
            seen = task.reports[0]
            assert seen["restored"] == (newest and f"ckpt-{newest}")
            assert seen["wrong"] == []
            assert seen["warnings"] == []
            assert [name for name in seen["found"] if name in self._left] == []
        yield tasks
        cluster.wait()
        reports = [report for task in tasks for report in task.reports]
        cluster.close()
        self._check(reports, newest or 0)

    def _check(self, reports, restored):
        whole = checkpoints_in(self._folder)
        written = max([restored, *(report["written"] for report in reports if "written" in report)])
        begun = max([restored, *(report["begun"] for report in reports if "begun" in report)])
        assert (whole or [0])[-1] in range(written, begun + 1)
        names = names_in(self._folder)
        self._left = [name for name in names if not re.fullmatch(r"ckpt-\d+", name)]
        self.counts["newest one was not yet reported"] += (whole or [0])[-1] > written
        self.counts["leftovers"] += bool(self._left)


def kill(tasks, victims):
    """Kills processes; returns the time."""
    at = time.time()
    for number in victims:
        tasks[number].kill()
    return at


def expect_errors(tasks, victims, killed_at):
    """The survivors name a dead process soon."""
    for number in {*range(len(tasks))} - {*victims}:
        result = tasks[number].wait(LIMIT_S)
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "PeerFailureError"
        assert set(result.report["lost"]) <= {f"worker {victim}" for victim in victims}
        assert result.report["lost"]
        assert result.report["raised_at"] - killed_at < SOON_S


def kill_at_random(trials, num_processes, random_one):
    """One, several or all are killed up to 1.5 s after the first save."""
    victims = random_one.sample(range(num_processes), random_one.randint(1, num_processes))
    with trials.started(num_processes) as tasks:
        for task in tasks:
            task.wait_for_report("begun")
        time.sleep(random_one.uniform(0, 1.5))
        killed_at = kill(tasks, victims)
        expect_errors(tasks, victims, killed_at)
    trials.counts[f"{len(victims)} of {num_processes} killed at random"] += 1


def kill_at(trials, num_processes, moment, victims):
    """These kill themselves at a moment of the fourth save, or of a later one."""
    with trials.started(num_processes, moment, ",".join(map(str, victims)), "4") as tasks:
        reported = [tasks[number].wait_for_report("killed_at") for number in victims[:1]]
        for number in victims[
            1:
        ]:  # the death of the first may end the others before they come to this moment
            tasks[number].wait(LIMIT_S)
        dead = [number for number in victims if tasks[number].wait(LIMIT_S).exit_code != 3]
        expect_errors(tasks, dead, max(reported))
    trials.counts[f"killed at {moment!r}"] += 1


@pytest.mark.parametrize("num_processes", [2])
def test_no_kill_leaves_a_partial_checkpoint(local_cluster, tmp_path, num_processes):
    random_one, trials = random.Random(5), Trials(tmp_path / "saved", local_cluster)
    for moment, victims in (
        ("half", [1]),
        ("written", [0]),
        ("named", [0]),
        ("renamed", [0]),
        ("agreed", [1]),
    ):
        kill_at(trials, num_processes, moment, victims)
    for _ in range(3):
        kill_at_random(trials, num_processes, random_one)
    with trials.started(num_processes) as tasks:  # checks the last kill
        kill(tasks, range(num_processes))
    print(dict(trials.counts))


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_stopped_writer_is_named_after_the_limit(local_cluster, tmp_path, victim):
    """The others do not hang, and the stopped one cannot complete its checkpoint later."""
    trials = Trials(tmp_path / "saved", local_cluster)
    with trials.started(2, REPLICAX_SILENCE_TIMEOUT_S="3") as tasks:
        for task in tasks:
            task.wait_for_report("begun")
        time.sleep(random.uniform(0, 1))
        tasks[victim].stop()
        expect_errors(tasks, [victim], time.time())
        tasks[victim].resume()
        assert tasks[victim].wait(LIMIT_S).exit_code
    with trials.started(2) as tasks:
        kill(tasks, range(2))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_kills_with_changing_numbers_of_processes(local_cluster, tmp_path):
    random_one, trials = random.Random(6), Trials(tmp_path / "saved", local_cluster)
    for number in range(100):
        num_processes = random_one.choice([2, 2, 3, 4])
        if number % 5 < 3:
            kill_at_random(trials, num_processes, random_one)
        else:
            moment = random_one.choice(MOMENTS)
            is_chiefs = moment in MOMENTS[4:]
            victims = [0] if is_chiefs else random_one.sample(range(num_processes), random_one.randint(1, 2))
            kill_at(trials, num_processes, moment, victims)
    with trials.started(1) as tasks:  # checks the last kill
        kill(tasks, [0])
    print(dict(trials.counts))
