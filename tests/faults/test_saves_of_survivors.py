"""Tasks of a ``fit`` with ``fault_tolerance`` that saves die in a save, between two steps, or before all exit: the
others go on, each checkpoint is complete, and the end has the bits of an undisturbed run."""

import numpy as np
import pytest

import saving_survivors
from launched_jobs import LaunchedJob
from replicax._src.checkpoint.saved import SavedCheckpoint

SOON_S = 150
WORKERS = 3


def job_in(folder, arguments, **options):
    return LaunchedJob(folder, saving_survivors.saving, arguments, workers=WORKERS, **options)


@pytest.fixture(scope="module")
def expected_bits(tmp_path_factory):
    """The digest that all workers print if nobody dies."""
    with job_in(tmp_path_factory.mktemp("undisturbed"), "epochs=3") as job:
        assert job.wait(SOON_S) == 0, job.text()
    (bits,) = {bits for _, bits in job.printed("bits")}
    return bits


def check_checkpoints(job, names):
    """These are complete, and nothing else is there."""
    paths = sorted(path for path in job.saved.iterdir() if not path.name.startswith("."))
    assert [path.name for path in paths] == names
    for path in paths:
        SavedCheckpoint(path).verify()


def check_end(job, victims, expected):
    assert job.wait(SOON_S) == 0, job.text(200)
    assert len(job.printed("dies")) == len(victims), job.text(200)
    survivors = {f"worker {number}" for number in range(WORKERS)} - {f"worker {number}" for number in victims}
    assert dict(job.printed("bits")) == dict.fromkeys(survivors, expected), job.text(200)
    check_checkpoints(job, ["ckpt-4", "ckpt-5", "ckpt-6"])


@pytest.mark.timeout(400)
def test_chief_dies_in_a_save_and_another_task_before_an_evaluation(tmp_path, expected_bits):
    with job_in(tmp_path, "epochs=3, dies=[(0, 'writing ckpt-2'), (2, 'evaluating after step 10')]") as job:
        check_end(job, [0, 2], expected_bits)
    assert "This task writes it in its place" in job.text(200)
    assert job.printed("chief") == [("worker 0", "0"), ("worker 1", "1"), ("worker 1", "2")]


@pytest.mark.rest
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "dies",
    [
        pytest.param([(0, "naming ckpt-2"), (1, "end of epoch 1")], marks=pytest.mark.long),
        pytest.param([(0, "before step 6"), (1, "writing ckpt-4")], marks=pytest.mark.long),
        pytest.param([(0, "end of epoch 0"), (2, "evaluating after step 15")], marks=pytest.mark.long),
        [(0, "writing ckpt-2"), (1, "writing ckpt-2")],
        pytest.param([(1, "before step 1"), (2, "evaluating after step 5")], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_tasks_die_between_steps(tmp_path, expected_bits, dies):
    with job_in(tmp_path, f"epochs=3, dies={dies}") as job:
        check_end(job, [number for number, _ in dies], expected_bits)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_continuous_saves_continue_over_deaths(tmp_path, expected_bits):
    """The survivors begin the next save at the same boundary, whatever they knew when a task died."""
    dies = [(0, "writing ckpt-2"), (2, "evaluating after step 10")]
    with job_in(tmp_path, f"epochs=3, save_freq='continuous', dies={dies}") as job:
        assert job.wait(SOON_S) == 0, job.text(200)
    assert dict(job.printed("bits")) == {"worker 1": expected_bits}, job.text(200)
    paths = [path for path in job.saved.iterdir() if not path.name.startswith(".")]
    assert len(paths) == 3
    for path in paths:
        SavedCheckpoint(path).verify()


@pytest.mark.rest
@pytest.mark.timeout(400)
@pytest.mark.parametrize("preempted", [1, pytest.param(2, marks=pytest.mark.long)])
def test_sigterm_after_a_death_makes_all_live_tasks_save_and_the_job_resumes_with_all(
    tmp_path, expected_bits, preempted
):
    arguments = f"epochs=3, save_freq=100, dies=[(0, 'before step 4')], preempted_at=({preempted}, 8)"
    # One restart is the replacement of the dead task, the other is of all after SIGTERM.
    with job_in(tmp_path, arguments, max_restarts=2) as job:
        assert job.wait(SOON_S) == 0, job.text(200)
    assert "all tasks save before their next step" in job.text(200)
    assert dict(job.printed("resumed")) == {f"worker {number}": "ckpt-1" for number in range(WORKERS)}
    assert [step for name, step in job.printed("step") if name == "worker 0"][:3] == ["1", "2", "3"]
    assert dict(job.printed("bits")) == {f"worker {number}": expected_bits for number in range(WORKERS)}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_training_goes_on_in_the_other_mode_from_its_checkpoints(tmp_path, tmp_path_factory):
    """Two epochs with fault tolerance and a death, one without, one with: as in one mode, to rounding."""
    with job_in(tmp_path_factory.mktemp("undisturbed"), "epochs=4, tolerates_failures=False") as job:
        assert job.wait(SOON_S) == 0, job.text(200)
    expected = losses_of(job)
    for arguments, first in (
        ("epochs=2, dies=[(0, 'writing ckpt-2')]", "nothing"),
        ("epochs=3, tolerates_failures=False", "ckpt-4"),
        ("epochs=4", "ckpt-7"),
    ):
        with job_in(tmp_path, arguments) as job:
            assert job.wait(SOON_S) == 0, job.text(200)
        assert {path for _, path in job.printed("resumed")} == {first}
    np.testing.assert_allclose(losses_of(job), expected, rtol=1e-5)


def losses_of(job):
    (losses,) = {losses for _, losses in job.printed("losses")}
    return [float(loss) for loss in losses.split()]
