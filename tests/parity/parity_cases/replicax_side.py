"""replicax's side of the cases; needs eight virtual CPU devices, and Keras on its JAX backend for some."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from parity_cases.side import Side


class ReplicaxSide(Side):
    """The names of replicax."""

    dist = rx
    nn = rx.nn
    Variable = rx.Variable
    ShardedVariable = rx.experimental.ShardedVariable
    VariableSynchronization = rx.VariableSynchronization
    VariableAggregation = rx.VariableAggregation
    GradientTape = rx.GradientTape
    function = staticmethod(rx.function)
    nested_function = staticmethod(jax.jit)

    def make_strategy(self, code: str) -> Any:
        if code == "D":
            return rx.get_strategy()
        if code == "S1":
            return rx.OneDeviceStrategy(self.device(0))
        devices = [self.device(i) for i in range(int(code[1:]))]
        if code == "C2":
            return rx.CentralStorageStrategy(compute_devices=devices, parameter_device=devices[0])
        return rx.MirroredStrategy(devices)

    def device(self, index: int) -> str:
        return f"cpu:{index}"

    def array(self, value: Any, dtype: str = "float32") -> Any:
        return jnp.asarray(value, dtype=dtype)

    def to_float(self, x: Any) -> Any:
        return jnp.asarray(x).astype("float32")

    def to_int(self, x: Any) -> Any:
        return jnp.asarray(x).astype("int32")

    def sum(self, x: Any) -> Any:
        return jnp.sum(x)

    def mean_of_rows(self, x: Any) -> Any:
        return jnp.mean(x, axis=-1)

    def matmul(self, x: Any, y: Any) -> Any:
        return jnp.matmul(x, y)

    def tanh(self, x: Any) -> Any:
        return jnp.tanh(x)

    def stack(self, xs: Sequence[Any]) -> Any:
        return jnp.stack(xs)

    def stop_gradient(self, x: Any) -> Any:
        return jax.lax.stop_gradient(x)

    def global_norm(self, gradients: Sequence[Any]) -> Any:
        return optax.tree.norm(gradients)  # as replicax migrate writes it

    def random_normal(self) -> Any:
        seed = np.random.default_rng().integers(2**31)
        return jax.random.normal(jax.random.key(seed), [])

    def indexed_slices(self, values: Any, indices: Any, shape: Sequence[int] | None = None) -> Any:
        dense_shape = None if shape is None else tuple(shape)
        return rx.IndexedSlices(self.to_float(values), self.to_int(indices), dense_shape)

    def tensor_shape(self, shape: Sequence[int]) -> Any:
        return tuple(shape)

    def ragged(self, rows: Sequence[Sequence[Any]], dtype: str) -> Any:
        return [list(row) for row in rows]

    def dense(self, slices: Any) -> Any:
        zeros = jnp.zeros(tuple(slices.dense_shape), jnp.asarray(slices.values).dtype)
        return zeros.at[slices.indices].add(slices.values)

    def keras(self) -> Any:
        os.environ.setdefault("KERAS_BACKEND", "jax")
        import keras

        return keras

    def save(self, prefix: str, tracked: Any) -> str:
        return rx.Checkpoint(v=tracked).save(prefix)

    def restore(self, path: str, tracked: Any) -> None:
        rx.Checkpoint(v=tracked).restore(path).assert_consumed()

    def checkpoint(self, **tracked: Any) -> Any:
        return rx.Checkpoint(**tracked)

    def checkpoint_manager(self, checkpoint: Any, directory: str) -> Any:
        return rx.CheckpointManager(checkpoint, directory, max_to_keep=2)

    def saved_keys(self, path: str) -> list[str]:
        return [key for key, _ in rx.checkpoint.list_variables(path)]

    def creates_another(self, made: Sequence[Any]) -> bool:
        # The function is traced once for all replicas.
        return not made

    def dataset(self, rows: Any) -> Any:
        return rx.data.from_arrays(rows)

    def range_dataset(self, count: int) -> Any:
        import grain

        return grain.MapDataset.range(count)

    def line_dataset(self, files: Sequence[str]) -> Any:
        return rx.data.from_text_lines(files).map(np.int32)

    def batch_dataset(self, batches: Sequence[Any]) -> Any:
        return list(batches)

    def numpy_dataset(self, rows: Any) -> Any:
        return self.strategy.extended.experimental_make_numpy_dataset(rows)

    def shuffled(self, dataset: Any, order: str) -> Any:
        # There is no cache: arrays are in memory, and a kept order is what it keeps.
        return dataset.shuffle(seed=3, reshuffle_each_iteration=order == "new")

    def distribute(self, dataset: Any, policy: str, options: Any = None) -> Any:
        sharding = rx.data.DistributeOptions(policy)
        return self.strategy.experimental_distribute_dataset(dataset, options, distribute_options=sharding)

    def replica_specs(self, distributed: Any) -> Any:
        def specs(spec: Any) -> Any:
            return [[np.dtype(spec.dtype).name, *spec.shape]] * spec.num_replicas

        return jax.tree.map(specs, distributed.element_spec)

    def read(self, variable: Any) -> Any:
        return np.asarray(variable.read_value() if isinstance(variable, rx.Variable) else variable)

    def distributed_values(self, x: Any) -> tuple[Any, ...] | None:
        if isinstance(x, rx.DistributedValues) and not isinstance(x, rx.Variable):
            return tuple(x.values)
        return None
