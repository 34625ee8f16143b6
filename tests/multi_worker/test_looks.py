"""Output of several processes: the first one shows progress, and values of others are shown as theirs."""

import pytest

from checks import path_of_programs
from event_files import files_in, scalars_in
from programs import looking
from replicax.testing import LocalCluster

pytestmark = pytest.mark.timeout(180)


@pytest.mark.rest
def test_the_first_process_shows_progress_and_writes(tmp_path):
    environment = {"KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs(), "REPLICAX_PROGRESS": "1"}
    with LocalCluster(2, environment=environment, timeout_s=170) as cluster:
        cluster.start(looking, (str(tmp_path),))
        results = cluster.wait()
    results.raise_if_failed()
    shown = [results["worker", number].output for number in range(2)]
    halves = [
        (list(lines[: lines.index("[second]")]), list(lines[lines.index("[second]") :])) for lines in shown
    ]
    first, second = ("\n".join(half) for half in halves[0])
    assert "replicax: compiling Sequential.train_step for 2 replicas" in first
    assert "replicax: compiled Sequential.predict_step for 2 replicas in " in first
    assert "1/1" in first
    quiet, said = ("\n".join(half) for half in halves[1])
    assert "1/1" not in quiet
    assert "replicax: " not in quiet
    assert "1/1" in said, "who asks for progress is shown it in every process"
    assert "1/1" in second

    assert len(files_in(tmp_path)) == 2, "one for training, one for validation"
    assert scalars_in(tmp_path / "train").keys() == {"batch_loss", "epoch_loss", "epoch_learning_rate"}

    chief = results["worker", 0].report
    assert "not in this process" in chief["value"]
    assert "one component on each of 2 replicas" in chief["variable"]
    assert "value=" not in chief["variable"]
    assert "(replica 1 · worker 1 cpu:" in chief["picture"]
    for number in range(2):
        assert f"2; this is worker {number}" in results["worker", number].report["strategy"]
