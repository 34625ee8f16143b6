"""Groups that train alone: one of two processes beside one of one process, through a parameter server."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.testing import LocalCluster

pytestmark = [pytest.mark.rest, pytest.mark.timeout(170)]

GROUP_OF_TWO = """
import time
import jax.numpy as jnp, numpy as np, keras
import replicax as rx

groups = rx.experimental.LocalUpdates(every=4, fragments=2, compression="int8", quorum=1)
strategy = rx.MultiWorkerMirroredStrategy()
with strategy.scope():
    keras.utils.set_random_seed(groups.index)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
groups.attach(model)

@rx.function
def train(x, y):
    def step(x, y):
        with rx.GradientTape() as tape:
            error = jnp.mean((model(x) - y) ** 2) / strategy.num_replicas_in_sync
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(error, variables), variables))
    strategy.run(step, args=(x, y))

of_seed = np.random.default_rng(0)
x = of_seed.normal(size=(8, 3)).astype(np.float32)
for number in range(1000):
    train(x, x.sum(1, keepdims=True))
    groups.step(tokens=16)
    time.sleep(0.01)
    if groups.should_stop:
        break
groups.finish(60)
rx.testing.report(values=[np.array(each.value).tolist() for each in model.weights], **groups.statistics())
"""


def test_processes_of_a_group_have_equal_values_and_those_of_the_other_group(monkeypatch):
    monkeypatch.setenv("REPLICAX_TOKEN", "of-all-tasks")
    with rx.Server({"ps": ["localhost:0"]}, "ps", 0) as server:
        syncers = {
            "REPLICAX_SYNCERS": server.target.removeprefix("grpc://"),
            "REPLICAX_TOKEN": "of-all-tasks",
        }
        for name, value in (*syncers.items(), ("REPLICAX_GROUP", "1/2")):
            monkeypatch.setenv(name, value)
        groups = rx.experimental.LocalUpdates(every=4, fragments=2, compression="int8", quorum=1)
        with (
            LocalCluster(2, environment={"REPLICAX_GROUP": "0/2", **syncers}, timeout_s=150) as cluster,
            groups,
        ):
            cluster.start(GROUP_OF_TWO)
            params = groups.attach([jnp.ones(shape) for shape in ((3, 4), (4,), (4, 1), (1,))])
            for _ in range(8):
                params = groups.step(params, tokens=2)
            groups.stop()
            params = groups.finish(100)
            results = cluster.wait()
            results.raise_if_failed()
    one, other = (result.report for result in results.values())
    assert one["values"] == other["values"]
    assert one["steps"] == other["steps"] < 1000
    assert one["pushes"] > 2
    for own, value in zip(params, one["values"], strict=True):
        np.testing.assert_array_equal(own, np.asarray(value, np.float32))
