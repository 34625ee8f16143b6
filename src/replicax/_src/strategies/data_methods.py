"""The methods of ``Strategy`` for datasets, and for values that differ between replicas or devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.cluster.membership import Membership
from replicax._src.devices.autoshard import AutoShardPolicy, DistributeOptions
from replicax._src.devices.split import InputContext, InputOptions
from replicax._src.input.dataset import DistributedDataset
from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.scope.any_strategy import FunctionRunner
from replicax._src.strategies import data_placement, logical_devices, reduction
from replicax._src.tracing.bindings import placed_by_each
from replicax._src.values.distributed import DistributedValues, Mirrored, is_value
from replicax._src.values.framework import use_imported
from replicax._src.values.narrowing import as_numpy, narrowed_pytree
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import ValueContext

_T = TypeVar("_T")


class _Members(logical_devices.HasLogicalDevices, Protocol):
    """The members of ``Strategy`` that these methods use."""

    _own_worker: Membership | None

    @property
    def runner(self) -> FunctionRunner: ...


if not TYPE_CHECKING:  # users test isinstance, which a Protocol among the base classes makes slow
    _Members = object


class DataMethods(_Members):
    """Datasets, per-replica values, copies for all replicas, and logical devices. The class has no state."""

    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        distribute_options: DistributeOptions | AutoShardPolicy | str | None = None,
    ) -> DistributedDataset:
        """Distributes a dataset of global batches over the replicas.

        A batch of B rows is split into R contiguous slices whose sizes differ by at most one, larger first. No row is
        dropped or repeated, also in a last partial batch. A thread reads ahead of the loop.

        Args:
          dataset: Batches [global_batch, ...]: ``rx.data.from_arrays(...).batch(n)``, files (``rx.data``), a grain
            or tf.data dataset, a torch DataLoader, a Hugging Face dataset, a Keras PyDataset, or any iterable of
            (pytrees of) arrays.
          options: The number of prefetched elements, and their place.
          distribute_options: The way in which workers share the dataset, or only the policy or its name; by default the
            dataset's own policy, or AUTO.

        Returns:
          An iterable of pytrees of ``PerReplica``, or of arrays on the device of a single replica.

        Raises:
          UnsupportedSourceError: ``dataset`` is not a supported dataset.
          UnbatchedDatasetError: Its elements are rows; call its ``batch``.
          NotEnoughFilesError: The policy is FILE, and there are fewer files than workers.

        Source: tf.distribute.Strategy.experimental_distribute_dataset.
        """
        use_imported()  # Keras may get the dataset before any scope is entered
        return data_placement.distribute(self.topology, dataset, options, distribute_options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes the dataset of ``dataset_fn``. It has per-replica batches, and each step takes R of them.

        Args:
          dataset_fn: Called with an ``InputContext``: once, or once per replica with
            ``InputReplicationMode.PER_REPLICA``. With fault tolerance, each worker calls it once with the context of
            each worker, because any of them may adopt a replica.
          options: The number of calls of ``dataset_fn``, and the number and place of prefetched elements.

        Source: tf.distribute.Strategy.distribute_datasets_from_function.
        """
        use_imported()
        return data_placement.distribute_from_function(self.topology, dataset_fn, options, self._own_worker)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes per-replica values from a function.

        Call it in cross-replica context (also inside ``rx.function`` and ``merge_call``).

        Args:
          value_fn: Called once for each replica of this process with a ``ValueContext``. It returns an array or number,
            or a pytree of such, of the same structure and dtypes each time. Shapes may differ, except in
            ``merge_call``. In a trace it is also called for the replicas of other processes, because all processes
            trace one program; with fault tolerance too, because any process may adopt a replica.

        Returns:
          A pytree of ``PerReplica``, or the result of ``value_fn`` with one replica.

        Raises:
          InvalidArgumentError: A leaf is not an array, or structures, ranks or dtypes differ.
          UnsupportedError: Shapes differ in ``merge_call``.
        """
        context.check_may_enter(self)
        num_replicas = self.num_replicas_in_sync
        has_all = self.joins_trace() or self.topology.survivors is not None
        replicas = range(num_replicas) if has_all else self.topology.local_replicas
        results = [value_fn(ValueContext(r, num_replicas)) for r in replicas]
        if num_replicas == 1:
            return results[0]
        values = data_placement.join_components(self.topology, results)
        communicator = context.merge_communicator()
        return values if communicator is None else context.local_components(values, communicator)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a per-replica value on this process's replicas.

        Returns:
          A tuple of one component per replica; a tuple of one pytree per replica for a pytree; ``(value,)`` for others.
        """
        return reduction.local_results(self.topology, value)

    def replicate(self, tree: Any) -> Any:
        """Copies the arrays of a pytree to every replica's device, as state for functional JAX code.

        It converts a ``jax.ShapeDtypeStruct`` to a stand-in for such an array in ``plan``.

        Pass the result to ``run``, and the new state from ``run`` to the next call. With
        ``RunOptions(donate_args=(0,))`` the results reuse the first argument's memory.

        Returns:
          The pytree with ``Mirrored`` leaves, or with arrays on the device of a single replica.
        """

        def copy(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return Mirrored(leaf, self.num_replicas_in_sync)
            if is_value(leaf):
                leaf = leaf.as_array() if isinstance(leaf, DistributedValues) else leaf.value
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
                raise InvalidArgumentError(
                    f"strategy.replicate takes a pytree of arrays and numbers, got {leaf!r}."
                )
            leaf = narrowed_pytree(as_numpy(leaf), f"tree{jax.tree_util.keystr(path)}")
            if is_traced or not self.topology.devices:  # a coordinator has none
                return self.mirrored(jnp.asarray(leaf))
            array = placed_by_each(leaf, self.topology)
            if self.num_replicas_in_sync == 1:
                return self.runner.owned(array)
            return Mirrored(array, self.num_replicas_in_sync, is_ours=True)

        is_traced = self.joins_trace()
        return jax.tree_util.tree_map_with_path(copy, tree, is_leaf=is_value)

    def mirrored(self, array: jax.Array) -> jax.Array | Mirrored:
        """Returns a replicated ``array`` as a ``Mirrored``, or unchanged with one replica."""
        return Mirrored(array, self.num_replicas_in_sync) if self.num_replicas_in_sync > 1 else array

    def unreplicate(self, tree: Any) -> Any:
        """Returns one plain array for each replicated leaf of a pytree, the reverse of ``replicate``.

        Raises:
          PerReplicaUseError: A component is not proven to be the same on all replicas.
        """

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, DistributedValues):
                return leaf
            return jax_compat.on_words(lambda words: jnp.asarray(np.asarray(words)), leaf.as_array())

        return jax.tree_util.tree_map(plain, tree, is_leaf=lambda x: isinstance(x, DistributedValues))

    def experimental_assign_to_logical_device(self, tensor: _T, logical_device_id: int) -> _T:
        """Returns ``tensor`` after a check of the id.

        TensorFlow would run the operations on ``tensor`` only on that device of the replica. Here all devices of a
        replica run one program, and each computes everything that is not sharded. With several devices a warning says
        so, once.

        Args:
          tensor: [...] per replica.
          logical_device_id: Less than the number of logical devices of a replica, which is 1, except for
            ``TPUStrategy`` with a device assignment.

        Raises:
          InvalidArgumentError: There is no such device; or the strategy was made with
            ``experimental_spmd_xla_partitioning=True``.

        Source: tf.distribute.TPUStrategy.experimental_assign_to_logical_device.
        """
        return logical_devices.assign(self, tensor, logical_device_id)

    def experimental_split_to_logical_devices(self, tensor: _T, partition_dimensions: Sequence[int]) -> _T:
        """Shards ``tensor`` over the logical devices of its replica, and with it the computations that use it.

        The values do not change. In traced code (``run``, ``rx.function``, a layer in ``fit``) it is a request to the
        compiler, which also decides the sharding of operations before and after. A variable outside of traced code and
        before the first step is moved: each device keeps its shard from then on. Anything else is returned unchanged.

        Args:
          tensor: An array [...] per replica, or a variable.
          partition_dimensions: The number of shards along each dim. Their product is the number of logical devices.

        Returns:
          The same values, or the variable itself.

        Raises:
          InvalidArgumentError: The number of dims is wrong, a dim is not divisible, or the product is wrong.
          VariableError: A compiled program already uses the variable, or each replica has its own value.

        Source: tf.distribute.TPUStrategy.experimental_split_to_logical_devices.
        """
        return logical_devices.split(self, tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: _T) -> _T:
        """Replicates ``tensor`` over the logical devices of its replica, the reverse of sharding it.

        The values do not change. In ``fit`` the compiler decides.

        Args:
          tensor: An array [...] per replica, or a variable.

        Source: tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices.
        """
        return logical_devices.replicate(self, tensor)
