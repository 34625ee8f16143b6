"""Groups that train alone: one of two processes beside one of one process, through a parameter server."""

import threading

import numpy as np
import pytest

import replicax as rx
from replicax.testing import LocalCluster, report  # noqa: F401

pytestmark = [pytest.mark.rest, pytest.mark.timeout(170)]

GROUP_OF_TWO = """
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
        def loss(values):
            prediction, _ = model.stateless_call(values, [], x)
            return jnp.mean((prediction - y) ** 2)
        with rx.GradientTape() as tape:
            error = jnp.mean((model(x) - y) ** 2) / strategy.num_replicas_in_sync
        optimizer.apply_gradients(zip(tape.gradient(error, model.trainable_variables), model.trainable_variables))
    strategy.run(step, args=(x, y))

of_seed = np.random.default_rng(0)
x = of_seed.normal(size=(8, 3)).astype(np.float32)
for number in range(40):
    train(x, x.sum(1, keepdims=True))
    groups.step(tokens=16)
    if groups.should_stop:
        break
groups.finish(60)
rx.testing.report(steps=number, values=[np.array(each.value).tolist() for each in model.weights], **groups.statistics())
"""


def test_processes_of_a_group_have_equal_values_and_those_of_the_other_group(monkeypatch):
    with rx.Server({"ps": ["localhost:0"]}, "ps", 0) as server:
        syncers = {"REPLICAX_SYNCERS": server.target.removeprefix("grpc://")}
        with LocalCluster(2, environment={"REPLICAX_GROUP": "0/2", **syncers}, timeout_s=150) as cluster:
            cluster.start(GROUP_OF_TWO)
            results = cluster.wait()
            results.raise_if_failed()
    reports = [result.report for result in results.values()]
    print(reports)
