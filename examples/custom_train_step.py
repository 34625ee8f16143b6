"""A Keras model with its own ``train_step``, in both styles, trained by ``fit`` on several devices.

The model is an autoencoder: its loss is the error of the reconstruction, and a penalty that keeps the codes
small. Both styles reach the same losses; your program needs only one of them.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits

import replicax as rx

rx.config.set_local_devices(2)  # two virtual CPU devices; has no effect on accelerators

BATCH_SIZE, NUM_EPOCHS = 64, 5


class Autoencoder(keras.Model):
    """The part that both styles share."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(8)])
        self.decoder = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(64)])
        self.mean_loss = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def call(self, images, training=False):
        codes = self.encoder(images)
        return self.decoder(codes), codes


def losses_of_rows(images, outputs):
    """One loss for each row."""
    reconstructions, codes = outputs
    errors = ops.mean(ops.square(reconstructions - images), axis=-1)
    return errors + 1e-3 * ops.mean(ops.square(codes), axis=-1)


class JaxStyle(Autoencoder):
    """Keras's style on JAX: state in, state out. It sees the global batch, so the mean is the plain mean."""

    def train_step(self, state, data):
        trainable, non_trainable, optimizer_state, metrics_state = state
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(trainable):
            outputs, updates = self.stateless_call(trainable, non_trainable, images, training=True)
            losses = losses_of_rows(images, outputs)
            return ops.mean(losses), (losses, updates)

        (_, (losses, non_trainable)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer_state = self.optimizer.stateless_apply(optimizer_state, gradients, trainable)
        metrics_state = self.mean_loss.stateless_update_state(metrics_state, losses)
        logs = {"loss": self.mean_loss.stateless_result(metrics_state)}
        return logs, (trainable, non_trainable, optimizer_state, metrics_state)


class TensorFlowStyle(Autoencoder):
    """TensorFlow's style: variables and a tape. It sees the rows of one replica, as in ``strategy.run``."""

    def train_step(self, data):
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with rx.GradientTape() as tape:
            losses = losses_of_rows(images, self(images, training=True))
            loss = rx.nn.compute_average_loss(losses)  # this replica's share of the global batch's mean
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.mean_loss.update_state(losses)
        return {"loss": self.mean_loss.result()}


def train(style: type[Autoencoder], images: np.ndarray) -> list[float]:
    """The mean loss of each epoch."""
    keras.utils.set_random_seed(0)
    with rx.MirroredStrategy().scope():
        model = style()
        model.compile(optimizer=keras.optimizers.Adam(1e-3))
    return model.fit(images, batch_size=BATCH_SIZE, epochs=NUM_EPOCHS, verbose=0).history["loss"]


def main() -> None:
    images = (load_digits().data / 16).astype(np.float32)  # 1,797 rows: the last batch of an epoch has 5
    jax_style, tensorflow_style = train(JaxStyle, images), train(TensorFlowStyle, images)
    print("epoch   JAX style   TensorFlow style")
    for epoch, (first, second) in enumerate(zip(jax_style, tensorflow_style), start=1):
        print(f"{epoch:5}   {first:9.6f}   {second:16.6f}")
    print("the same losses:", np.allclose(jax_style, tensorflow_style, rtol=1e-4))


if __name__ == "__main__":
    main()
