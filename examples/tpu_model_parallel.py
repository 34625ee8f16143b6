"""Model parallelism with ``TPUStrategy``: each replica has two devices, which split the wide layers of a
model.

On a machine without TPUs, eight virtual CPU devices replace the cores of four chips.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import replicax as rx

rx.config.set_local_devices(8)  # has no effect on TPUs

WIDTH, BATCH_SIZE, NUM_EPOCHS = 512, 50, 3

resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
rx.config.experimental_connect_to_cluster(resolver)
topology = rx.tpu.experimental.initialize_tpu_system(resolver)
assignment = rx.tpu.experimental.DeviceAssignment.build(
    topology, computation_shape=[1, 1, 1, 2], num_replicas=topology.num_tpus_per_task // 2
)
strategy = rx.TPUStrategy(resolver, experimental_device_assignment=assignment)


@keras.saving.register_keras_serializable("examples")
class Columns(keras.layers.Dense):
    """A dense layer of which each logical device computes some of the columns."""

    def call(self, inputs):
        split = rx.get_strategy().experimental_split_to_logical_devices
        return split(super().call(inputs), [1, strategy.num_logical_devices])


def make_model() -> keras.Model:
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                Columns(WIDTH, activation="relu"),
                keras.layers.Dense(WIDTH),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
    return model


def divide(model: keras.Model) -> None:
    """The first wide matrix is split by columns, the second by rows, and Adam's slots in the same way."""
    pieces = {(64, WIDTH): [1, 2], (WIDTH, WIDTH): [2, 1]}
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        if variable.shape in pieces:
            strategy.experimental_split_to_logical_devices(variable, pieces[variable.shape])


def bytes_on_first_device(model: keras.Model) -> int:
    device = strategy.extended.worker_devices[0]
    arrays = [v.value for v in [*model.variables, *model.optimizer.variables]]
    return sum(
        shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device
    )


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Points around ten centres."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, 1_010)
    return generator.normal(size=(10, 64))[labels] + generator.normal(size=(1_010, 64)), labels


def main() -> None:
    keras.utils.set_random_seed(0)
    print(
        f"{strategy.num_replicas_in_sync} replicas of {strategy.num_logical_devices} devices, in {topology}"
    )
    model = make_model()
    whole = sum(v.value.nbytes for v in [*model.variables, *model.optimizer.variables])
    divide(model)
    rows, labels = make_data()
    for epoch in range(1, NUM_EPOCHS + 1):
        logs = model.fit(rows.astype(np.float32), labels, batch_size=BATCH_SIZE, verbose=0).history
        print(f"epoch {epoch}   loss {logs['loss'][0]:.4f}   accuracy {logs['accuracy'][0]:.3f}")
    share = bytes_on_first_device(model) / whole
    print(f"a device holds {share:.1%} of the state of model and optimizer, {whole / 1e6:.1f} MB in all")


if __name__ == "__main__":
    main()
