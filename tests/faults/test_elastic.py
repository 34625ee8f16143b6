"""Jobs resume with fewer or more workers from the checkpoint of the others, with the same global batches and the same
losses."""

import re

import numpy as np
import pytest

from launched_jobs import LaunchedJob, fitting, looping

pytestmark = [pytest.mark.timeout(250), pytest.mark.rest]
LONG = pytest.mark.long
SOON_S = 100
# Sums of the same float32 rows in another order, a few dozen steps long.
RTOL, ATOL = 1e-5, 1e-6


def losses(lines, word):
    """The loss of each step or epoch, by number, that worker 0 or a single process has printed."""
    found = re.findall(rf"^(?:worker 0 \| )?{word} (\d+) loss (\S+)$", "\n".join(lines), re.MULTILINE)
    return {int(number): float(loss) for number, loss in found}


def alone(program, folder, monkeypatch, capsys, **arguments):
    """The output of the program in this process, on two devices, from start to end."""
    monkeypatch.setenv("REPLICAX_CHECKPOINT_DIR", str(folder / "alone"))
    program(**arguments)
    return capsys.readouterr().out.splitlines()


def run(folder, program, workers, **arguments):
    said = ", ".join(f"{name}={value}" for name, value in arguments.items())
    with LaunchedJob(folder, program, said, workers=workers) as job:
        assert job.wait(SOON_S) == 0, job.text()
    return job.lines


@pytest.mark.parametrize(
    ("workers", "batch_size"),
    [
        ((2, 3), 10),
        *(
            pytest.param(workers, batch_size, marks=LONG)
            for workers, batch_size in (
                ((2, 1), 12),
                ((2, 3), 12),
                ((3, 2), 12),
                ((3, 2), 10),
                ((1, 2, 3), 7),
            )
        ),
    ],
)
def test_loop_resumes_with_another_number_of_workers(tmp_path, monkeypatch, capsys, workers, batch_size):
    """This also holds if the batch does not divide by the number of workers."""
    num_steps, given = 12, {"batch_size": batch_size, "pause_s": 0}
    expected = losses(
        alone(looping, tmp_path, monkeypatch, capsys, num_steps=num_steps * len(workers), **given), "step"
    )
    got = {}
    for number, num_workers in enumerate(workers):
        part = losses(
            run(tmp_path, looping, num_workers, num_steps=num_steps * (number + 1), **given), "step"
        )
        assert sorted(part) == list(range(num_steps * number, num_steps * (number + 1)))
        got |= part
    np.testing.assert_allclose([*got.values()], [*expected.values()], rtol=RTOL, atol=ATOL)


@LONG
@pytest.mark.parametrize("batch_size", [12, 10, 7])
@pytest.mark.parametrize("workers", [(2, 1), (2, 3), (3, 2)])
def test_fit_resumes_with_another_number_of_workers(tmp_path, monkeypatch, capsys, workers, batch_size):
    """Dropout and batch normalisation are those of the global batch."""
    given = {"batch_size": batch_size, "pause_s": 0}
    expected = losses(alone(fitting, tmp_path, monkeypatch, capsys, epochs=2, **given), "epoch")
    run(tmp_path, fitting, workers[0], epochs=1, **given)
    got = losses(run(tmp_path, fitting, workers[1], epochs=2, **given), "epoch")
    assert sorted(got) == sorted(expected) == [0, 1]
    np.testing.assert_allclose([*got.values()], [*expected.values()], rtol=RTOL, atol=ATOL)
