"""What steps with sharded state exchange."""

import math

import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx

pytestmark = pytest.mark.rest
ROWS, BATCH = 199, 64
CPUS = [f"cpu:{i}" for i in range(8)]


def bytes_divided(variables, count):
    """The bytes that a device should hold: a ``count``-th of each variable with a divisible dim."""
    sizes = [(math.prod(v.shape) * np.dtype(v.dtype).itemsize, v.shape) for v in variables]
    return sum(n // count if any(d % count == 0 for d in shape) else n for n, shape in sizes)


def test_steps_gather_variables_but_no_activations():
    strategy = rx.MirroredStrategy(CPUS[:4], shard_state="all")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), layers.Dense(256, "relu"), layers.Dense(256), layers.Dense(18)]
        )
        model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    data = (np.zeros((ROWS, 64), np.float32), np.zeros((ROWS, 18), np.float32))
    # With so few rows, a partitioner would rather move the activations.
    plan = strategy.plan(model.fit, data, {"batch_size": 8}, topology="cpu:4")
    held = {array.name: array.device_bytes for array in plan.arrays if array.role == "variable"}
    for variable in [*model.variables, *model.optimizer.variables]:
        assert held[variable.path] == bytes_divided([variable], 4), variable.path
    gathered = [c.bytes * c.count for c in plan.compiled if c.kind == "all-gather"]
    divided = [v for v in model.trainable_variables if bytes_divided([v], 4) < bytes_divided([v], 1)]
    assert len(divided) == 5
    assert sum(gathered) == bytes_divided(divided, 1)
    assert {c.kind for c in plan.compiled} == {"all-gather", "all-reduce"}
