"""Workers of `replicax launch` are killed at random moments of `fit` with `fault_tolerance`: the others go on without a
restart, and each ends with the weights, the optimizer and the history of an undisturbed run, bit for bit."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
import uuid
from pathlib import Path

import keras
import numpy as np
import pytest

import surviving_programs
from checks import is_there
from forked_jobs import ForkedJob
from launched_jobs import LaunchedJob, pids_of
from training_pieces import model_of_kind, rows_to_learn

SOON_S = 250
KINDS = ["plain", "normalized", "dropped", "half"]
NUM_STEPS = 6 * 31
LOGGED = re.compile(
    r"Worker (\d+)(?: and worker \d+)? died (?:in|after) step ([\d,]+)(?: of \S+)?\..*\(([\d.]+) s\)"
)
MARK = "REPLICAX_TEST_JOB"


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """``job_of(program, arguments, workers=..)``: a job. At the end of the test, none of its processes is left.

    It runs under `replicax launch`, or is forked: then its start takes a tenth of the processor time.
    """
    monkeypatch.setenv(MARK, token := uuid.uuid4().hex)  # all processes of a job inherit it
    number = iter(range(1000))

    def start(program="surviving", arguments="", *, is_forked=False, **options):
        folder = tmp_path / f"job-{next(number)}"
        job = ForkedJob if is_forked else LaunchedJob
        return job(folder, getattr(surviving_programs, program), arguments, **options)

    yield start
    deadline = time.monotonic() + 30
    while (left := processes_with(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def processes_with(token):
    """The commands of the processes that have this text in their environment, by process id; without this process."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_other = entry.name.isdecimal() and int(entry.name) != os.getpid() and is_there(entry.name)
            if is_other and f"{MARK}={token}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def said(job):
    """The output without the lines of steps."""
    return "\n".join(line for line in job.lines if not re.search(r"\bstep \d+$", line))


def ended(job, pids):
    """The exit code. If the job hangs, the error has the stacks of its workers."""
    try:
        return job.wait(SOON_S)
    except subprocess.TimeoutExpired:
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(3)
        raise AssertionError(f"the job hangs\n{said(job)}") from None


def kill(pids, *victims):
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)


_undisturbed = {}


def undisturbed_bits(job_of, workers, arguments, *, is_forked=False):
    """The digest that all workers print if nobody is killed."""
    if (workers, arguments) not in _undisturbed:
        with job_of(arguments=arguments, workers=workers, is_forked=is_forked) as job:
            assert job.wait(SOON_S) == 0, said(job)
        assert len(job.printed("bits")) == workers
        (_undisturbed[workers, arguments],) = {bits for _, bits in job.printed("bits")}
    return _undisturbed[workers, arguments]


def check_end(job, pids, victims, expected):
    """All but the victims have ended with these bits, without a restart.

    On a busy machine a kill may come when its victim has printed its bits. If the others have ended by then, the launcher
    takes it for a failure, since nobody continues the victim's work.
    """
    code, bits = ended(job, pids), dict(job.printed("bits"))
    assert code == 0 or (code == 128 + signal.SIGKILL and not bits.keys().isdisjoint(victims)), said(job)
    survivors = {name for name in pids if name not in victims}
    assert survivors <= bits.keys(), said(job)
    assert set(bits.values()) == {expected}, said(job)
    assert not any(re.search(r"restart \d+ of|restarts? ", line) for line in job.lines), said(job)


def check_trial(job_of, seed, *, is_forked=False):
    """One job with one to three kills; the seed chooses all else. Returns the seconds of the recoveries."""
    chosen = random.Random(seed)
    workers = chosen.choice([3, 4])
    kind, batch_size = chosen.choice(KINDS), chosen.choice([96, 97])
    arguments = f"{kind!r}, {batch_size}"
    pause_s = chosen.choice([0, 0, 0.004])
    how = chosen.choice(["one", "one", "two at once", "during recovery", "one by one", "late"])
    first_step = NUM_STEPS if how == "late" else chosen.randint(1, NUM_STEPS // 2)
    num_victims = 1 if how in ("one", "late") else 2 if how != "one by one" else workers - 1
    victims = chosen.sample([f"worker {number}" for number in range(workers)], num_victims)
    print(f"seed {seed}: {workers} workers, {arguments}, pause {pause_s} s, {how}: {', '.join(victims)}")
    expected = undisturbed_bits(job_of, workers, arguments, is_forked=is_forked)
    with job_of(arguments=f"{arguments}, pause_s={pause_s}", workers=workers, is_forked=is_forked) as job:
        pids = pids_of(job, workers, SOON_S)
        job.next_line(rf"worker \d+ \| step {first_step}$", SOON_S)
        time.sleep(chosen.uniform(0, 0.03))
        step = first_step
        for number, victim in enumerate(victims):
            kill(pids, victim)
            if how == "during recovery" and number == 0:
                time.sleep(chosen.uniform(0, 0.12))
            if how == "one by one" and number + 1 < num_victims:
                step += chosen.randint(5, 25)
                job.next_line(rf"worker \d+ \| step {step}$", SOON_S)
        check_end(job, pids, victims, expected)
    seconds = [float(found[3]) for found in map(LOGGED.search, job.lines) if found]
    print(f"seed {seed}: step {first_step}, recovered in {seconds} s")
    return seconds


@pytest.mark.timeout(600)
def test_survivors_of_a_killed_chief_end_like_an_undisturbed_run(job_of):
    """Three workers, dropout and a clipped norm, batches of 97 rows; worker 0 is killed, later another one."""
    expected = undisturbed_bits(job_of, 3, "'dropped', 97")
    with job_of(arguments="'dropped', 97, pause_s=0.004", workers=3) as job:
        pids = pids_of(job, 3, SOON_S)
        job.next_line(r"worker \d \| step 40$", SOON_S)
        kill(pids, "worker 0")
        job.next_line(r"worker [12] \| step 60$", SOON_S)
        kill(pids, "worker 2")
        check_end(job, pids, ["worker 0", "worker 2"], expected)
    logged = [found for found in map(LOGGED.search, job.lines) if found]
    assert [found[1] for found in logged] == ["0", "2"], said(job)
    assert "adopted its replica" in logged[0][0]


@pytest.mark.rest
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3, 4, 5))]
)
def test_random_kills(job_of, seed):
    """Seed 0 kills three of four workers one by one, seed 3 a second one, the chief, during the recovery."""
    check_trial(job_of, seed)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_two_hundred_trials_of_random_kills(job_of, seed):
    """One trial of four is under the launcher."""
    check_trial(job_of, seed, is_forked=bool(seed % 4))


@pytest.mark.rest
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        pytest.param("accumulated", "'accumulated', 96", marks=pytest.mark.long),
        ("several steps in one execution", "'plain', 96, steps_per_execution=4"),
        pytest.param("equal batches in order", "'normalized', 50, shuffle=False", marks=pytest.mark.long),
    ],
)
def test_killed_worker_changes_no_bit_of_other_programs(job_of, kind, arguments):
    expected = undisturbed_bits(job_of, 3, arguments)
    with job_of(arguments=f"{arguments}, pause_s=0.004", workers=3) as job:
        pids = pids_of(job, 3, SOON_S)
        job.next_line(r"worker \d \| step 40$", SOON_S)
        kill(pids, "worker 1")
        check_end(job, pids, ["worker 1"], expected)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_three_hundred_steps_with_deaths_end_where_one_device_ends(job_of):
    features, labels = rows_to_learn(30 * 97)
    model, _ = model_of_kind("normalized")
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(features, labels, batch_size=97, epochs=10, shuffle=False, verbose=0)
    expected = [np.asarray(variable.value) for variable in model.variables]
    largest = max(np.abs(value).max() for value in expected)
    with job_of("surviving_exactly", "pause_s=0.004", workers=4) as job:
        pids = pids_of(job, 4, SOON_S)
        for step, victim in ((10, "worker 2"), (20, "worker 0")):
            job.next_line(rf"worker [13] \| step {step}$", SOON_S)
            kill(pids, victim)
        assert ended(job, pids) == 0, said(job)
    for survivor in (1, 3):
        with np.load(job.saved.parent / f"worker-{survivor}.npz") as file:
            values = [file[name] for name in file.files]
        distance = max(np.abs(a - b).max() for a, b in zip(values, expected, strict=True)) / largest
        print(f"worker {survivor}: {distance:.2e} of the largest weight")
        assert distance <= 3e-6


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["worker 0", "worker 1"])
def test_stopped_worker_that_wakes_in_time_is_not_dead(job_of, victim):
    expected = undisturbed_bits(job_of, 3, "'plain', 96")
    with job_of(arguments="'plain', 96, pause_s=0.004", workers=3) as job:
        pids = pids_of(job, 3, SOON_S)
        job.next_line(r"worker \d \| step 40$", SOON_S)
        os.kill(pids[victim], signal.SIGSTOP)
        time.sleep(4)
        os.kill(pids[victim], signal.SIGCONT)
        check_end(job, pids, [], expected)
    assert not any(map(LOGGED.search, job.lines)), said(job)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_worker_that_was_given_up_ends_itself_when_it_wakes(job_of, monkeypatch):
    expected = undisturbed_bits(job_of, 3, "'plain', 96")
    monkeypatch.setenv("REPLICAX_SILENCE_TIMEOUT_S", "5")
    with job_of(arguments="'plain', 96, pause_s=0.004", workers=3) as job:
        pids = pids_of(job, 3, SOON_S)
        job.next_line(r"worker \d \| step 40$", SOON_S)
        os.kill(pids["worker 1"], signal.SIGSTOP)
        job.next_line(r"worker 0 \| step 120$", SOON_S)  # the others go on
        os.kill(pids["worker 1"], signal.SIGCONT)
        check_end(job, pids, ["worker 1"], expected)
    assert "worker 1" not in dict(job.printed("bits"))


@pytest.mark.rest
@pytest.mark.timeout(600)
def test_fewer_than_min_workers_restart_from_the_checkpoint(job_of):
    expected = undisturbed_bits(job_of, 3, "'normalized', 96")
    arguments = "'normalized', 96, pause_s=0.01, min_workers=3, saves=True"
    with job_of(arguments=arguments, workers=3, max_restarts=1) as job:
        pids = pids_of(job, 3, SOON_S)
        job.next_line(r"worker \d \| step 40$", SOON_S)
        kill(pids, "worker 1")
        pids = pids_of(job, 3, SOON_S)
        assert ended(job, pids) == 0, said(job)
    assert {bits for _, bits in job.printed("bits")} == {expected}
    text = "\n".join(job.lines)
    assert "2 tasks are left, and `min_workers` is 3: worker 1 is gone." in text
    num_steps = len([1 for name, _ in job.printed("step") if name == "worker 0"])
    assert num_steps < NUM_STEPS + 40  # it has not begun from scratch after the kill


@pytest.mark.long
@pytest.mark.timeout(600)
def test_fewer_than_min_workers_end_without_restarts(job_of):
    with job_of(arguments="'plain', 96, pause_s=0.01, min_workers=2", workers=2) as job:
        pids = pids_of(job, 2, SOON_S)
        job.next_line(r"worker \d \| step 40$", SOON_S)
        kill(pids, "worker 0")
        assert ended(job, pids) != 0
    assert "PeerFailureError" in said(job)
    assert "min_workers" in said(job)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_program_that_differs_in_one_worker_is_an_error_that_names_both(job_of):
    with job_of(arguments="'plain', 96, differs_in=1", workers=3) as job:
        assert ended(job, pids_of(job, 3, SOON_S)) != 0
    assert not job.printed("step")
    text = said(job)
    assert "replicax.errors.ProgramMismatchError" in text
    assert re.search(
        r"worker [02].*worker 1|worker 1.*worker [02]", text.partition("ProgramMismatchError")[2], re.DOTALL
    )
