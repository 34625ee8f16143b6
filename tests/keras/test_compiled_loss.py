"""Steps of Keras 2 style report the loss: with rx.keras.compiled_loss, and with a loss of their own."""

import keras
import numpy as np
import pytest

import replicax as rx

ROWS = 20  # in batches of 8, of which the last has 4
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Compiled(keras.Model):
    """What `replicax migrate` makes of a step with compiled_loss and compiled_metrics."""

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = rx.keras.compiled_loss(self, y, y_pred)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        self.compute_metrics(None, y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, y = data
        rx.keras.compiled_loss(self, y, self(x, training=False))
        self.compute_metrics(None, y, self(x, training=False))
        return {m.name: m.result() for m in self.metrics}


class OwnLoss(keras.Model):
    """Returns the loss of the last batch, as the guides of TensorFlow 2.0 to 2.3 do."""

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(keras.ops.mean((self(x, training=True) - y) ** 2, axis=-1))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss * rx.get_strategy().num_replicas_in_sync}


def fitted(cls, strategy, **compiled):
    with strategy.scope():
        inputs = keras.Input((3,))
        model = cls(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
        model.compile(keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"], **compiled)
    history = model.fit(X, Y + 1.0, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    results = model.evaluate(X, Y + 1.0, batch_size=8, verbose=0, return_dict=True)
    results |= results.pop("compile_metrics", {})  # Keras 3.12 leaves the nested logs of a step as they are
    return history, results


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_step_with_compiled_loss_reports_what_keras_reports(num_replicas):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    plain_history, plain_results = fitted(keras.Model, rx.OneDeviceStrategy("cpu:0"))
    history, results = fitted(Compiled, strategy)
    assert history.keys() == {"loss", "mae"}
    for name in history:
        np.testing.assert_allclose(history[name], plain_history[name], rtol=1e-5)
        np.testing.assert_allclose(results[name], plain_results[name], rtol=1e-5)
    assert plain_history["loss"][0] > 0


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_fit_reports_the_loss_that_a_step_returns_and_does_not_count(num_replicas):
    """Keras would report its own metric of this name, which nobody has updated."""
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        inputs = keras.Input((3,))
        model = OwnLoss(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
        model.compile(keras.optimizers.SGD(0.0))
    history = model.fit(X[:16], Y[:16] + 1.0, batch_size=8, shuffle=False, verbose=0).history
    assert history["loss"] == [pytest.approx(1.0, rel=1e-5)]
