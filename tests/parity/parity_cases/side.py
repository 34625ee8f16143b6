"""The functions that a case may use: the names that TensorFlow and replicax share, and some array operations.

``tensorflow_side.py`` and ``replicax_side.py`` are the two implementations.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

from parity_cases.observing import Raised, attempt


class Side(abc.ABC):
    """One framework, set up for the strategy with the code ``on`` (``registry.STRATEGIES``)."""

    dist: Any  # tf.distribute, or replicax
    nn: Any
    Variable: Any
    ShardedVariable: Any
    VariableSynchronization: Any
    VariableAggregation: Any
    GradientTape: Any
    function: Any  # tf.function, or rx.function
    nested_function: Any  # the framework's own tracing: tf.function, or jax.jit

    def __init__(self, on: str):
        self.on = on

    @functools.cached_property
    def strategy(self) -> Any:
        return self.make_strategy(self.on)

    @property
    def num_replicas(self) -> int:
        return self.strategy.num_replicas_in_sync

    # The framework's own form.

    @abc.abstractmethod
    def make_strategy(self, code: str) -> Any: ...

    @abc.abstractmethod
    def device(self, index: int) -> str: ...

    @abc.abstractmethod
    def array(self, value: Any, dtype: str = "float32") -> Any: ...

    @abc.abstractmethod
    def to_float(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def to_int(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def sum(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def mean_of_rows(self, x: Any) -> Any:
        """[n, d] -> [n]."""

    @abc.abstractmethod
    def matmul(self, x: Any, y: Any) -> Any: ...

    @abc.abstractmethod
    def tanh(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def stack(self, xs: Sequence[Any]) -> Any: ...

    @abc.abstractmethod
    def stop_gradient(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def global_norm(self, gradients: Sequence[Any]) -> Any:
        """What ``tf.clip_by_global_norm`` divides by."""

    @abc.abstractmethod
    def random_normal(self) -> Any:
        """A new random scalar."""

    @abc.abstractmethod
    def indexed_slices(self, values: Any, indices: Any, shape: Sequence[int] | None = None) -> Any:
        """Rows of an array whose other rows are zero or unchanged."""

    @abc.abstractmethod
    def tensor_shape(self, shape: Sequence[int]) -> Any:
        """A shape, as the framework's partitioners expect it."""

    @abc.abstractmethod
    def ragged(self, rows: Sequence[Sequence[Any]], dtype: str) -> Any:
        """Rows of different lengths."""

    @abc.abstractmethod
    def dense(self, slices: Any) -> Any:
        """IndexedSlices -> the array with the same sum."""

    @abc.abstractmethod
    def keras(self) -> Any: ...

    @abc.abstractmethod
    def save(self, prefix: str, tracked: Any) -> str:
        """Writes a checkpoint of one object; returns its path."""

    @abc.abstractmethod
    def restore(self, path: str, tracked: Any) -> None: ...

    @abc.abstractmethod
    def checkpoint(self, **tracked: Any) -> Any:
        """A ``Checkpoint`` of objects, by name."""

    @abc.abstractmethod
    def checkpoint_manager(self, checkpoint: Any, directory: str) -> Any:
        """A manager that keeps two."""

    @abc.abstractmethod
    def saved_keys(self, path: str) -> list[str]:
        """The names of the variables in a checkpoint, sorted."""

    @abc.abstractmethod
    def creates_another(self, made: Sequence[Any]) -> bool:
        """True if a replica function that keeps its variable in ``made`` creates it in this call."""

    # Datasets, made the framework's own way; all have ``batch``, ``repeat``, ``take`` and ``shard``.

    @abc.abstractmethod
    def dataset(self, rows: Any) -> Any:
        """A dataset of the rows of a pytree of NumPy arrays."""

    @abc.abstractmethod
    def range_dataset(self, count: int) -> Any:
        """A dataset of the int32 numbers from 0 to ``count - 1``."""

    @abc.abstractmethod
    def line_dataset(self, files: Sequence[str]) -> Any:
        """A dataset of the int32 number on each line of text files."""

    @abc.abstractmethod
    def batch_dataset(self, batches: Sequence[Any]) -> Any:
        """A dataset of unchanged pytrees of NumPy arrays, whose first dims may vary."""

    @abc.abstractmethod
    def numpy_dataset(self, rows: Any) -> Any:
        """The result of ``extended.experimental_make_numpy_dataset``."""

    @abc.abstractmethod
    def shuffled(self, dataset: Any, order: str) -> Any:
        """The rows of a dataset in a random order: ``new`` or ``kept`` in each epoch, or kept by a ``cache``."""

    @abc.abstractmethod
    def distribute(self, dataset: Any, policy: str, options: Any = None) -> Any:
        """``experimental_distribute_dataset`` with an autoshard policy."""

    @abc.abstractmethod
    def replica_specs(self, distributed: Any) -> Any:
        """The ``element_spec`` of a distributed dataset; for each array ``[[dtype, *shape] of each replica]``."""

    # Included above.

    def replica_id(self) -> Any:
        """The replica id as a float32 scalar, in replica context."""
        return self.to_float(self.dist.get_replica_context().replica_id_in_sync_group)

    def variable(self, value: Any, sync: str = "AUTO", agg: str = "NONE", **options: Any) -> Any:
        """A variable created in the strategy's scope."""
        with self.strategy.scope():
            return self.Variable(
                value,
                synchronization=getattr(self.VariableSynchronization, sync),
                aggregation=getattr(self.VariableAggregation, agg),
                **options,
            )

    def per_replica(self, values: Sequence[Any], dtype: str = "float32") -> Any:
        """One array for each replica, of any shapes."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: self.array(values[context.replica_id_in_sync_group], dtype)
        )

    def local(self, value: Any) -> list[Any]:
        return list(self.strategy.experimental_local_results(value))

    def components(self, variable: Any) -> list[Any]:
        """The copies of a variable; CentralStorage has one."""
        if self.on == "C2":
            return [variable.numpy()]
        return [self.read(x) for x in self.local(variable)]

    @abc.abstractmethod
    def read(self, variable: Any) -> Any:
        """A variable's value (or an array) as a NumPy array."""

    @abc.abstractmethod
    def distributed_values(self, x: Any) -> tuple[Any, ...] | None:
        """The per-replica values if x is a DistributedValues but not a variable, otherwise None."""

    def attempt(self, fn: Callable[[], Any]) -> Any | Raised:
        """The result of ``fn``, or the exception that it raises, as a value."""
        return attempt(fn)
