"""Workers with two devices each, in separate processes."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.testing import server_cluster

ROWS = np.arange(7, dtype=np.float32)
SCRIPT = """
import jax.numpy as jnp, numpy as np
import replicax as rx

strategy = rx.ParameterServerStrategy()
with strategy.scope():
    total = rx.Variable(0.0, aggregation="SUM")
with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
    def step(x):
        strategy.run(lambda x: total.assign_add(x), args=(x,))
    for _ in range(5):
        coordinator.schedule(step, args=(np.float32(1),))
    coordinator.join(60)
print("replicas", strategy.num_replicas_in_sync, "total", float(total))
"""


@pytest.mark.rest
@pytest.mark.timeout(180)
def test_replicas_of_two_workers_count_every_row_once_also_when_a_worker_is_killed():
    with (
        server_cluster(workers=2, ps=1, devices_per_worker=2) as cluster,
        rx.ParameterServerStrategy() as strategy,
        rx.coordinator.ClusterCoordinator(strategy) as coordinator,
    ):
        assert strategy.num_replicas_in_sync == 2
        with strategy.scope():
            total, rows = rx.Variable(0.0, aggregation="SUM"), rx.Variable(0, aggregation="SUM")
        dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(ROWS).batch(4).repeat())
        iterator = iter(coordinator.create_per_worker_dataset(dataset))

        def replica_step(x):
            total.assign_add(jnp.sum(x))
            rows.assign_add(x.shape[0])
            return rx.get_replica_context().all_reduce("SUM", jnp.int32(x.shape[0]))

        def step(iterator):
            return strategy.run(replica_step, args=(next(iterator),))

        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(10)]
        coordinator.join(90)
        cluster.tasks["worker", 1].kill()
        values += [coordinator.schedule(step, args=(iterator,)) for _ in range(50)]
        coordinator.join(90)
        counts = [int(strategy.experimental_local_results(value.fetch())[0]) for value in values]
        assert set(counts) == {3, 4}
        assert int(rows) == sum(counts)
        batches = {4: ROWS[:4].sum(), 3: ROWS[4:].sum()}
        assert float(total) == sum(batches[count] for count in counts)


OWN_SCRIPT = """
import jax.numpy as jnp, numpy as np
import replicax as rx

strategy = rx.ParameterServerStrategy()
with strategy.scope():
    total = rx.Variable(0.0, aggregation="SUM")
def replica_step(x):
    total.assign_add(jnp.sum(x))
    return jnp.sum(x)
for batch in strategy.experimental_distribute_dataset(rx.data.from_arrays(np.ones(5, np.float32)).batch(3)):
    sums = strategy.run(replica_step, args=(batch,))
    print("sums", *map(float, strategy.experimental_local_results(sums)), float(strategy.reduce("SUM", sums, axis=None)))
print("replicas", strategy.num_replicas_in_sync, "total", float(total))
"""


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("script", "options", "printed"),
    [
        (SCRIPT, [], ["replicas 2 total 10.0"]),
        (OWN_SCRIPT, ["--no-chief"], ["sums 2.0 1.0 3.0", "sums 1.0 1.0 2.0", "replicas 2 total 5.0"]),
    ],
    ids=["a coordinator", "each worker runs it"],
)
def test_launch_tells_the_script_how_many_devices_its_workers_have(tmp_path, script, options, printed):
    path = tmp_path / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "replicax", "launch", "--workers", "1", "--ps", "1", *options]
    ran = subprocess.run(
        [*command, "--devices-per-worker", "2", str(path)],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for line in printed:
        assert line in ran.stdout
