"""`Model.fit` in TensorFlow's guide "Distributed training with TensorFlow", on replicax.

This is the guide's listing line by line, with ``rx`` for ``tf.distribute`` and ``keras`` for ``tf.keras``;
the dataset is made from arrays instead of tf.data. Keras warns about ``input_shape``, here as in the guide.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import replicax as rx

rx.config.set_local_devices(2)  # two virtual CPU devices; has no effect on accelerators

mirrored_strategy = rx.MirroredStrategy()
with mirrored_strategy.scope():
    model = keras.Sequential(
        [keras.layers.Dense(1, input_shape=(1,), kernel_regularizer=keras.regularizers.L2(1e-4))]
    )
    model.compile(loss="mse", optimizer="sgd")

# The guide: tf.data.Dataset.from_tensors(([1.], [1.])).repeat(100).batch(10)
dataset = rx.data.from_arrays((np.ones((1, 1)), np.ones((1, 1)))).repeat(100).batch(10)
model.fit(dataset, epochs=2)
model.evaluate(dataset)

inputs, targets = np.ones((100, 1)), np.ones((100, 1))
model.fit(inputs, targets, epochs=2, batch_size=10)

# Compute a global batch size using a number of replicas.
BATCH_SIZE_PER_REPLICA = 5
global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync
dataset = rx.data.from_arrays((np.ones((1, 1)), np.ones((1, 1)))).repeat(100)
dataset = dataset.batch(global_batch_size)
LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15, 20: 0.175}
learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]
