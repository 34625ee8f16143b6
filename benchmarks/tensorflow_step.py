"""The step of ``models.py`` on TensorFlow's MirroredStrategy; run by ``peers.py`` with a Python that has TensorFlow."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
import tensorflow as tf

import peer_process


def build(sizes, rows):
    """A function that runs n steps."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        layers = [tf.keras.layers.Dense(n, activation="relu") for n in sizes[1:-1]]
        model = tf.keras.Sequential([tf.keras.Input((sizes[0],)), *layers, tf.keras.layers.Dense(sizes[-1])])
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            per_example = loss_object(labels, model(features, training=True))
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def distributed_step(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    rng = np.random.default_rng(0)
    features = rng.normal(size=(rows, sizes[0])).astype(np.float32)
    labels = rng.integers(0, sizes[-1], rows).astype(np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(rows)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    def run(steps):
        loss = None
        for _ in range(steps):
            loss = distributed_step(batch)
        loss.numpy()

    return run


if __name__ == "__main__":
    peer_process.answer(build)
