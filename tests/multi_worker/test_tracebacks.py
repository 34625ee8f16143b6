"""Tracebacks are short where several processes train."""

import pytest

from replicax.testing import LocalCluster
from short_tracebacks import check, run

SCHEDULED = """
import os, traceback
os.environ["KERAS_BACKEND"] = "jax"
import jax.numpy as jnp, numpy as np, replicax as rx
x = np.ones((2, 3), np.float32)
def product(x):
    return x @ jnp.ones((7, 7))  # SHAPE
def condition(x):
    if jnp.sum(x) > 0:  # IF
        return x
def rows():
    yield x
    raise KeyError("row")  # ROWS
def total(iterator):
    return jnp.sum(next(iterator))
def joined():
    coordinator.schedule(total, (iterator,))
    coordinator.join()  # JOIN
def fetched():
    iterator = iter(coordinator.create_per_worker_dataset(rows))
    results = [coordinator.schedule(total, (iterator,)) for _ in range(2)]
    results[1].fetch()  # FETCH
with rx.testing.server_cluster(workers=1, ps=1):
    strategy = rx.ParameterServerStrategy()
    with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(rows))
        coordinator.schedule(total, (iterator,)).fetch()
        for case in (lambda: coordinator.schedule(product, (x,)), lambda: coordinator.schedule(condition, (x,)), joined, fetched):
            try:
                case()
            except Exception:
                traceback.print_exc()
                print("=== end ===", file=__import__("sys").stderr)
raise SystemExit(1)
"""


@pytest.mark.rest
@pytest.mark.timeout(150)
def test_tracebacks_of_scheduled_functions_are_short(tmp_path):
    texts = run(tmp_path, SCHEDULED).split("=== end ===\n")
    assert len(texts) == 5
    for text, mark in zip(texts, ("# SHAPE", "# IF", "# JOIN", "# FETCH"), strict=False):
        check(text[text.index("Traceback") :], SCHEDULED, mark)
    line = 1 + next(i for i, line in enumerate(SCHEDULED.splitlines()) if line.endswith("# ROWS"))
    for text in texts[2:4]:
        assert f"worker 0 failed: KeyError: 'row' (raised at {tmp_path}/script.py:{line} in rows)" in text


TOGETHER = """
import os
import jax.numpy as jnp, numpy as np, replicax as rx
strategy = rx.MultiWorkerMirroredStrategy()
batch = strategy.experimental_distribute_values_from_function(lambda c: np.ones((2, 3), np.float32))
def step(x):
    return rx.get_replica_context().all_reduce("SUM", x)
strategy.run(step, (batch,))
"""
OF_ALL = (
    TOGETHER + "def step(x):\n    if jnp.sum(x) > 0:  # HERE\n        return x\nstrategy.run(step, (batch,))"
)
OF_ONE = (
    TOGETHER + "if not rx.is_chief():\n    os._exit(3)\nwhile True:\n    strategy.run(step, (batch,))  # HERE"
)


@pytest.mark.rest
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("program", "failing"), [(OF_ALL, [0, 1]), (OF_ONE, [0])], ids=["own", "of another task"]
)
def test_tracebacks_of_several_processes_are_short(program, failing, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(program)
    with LocalCluster(2, timeout_s=100) as cluster:
        cluster.start(script)
        results = cluster.wait()
    for index in failing:
        text = "\n".join(results["worker", index].output)
        assert results["worker", index].exit_code == 1, text
        assert text.count("Traceback (most recent") == 1, text
        check(text[text.index("Traceback (most recent") :], program)
