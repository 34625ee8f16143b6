"""A custom training loop with parameter servers: TensorFlow's ParameterServerStrategy and ClusterCoordinator, on replicax.

The structure is that of TensorFlow's guides; only names have changed (see docs/migrating_from_tensorflow.md). Run it as
the chief of a cluster whose other tasks are `replicax server`, for example on this machine:

    replicax launch --workers 2 --ps 2 examples/parameter_server_loop.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import replicax as rx

GLOBAL_BATCH_SIZE = 64
EPOCHS = 4
STEPS_PER_EPOCH = 100

variable_partitioner = rx.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=256 << 10, max_shards=2
)
strategy = rx.experimental.ParameterServerStrategy(
    rx.cluster_resolver.TFConfigClusterResolver(), variable_partitioner=variable_partitioner
)
coordinator = rx.experimental.coordinator.ClusterCoordinator(strategy)


def dataset_fn(input_context):
    """Each worker reads all of the data, in its own order."""
    random = np.random.RandomState(0)
    features = random.rand(2048, 10).astype(np.float32)
    labels = (features.sum(axis=1, keepdims=True) > 5).astype(np.float32)
    dataset = rx.data.from_arrays((features, labels))
    return dataset.shuffle(seed=input_context.input_pipeline_id).batch(GLOBAL_BATCH_SIZE).repeat()


def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


with strategy.scope():
    model = keras.Sequential(
        [keras.Input((10,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
    )
    optimizer = keras.optimizers.RMSprop(learning_rate=0.01)
    accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)

loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)


@rx.function
def step_fn(iterator):
    def replica_fn(batch):
        features, labels = batch
        with rx.GradientTape() as tape:
            logits = model(features, training=True)
            loss = rx.nn.compute_average_loss(loss_object(labels, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(labels, logits)
        return loss

    losses = strategy.run(replica_fn, args=(next(iterator),))
    return strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)


per_worker_iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))

for epoch in range(EPOCHS):
    accuracy.reset_state()
    losses = [coordinator.schedule(step_fn, args=(per_worker_iterator,)) for _ in range(STEPS_PER_EPOCH)]
    coordinator.join()
    mean = np.mean(coordinator.fetch(losses))
    print(f"epoch {epoch + 1}/{EPOCHS}   loss {mean:.4f}   accuracy {float(accuracy.result()):.4f}")

print(f"{int(optimizer.iterations.value)} steps")
