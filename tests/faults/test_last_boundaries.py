"""Tasks of `replicax launch` are killed at random moments, with a checkpoint interval of 1,000 steps: each restart
resumes at the last boundary that a survivor had, and the end is bit-equal to that of an undisturbed run."""

import contextlib
import os
import random
import re
import signal
import time

import pytest

import marked_programs
from launched_jobs import LaunchedJob, pids_of

SOON_S = 120
PROGRAMS = ["looping", "playing", "counting", "reading", "handling", "fitting"]


def write_files(folder):
    """Files for the program that reads some."""
    (folder / "files").mkdir(parents=True)
    for n in range(8):
        rows = "".join(f"{100 * n + i},{i}\n" for i in range(40))
        (folder / "files" / f"part-{n}.csv").write_text(f"a,b\n{rows}")


def started(folder, program, workers, arguments="", **options):
    write_files(folder)
    return LaunchedJob(folder, getattr(marked_programs, program), arguments, workers=workers, **options)


_undisturbed = {}


def bits_of_undisturbed(folder, program, workers):
    """What the program prints at its end if nobody is killed; the same on all workers."""
    if (program, workers) not in _undisturbed:
        with started(folder / "alone", program, workers) as job:
            assert job.wait(SOON_S) == 0, job.text()
        bits = {bits for _, bits in job.printed("bits")}
        assert len(bits) == 1
        _undisturbed[program, workers] = bits
    return _undisturbed[program, workers]


def kill_at_random(job, workers, random_one, num_victims):
    """Kills workers with `kill -9` after some marks; returns them, or None if the job has ended."""
    pids = pids_of(job, workers, SOON_S)
    if pids is None:
        return None
    for _ in range(random_one.randint(1, 12 * workers)):
        job.next_line(r"worker \d+ \| mark", SOON_S)
    time.sleep(random_one.uniform(0, 0.06))
    victims = random_one.sample(sorted(pids), num_victims)
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
    return victims


def resumed_and_expected(lines, victims_of_runs):
    """Where each restart resumed, and the last boundary that a survivor of the run before had marked."""
    runs = []
    for line in lines:
        if found := re.fullmatch(r"(worker \d+) \| (resumed|mark) (\d+)", line):
            name, what, number = found[1], found[2], int(found[3])
            if what == "resumed" and (not runs or name in runs[-1]):
                runs.append({})
            runs[-1].setdefault(name, []).append(number)
    resumed = [{marks[0] for marks in run.values()} for run in runs[1:]]
    expected = [
        {max(marks[-1] for name, marks in run.items() if name not in victims)}
        for run, victims in zip(runs, victims_of_runs, strict=False)
    ]
    return resumed, expected[: len(resumed)]


def check_trial(folder, program, workers, seed, *, num_kills=3, num_victims=1):
    """Kills during one job. Returns the number of kills."""
    expected_bits = bits_of_undisturbed(folder, program, workers)
    random_one, victims_of_runs = random.Random(seed), []
    with started(folder / "killed", program, workers, max_restarts=num_kills) as job:
        for _ in range(num_kills):
            victims = kill_at_random(job, workers, random_one, num_victims)
            if victims is None:
                break
            victims_of_runs.append(victims)
        assert job.wait(SOON_S) == 0, job.text()
    resumed, expected = resumed_and_expected(job.lines, victims_of_runs)
    assert resumed == expected, (victims_of_runs, job.text(200))
    assert {bits for _, bits in job.printed("bits")} == expected_bits, job.text()
    assert [name for name in os.listdir(job.saved) if not re.fullmatch(r"ckpt-\d+|\.compiled", name)] == []
    print(program, workers, seed, victims_of_runs, resumed)
    return len(resumed)


@pytest.mark.timeout(250)
def test_killed_worker_costs_only_the_interrupted_step(tmp_path):
    """Two programs in each iteration; two kills of two workers."""
    assert check_trial(tmp_path, "playing", 2, 5, num_kills=2) >= 1


@pytest.mark.rest
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "workers", "seed"),
    [
        pytest.param("fitting", 2, 1, marks=pytest.mark.long),
        ("reading", 2, 2),
        pytest.param("looping", 4, 3, marks=pytest.mark.long),
        pytest.param("counting", 4, 4, marks=pytest.mark.long),
    ],
)
def test_random_kills(tmp_path, program, workers, seed):
    assert check_trial(tmp_path, program, workers, seed) >= 1


def kill_after(job, pids, victim, pattern):
    """Kills a worker with `kill -9` after a line; returns the match."""
    found = job.next_line(pattern, SOON_S)
    os.kill(pids[victim], signal.SIGKILL)
    return found


@pytest.mark.rest
@pytest.mark.timeout(250)
def test_another_worker_saves_if_the_saver_dies(tmp_path):
    """And the launcher waits for a save that takes longer than its patience with survivors."""
    with started(tmp_path, "saving_slowly", 3, "save_s=13", max_restarts=1) as job:
        pids = pids_of(job, 3, SOON_S)
        kill_after(job, pids, "worker 2", r"worker \d \| mark 8")
        saver = job.next_line(r"(worker \d) \| begins to save (\d+)", SOON_S)
        os.kill(pids[saver[1]], signal.SIGKILL)
        saver = job.next_line(r"(worker \d) \| begins to save (\d+)", SOON_S)
        assert job.wait(SOON_S) == 0, job.text()
    assert {number for _, number in job.printed("resumed")[3:]} == {saver[2]}
    assert any("saving the last boundary. Waiting up to 600 s" in line for line in job.lines)
    assert {bits for _, bits in job.printed("bits")} == {"[40.0, 40.0, 40.0]"}


@pytest.mark.rest
@pytest.mark.timeout(250)
def test_divided_state_is_refused_when_the_manager_is_made(tmp_path):
    with started(tmp_path, "refusing", 2) as job:
        assert job.wait(SOON_S) == 0, job.text()
    first = [rest for task, rest in job.printed("(?:refused|accepted)") if task == "worker 0"]
    assert first == ["variable", "on_read True", "accumulated True", "model", "sharded True", "fit"], (
        job.text()
    )
    assert [rest for task, rest in job.printed("accepted") if task == "worker 0"] == ["variable", "model"]


@pytest.mark.rest
@pytest.mark.timeout(250)
def test_worker_whose_main_thread_is_stuck_saves(tmp_path):
    with started(tmp_path, "saving_slowly", 2, "stuck_s=8", max_restarts=1) as job:
        pids = pids_of(job, 2, SOON_S)
        kill_after(job, pids, "worker 1", r"worker 0 \| stuck")
        assert job.wait(SOON_S) == 0, job.text()
    text = "\n".join(job.lines)
    assert text.index("has saved") < text.index("PeerFailureError"), text
    assert {number for _, number in job.printed("resumed")[2:]} == {"10"}
    assert {bits for _, bits in job.printed("bits")} == {"[40.0, 40.0, 40.0]"}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
def test_preemption_beside_a_death_loses_nothing(tmp_path, seed):
    """SIGTERM makes all save together; some of them die meanwhile."""
    expected, random_one = bits_of_undisturbed(tmp_path, "handling", 2), random.Random(seed)
    with started(tmp_path / "killed", "handling", 2, max_restarts=3) as job:
        for _ in range(3):
            pids = pids_of(job, 2, SOON_S)
            if pids is None:
                break  # this process has been slow, and the job has ended
            for _ in range(random_one.randint(2, 20)):
                job.next_line(r"worker \d+ \| mark", SOON_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids["worker 0"], signal.SIGTERM)
                time.sleep(random_one.choice([0, 0.01, 0.03, 0.1]))
                os.kill(pids[random_one.choice(["worker 0", "worker 1"])], signal.SIGKILL)
        assert job.wait(SOON_S) == 0, job.text()
    runs = [int(number) for _, number in job.printed("resumed")]
    assert len(runs) >= 4, runs
    assert all(runs[i] == runs[i + 1] for i in range(0, len(runs), 2)), runs
    assert runs == sorted(runs)
    assert {bits for _, bits in job.printed("bits")} == expected, job.text()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_forty_trials_of_random_kills(tmp_path, program, workers, seed):
    assert (
        check_trial(tmp_path, program, workers, 100 + seed, num_victims=1 + (seed == 3 and workers == 4)) >= 1
    )
