"""Reading a distributed dataset of TensorFlow; run by ``feeding.py`` with a Python that has TensorFlow."""

import itertools
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

import peer_process


def build(features, rows, batch, shuffles):
    """A function that reads n batches."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    arrays = np.zeros((rows, features), np.float32), np.zeros(rows, np.int32)
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    if shuffles:
        dataset = dataset.shuffle(rows, seed=0)
    iterator = iter(strategy.experimental_distribute_dataset(dataset.batch(batch).repeat()))

    def run(count):
        for _ in itertools.islice(iterator, count):
            pass

    return run


if __name__ == "__main__":
    peer_process.answer(build)
