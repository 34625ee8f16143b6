"""Writes what TensorBoard shows of a training: losses, weights, pictures, and a trace of some steps.

    python examples/summaries.py --logdir /tmp/digits
    tensorboard --logdir /tmp/digits

On two workers, the chief writes the summaries:

    replicax launch --workers 2 examples/summaries.py --logdir /tmp/digits
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sklearn.datasets import load_digits

import replicax as rx

BATCH = 64


def main(logdir: str, epochs: int) -> None:
    in_cluster = bool(os.environ.get("TF_CONFIG"))
    if not in_cluster:
        rx.config.set_local_devices(2)
    strategy = rx.MultiWorkerMirroredStrategy() if in_cluster else rx.MirroredStrategy()
    keras.utils.set_random_seed(0)
    digits = load_digits()
    pictures = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam(3e-3)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        writer = rx.SummaryWriter(logdir)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(inputs):
        x, y = inputs
        with rx.GradientTape() as tape:
            logits = model(x, training=True)
            loss = rx.nn.compute_average_loss(loss_object(y, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(y, logits)
        return loss

    @rx.function
    def distributed_step(inputs):
        return strategy.reduce("SUM", strategy.run(train_step, args=(inputs,)), axis=None)

    dataset = rx.data.from_arrays((pictures, labels)).shuffle(seed=0).batch(BATCH)
    writer.image("digits", pictures, step=0)
    writer.text("model", f"{model.count_params()} weights, {strategy.num_replicas_in_sync} replicas", step=0)
    step = 0
    for epoch in range(epochs):
        accuracy.reset_state()
        for inputs in strategy.experimental_distribute_dataset(dataset):
            writer.scalar("loss", distributed_step(inputs), step)  # does not wait for it
            step += 1
        writer.scalar("accuracy", accuracy.result(), step)
        for variable in model.trainable_variables:
            writer.histogram(variable.path, variable, step)
        if writer.is_writing:
            print(f"epoch {epoch + 1}: accuracy {float(accuracy.result()):.3f}")
    with rx.profile(os.path.join(logdir, "trace")):
        for inputs in strategy.experimental_distribute_dataset(dataset.take(5)):
            loss = distributed_step(inputs)
        float(loss)  # waits
    if writer.is_writing:
        writer.flush()
        print(f"wrote {writer.statistics()['num_written']} summaries")
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logdir", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    main(given.logdir, given.epochs)
