"""The task that evaluates: it is not counted, waits for no task, and works alone. Real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checks import in_a_process_of_its_own

pytestmark = pytest.mark.timeout(180)
SCRIPT = Path(__file__).with_name("with_evaluator.py")


@pytest.mark.rest
def test_the_evaluator_evaluates_what_the_chief_writes(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "replicax", "launch"]
        + ["--workers", "2", "--evaluator", "--devices-per-worker", "2", str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    said = {"worker 0": {}, "worker 1": {}, "evaluator 0": {}}
    evaluated = []
    for line in result.stdout.splitlines():
        task, _, text = line.partition("|")
        if text.startswith(" {"):
            values = json.loads(text)
            said[task.strip()] |= values
            evaluated += [values] if "epoch" in values else []
    workers = said["worker 0"], said["worker 1"]
    assert [(w["replicas"], w["devices"], w["checkpoint"]) for w in workers] == [(4, 2, True), (4, 2, False)]
    alone = said["evaluator 0"]
    assert (alone["replicas"], alone["devices"], alone["checkpoint"]) == (2, 2, True)

    features = np.random.default_rng(0).normal(size=(21, 3)).astype("f")
    labels = features @ np.array([1.0, -2.0, 0.5], "f")
    assert [(values["epoch"], values["rows"]) for values in evaluated] == [(0, 21), (1, 21), (2, 21)]
    for epoch, values in enumerate(evaluated):
        weights = np.load(tmp_path / f"epoch{epoch}.npy")
        assert values["loss"] == pytest.approx(np.mean((features @ weights - labels) ** 2), rel=1e-5)
    np.testing.assert_allclose(weights, workers[0]["trained"], rtol=1e-6)
    assert workers[0]["trained"] == workers[1]["trained"]
    assert evaluated[2]["loss"] < evaluated[0]["loss"]


@pytest.mark.parametrize("evaluators", [{}, {"evaluator": ["127.0.0.1:3"]}], ids=["without", "with"])
@pytest.mark.rest
def test_evaluator_starts_without_workers(evaluators):
    """With its own address in the cluster, or without; no process listens at the others."""
    config = {
        "cluster": {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], **evaluators},
        "task": {"type": "evaluator", "index": 0},
    }
    shown = in_a_process_of_its_own(
        """
        import jax.numpy as jnp
        import numpy as np
        jnp.zeros(1)  # it may have started: no cluster is joined
        import replicax as rx
        strategy = rx.MultiWorkerMirroredStrategy()
        print(strategy.cluster_resolver.task_type, strategy.num_replicas_in_sync, strategy.extended.should_checkpoint)
        with strategy.scope():
            variable = rx.Variable(2.0)
        def step(x):
            return rx.get_replica_context().all_reduce("SUM", jnp.sum(x) * variable)
        rows = rx.data.from_arrays(np.arange(5.0, dtype="f")).batch(3)
        for batch in strategy.experimental_distribute_dataset(rows):
            print(float(strategy.experimental_local_results(strategy.run(step, args=(batch,)))[0]))
        """,
        TF_CONFIG=json.dumps(config),
        JAX_NUM_CPU_DEVICES="2",
    )
    assert shown.splitlines() == ["evaluator 2 True", "6.0", "14.0"]
