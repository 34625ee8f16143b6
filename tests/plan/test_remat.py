"""Plans show the memory that rematerialisation saves."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx

CPUS = [f"cpu:{i}" for i in range(4)]
WIDTH, DEPTH = 64, 4


def block(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return x


TWO_DIMENSIONS = {
    "devices_per_replica": 2,
    "layout_map": {"hidden[02].*/kernel": (None, "logical"), "hidden1/kernel": ("logical",)},
    "shard_state": "all",
}


def strategy_of(options):
    """Four replicas, each of them of one device or of two."""
    return rx.MirroredStrategy(None if "devices_per_replica" in options else CPUS, **options)


class Stacked(keras.layers.Layer):
    """Scanned layers: where they are unrolled, XLA on CPUs keeps what it was to compute again."""

    def __init__(self, layer, **options):
        super().__init__(**options)
        self.layer = layer

    def build(self, shape):
        self.kernels = self.add_weight(shape=(DEPTH, WIDTH, WIDTH), name="kernels")

    def call(self, x):
        kernels = keras.ops.cast(self.kernels, self.compute_dtype)
        return jax.lax.scan(lambda y, w: (self.layer(w, y), None), x, kernels)[0]


@pytest.mark.parametrize("policy", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.rest)])
def test_plan_of_fit_in_two_dimensions_needs_less_memory(policy):
    rows = 4096
    x = np.zeros((rows, WIDTH), np.float32)
    needed = []
    for layer in (block, keras.remat(block)):
        strategy = strategy_of({**TWO_DIMENSIONS, "layout_map": {"kernels": (None, None, "logical")}})
        with strategy.scope():
            model = keras.Sequential([keras.Input((WIDTH,)), Stacked(layer, dtype=policy)])
            model.compile("sgd", "mse")
        plan = strategy.plan(model.fit, (x, x), {"batch_size": rows, "verbose": 0})
        needed.append(plan.memory.peak)
    # Without it, 4 activations of each of 4 layers are kept, their sums over 2 devices too; with it, 1 of each layer.
    activation = rows // strategy.num_replicas_in_sync * WIDTH * (4 if policy == "float32" else 2)
    assert needed[0] - needed[1] > 5 * activation, needed
