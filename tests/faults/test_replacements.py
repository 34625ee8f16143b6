"""Replacements of killed workers of `replicax launch`: at random moments of ``fit``, and with programs whose checkpoint
lacks something."""

import contextlib
import os
import random
import re
import signal
import time

import pytest

import surviving_programs
from differing_replacements import forgetful
from launched_jobs import LaunchedJob, pids_of

SOON_S = 300
WORKERS = 3
KINDS = ["plain", "normalized", "dropped", "half"]


def ended(job):
    assert job.wait(SOON_S) == 0, job.text(300)
    return dict(job.printed("bits"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("lacks", "named"), [("scale", "scale"), ("iterator", "argument 0, argument 1")])
def test_replacement_that_lacks_state_ends_with_its_name_and_the_others_finish(tmp_path, lacks, named):
    with LaunchedJob(tmp_path / "undisturbed", forgetful, workers=WORKERS) as job:
        expected = set(ended(job).values())
    arguments = f"lacks={lacks!r}, dies=[(2, 'step 3')], waits=['step 5']"
    with LaunchedJob(tmp_path / "killed", forgetful, arguments, workers=WORKERS, max_restarts=1) as job:
        job.wait(SOON_S)
    text = job.text(300)
    assert "replicax.errors.StateMismatchError: worker 2, a replacement, has " in text
    error = text.partition("StateMismatchError: ")[2].partition("\n")[0]
    assert "than worker 0" in error
    assert named in error
    assert "rx.Checkpoint" in error
    bits = dict(job.printed("bits"))
    assert (sorted(bits), set(bits.values())) == (["worker 0", "worker 1"], expected), text


_undisturbed = {}


def undisturbed_bits(folder, arguments):
    if arguments not in _undisturbed:
        with LaunchedJob(folder, surviving_programs.surviving, arguments, workers=WORKERS) as job:
            (_undisturbed[arguments],) = set(ended(job).values())
    return _undisturbed[arguments]


def check_trial(folder, seed):
    """One job in which tasks are killed, and their replacements too; the seed chooses all else."""
    chosen = random.Random(seed)
    arguments = f"{chosen.choice(KINDS)!r}, {chosen.choice([96, 97])}, saves=True"
    expected = undisturbed_bits(folder / "undisturbed", arguments)
    pause_s, killed = chosen.choice([0.05, 0.1]), []
    print(f"seed {seed}: {arguments}, pause {pause_s} s")
    with LaunchedJob(
        folder / "killed",
        surviving_programs.surviving,
        f"{arguments}, pause_s={pause_s}",
        workers=WORKERS,
        max_restarts=20,
    ) as job:
        pids = pids_of(job, WORKERS, SOON_S)
        for _ in range(chosen.choice([1, 2, 3])):
            for _ in range(chosen.randint(10, 150)):
                found = job.next_line(r"(worker \d+) \| (step \d+|pid (\d+))$", SOON_S)
                if found is not None and found[3]:
                    pids[found[1]] = int(found[3])
            time.sleep(chosen.uniform(0, 0.05))
            victim = chosen.choice(sorted(pids))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[victim], signal.SIGKILL)
                killed.append(victim)
        bits = ended(job)
    assert set(bits.values()) == {expected}, job.text(300)
    back = [line for line in job.lines if re.search(r"Worker \d is back in step", line)]
    print(f"seed {seed}: killed {killed}, back {back}")
    return killed, back


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(3))
def test_random_kills_with_replacements_leave_the_same_bits(tmp_path, seed):
    check_trial(tmp_path, seed)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_forty_trials_of_random_kills_with_replacements(tmp_path, seed):
    check_trial(tmp_path, seed)
