"""TensorFlow's side of the cases; needs TensorFlow, and Keras on its TensorFlow backend."""

import functools
import os
from collections.abc import Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf

from parity_cases.side import Side

NUM_DEVICES = 4


def start_devices() -> None:
    """Makes the logical CPU devices; once per process, before anything runs."""
    tf.get_logger().setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)


def device(index: int) -> str:
    return f"/cpu:{index}"


@functools.cache
def make_strategy(code: str) -> Any:
    """One strategy of each kind in a process.

    The collectives of a second one, even of the same size, start with the numbers of the first one's, and fail with
    "Shape mismatch in the collective instance".
    """
    if code == "D":
        return tf.distribute.get_strategy()
    if code == "S1":
        return tf.distribute.OneDeviceStrategy(device(0))
    devices = [device(i) for i in range(int(code[1:]))]
    if code == "C2":
        return tf.distribute.experimental.CentralStorageStrategy(devices, device(0))
    return tf.distribute.MirroredStrategy(devices)


class TensorFlowSide(Side):
    """The names of TensorFlow."""

    dist = tf.distribute
    nn = tf.nn
    Variable = tf.Variable
    ShardedVariable = tf.__internal__.distribute.ShardedVariable
    VariableSynchronization = tf.VariableSynchronization
    VariableAggregation = tf.VariableAggregation
    GradientTape = tf.GradientTape
    function = staticmethod(tf.function)
    nested_function = staticmethod(tf.function)

    def make_strategy(self, code: str) -> Any:
        return make_strategy(code)

    def device(self, index: int) -> str:
        return device(index)

    def array(self, value: Any, dtype: str = "float32") -> Any:
        return tf.constant(value, dtype=dtype)

    def to_float(self, x: Any) -> Any:
        return tf.cast(x, tf.float32)

    def to_int(self, x: Any) -> Any:
        return tf.cast(x, tf.int32)

    def sum(self, x: Any) -> Any:
        return tf.reduce_sum(x)

    def mean_of_rows(self, x: Any) -> Any:
        return tf.reduce_mean(x, axis=-1)

    def matmul(self, x: Any, y: Any) -> Any:
        return tf.matmul(x, y)

    def tanh(self, x: Any) -> Any:
        return tf.tanh(x)

    def stack(self, xs: Sequence[Any]) -> Any:
        return tf.stack(xs)

    def stop_gradient(self, x: Any) -> Any:
        return tf.stop_gradient(x)

    def global_norm(self, gradients: Sequence[Any]) -> Any:
        return tf.clip_by_global_norm(gradients, 1.0)[1]

    def random_normal(self) -> Any:
        return tf.random.normal([])

    def indexed_slices(self, values: Any, indices: Any, shape: Sequence[int] | None = None) -> Any:
        dense_shape = None if shape is None else tf.constant(shape)
        return tf.IndexedSlices(self.to_float(values), self.to_int(indices), dense_shape)

    def tensor_shape(self, shape: Sequence[int]) -> Any:
        return tf.TensorShape(shape)

    def ragged(self, rows: Sequence[Sequence[Any]], dtype: str) -> Any:
        return tf.ragged.constant(rows, dtype=dtype)

    def dense(self, slices: Any) -> Any:
        return tf.convert_to_tensor(slices)

    def keras(self) -> Any:
        import keras

        return keras

    def save(self, prefix: str, tracked: Any) -> str:
        return tf.train.Checkpoint(v=tracked).save(prefix)

    def restore(self, path: str, tracked: Any) -> None:
        tf.train.Checkpoint(v=tracked).restore(path).assert_consumed()

    def checkpoint(self, **tracked: Any) -> Any:
        return tf.train.Checkpoint(**tracked)

    def checkpoint_manager(self, checkpoint: Any, directory: str) -> Any:
        return tf.train.CheckpointManager(checkpoint, directory, max_to_keep=2)

    def saved_keys(self, path: str) -> list[str]:
        suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
        keys = [key.removesuffix(suffix) for key, _ in tf.train.list_variables(path) if key.endswith(suffix)]
        return sorted(key for key in keys if key != "save_counter")  # of Checkpoint itself

    def creates_another(self, made: Sequence[Any]) -> bool:
        # Every replica calls the constructor, once, and gets the same variable.
        return len(made) < self.num_replicas

    def dataset(self, rows: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(rows)

    def range_dataset(self, count: int) -> Any:
        return tf.data.Dataset.range(count, output_type=tf.int32)

    def line_dataset(self, files: Sequence[str]) -> Any:
        return tf.data.TextLineDataset(files).map(lambda line: tf.strings.to_number(line, tf.int32))

    def batch_dataset(self, batches: Sequence[Any]) -> Any:
        def spec_of(x: Any) -> Any:
            return tf.TensorSpec([None, *x.shape[1:]] if x.ndim else [], x.dtype)

        signature = tf.nest.map_structure(spec_of, batches[0])
        return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)

    def numpy_dataset(self, rows: Any) -> Any:
        with self.strategy.scope():
            return self.strategy.extended.experimental_make_numpy_dataset(rows)

    def shuffled(self, dataset: Any, order: str) -> Any:
        whole = int(dataset.cardinality())
        mixed = dataset.shuffle(whole, seed=3, reshuffle_each_iteration=order != "kept")
        return mixed.cache() if order == "cached" else mixed

    def distribute(self, dataset: Any, policy: str, options: Any = None) -> Any:
        sharding = tf.data.Options()
        sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
        return self.strategy.experimental_distribute_dataset(dataset.with_options(sharding), options)

    def replica_specs(self, distributed: Any) -> Any:
        def specs(spec: Any) -> Any:
            of_replicas = [spec] if isinstance(spec, tf.TensorSpec) else spec._value_specs
            return [[one.dtype.name, *one.shape.as_list()] for one in of_replicas]

        return tf.nest.map_structure(specs, distributed.element_spec)

    def read(self, variable: Any) -> Any:
        return np.asarray(variable.read_value() if isinstance(variable, tf.Variable) else variable)

    def distributed_values(self, x: Any) -> tuple[Any, ...] | None:
        if isinstance(x, tf.distribute.DistributedValues) and not isinstance(x, tf.Variable):
            return x.values
        return None
