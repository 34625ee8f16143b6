"""The custom training loop of TensorFlow's guide "Distributed training with TensorFlow", on replicax.

The structure is the guide's; only names have changed (see docs/migrating_from_tensorflow.md).
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import replicax as rx

rx.config.set_local_devices(2)  # two virtual CPU devices; has no effect on accelerators

mirrored_strategy = rx.MirroredStrategy()

# Compute a global batch size using a number of replicas.
BATCH_SIZE_PER_REPLICA = 5
global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync

# Create the model and optimizer inside the strategy's scope, so that their variables are mirrored.
with mirrored_strategy.scope():
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(1e-4))]
    )
    optimizer = keras.optimizers.SGD()

# The guide: tf.data.Dataset.from_tensors(([1.], [1.])).repeat(1000).batch(global_batch_size)
ones = np.ones((1000, 1), np.float32)
dataset = rx.data.from_arrays((ones, ones)).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

# Sets `reduction=None` to leave it to rx.nn.compute_average_loss() below.
loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)


def train_step(inputs):
    features, labels = inputs
    with rx.GradientTape() as tape:
        predictions = model(features, training=True)
        per_example_loss = loss_object(labels, predictions)
        loss = rx.nn.compute_average_loss(per_example_loss)
        model_losses = model.losses
        if model_losses:
            loss += rx.nn.scale_regularization_loss(sum(model_losses))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@rx.function
def distributed_train_step(dist_inputs):
    per_replica_losses = mirrored_strategy.run(train_step, args=(dist_inputs,))
    return mirrored_strategy.reduce(rx.ReduceOp.SUM, per_replica_losses, axis=None)


# Iterate over the complete dataset.
for dist_inputs in dist_dataset:
    print(distributed_train_step(dist_inputs))

# Or run for a given number of steps, with an explicit iterator.
iterator = iter(dist_dataset)
for _ in range(10):
    print(distributed_train_step(next(iterator)))
