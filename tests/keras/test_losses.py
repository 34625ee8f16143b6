"""Losses that Keras layers add, in replica functions: ``add_loss``, activity and weight regularizers."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx
from checks import not_with_keras_3_12

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


class Penalised(layers.Layer):
    """Adds a loss that depends on the rows."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2, activity_regularizer=keras.regularizers.L2(0.1), kernel_regularizer="l2")

    def call(self, x):
        y = self.dense(x)
        self.add_loss(ops.mean(ops.square(y)))
        return y


def losses_and_gradients(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Penalised(), layers.Dense(1)])

    def step(x):
        with rx.GradientTape() as tape:
            total = rx.nn.compute_average_loss(ops.sum(model(x, training=True) ** 2, axis=-1))
            total += rx.nn.scale_regularization_loss(model.losses)
        gradients = tape.gradient(total, model.trainable_variables)
        return total, rx.get_replica_context().all_reduce("sum", gradients), len(model.losses)

    (batch,) = list(strategy.experimental_distribute_dataset(rx.data.from_arrays(X).batch(8)))
    total, gradients, count = strategy.run(step, (batch,))
    first = [strategy.experimental_local_results(g)[0] for g in gradients]
    return float(strategy.reduce("SUM", total, axis=None)), [np.asarray(g) for g in first], count


@not_with_keras_3_12("adds activity losses as sums over rows, and the formula here is for means")
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_added_losses_are_collected_and_differentiated(num_replicas):
    total, gradients, count = losses_and_gradients(rx.OneDeviceStrategy("cpu:0"))
    ours, our_gradients, our_count = losses_and_gradients(
        rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    )
    assert count == our_count == 3
    assert ours == pytest.approx(total, rel=1e-5)
    for a, b in zip(our_gradients, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # sums in another order
