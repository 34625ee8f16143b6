"""Places a strategy's data: splits global batches over the replicas, or takes one element per replica."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.cluster.membership import Membership
from replicax._src.devices import memory
from replicax._src.devices.autoshard import AutoShardPolicy, DistributeOptions
from replicax._src.devices.split import InputContext, InputOptions
from replicax._src.devices.topology import Topology
from replicax._src.input.agreed_steps import AgreedParts
from replicax._src.input.dataset import DistributedDataset, DistributedIterator
from replicax._src.input.opening import UnsupportedSourceError, open_elements
from replicax._src.input.pipeline import ArrayDataset, from_arrays
from replicax._src.input.sources import LocalRows, PerReplicaPulls, Source, open_source
from replicax._src.values.array_types import ConvertibleToArray, HostOrDevice
from replicax._src.values.distributed import PerReplica, largest_shape, pad, per_replica_from_components
from replicax._src.values.narrowing import narrowed, narrowed_pytree
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError


def distribute(
    topology: Topology,
    dataset: Any,
    options: InputOptions | None,
    distribute_options: DistributeOptions | AutoShardPolicy | str | None,
) -> DistributedDataset:
    """Returns a dataset whose global batches are split over the replicas."""
    options = _checked(options)
    if isinstance(dataset, (DistributedDataset, DistributedIterator)):
        raise UnsupportedSourceError(
            f"Got a {type(dataset).__name__}, which is distributed already. Iterate it, or distribute the dataset that it "
            "was made from."
        )
    if options.is_per_replica:
        raise UnsupportedError(
            "InputReplicationMode.PER_REPLICA is only supported in distribute_datasets_from_function, which calls a "
            "function once per replica; experimental_distribute_dataset has one dataset. Leave the mode out."
        )
    policy = None
    if isinstance(distribute_options, DistributeOptions):
        policy = distribute_options.auto_shard_policy
    elif distribute_options is not None:
        policy = AutoShardPolicy.parse(distribute_options)
    source = open_source(dataset, share=topology.share, policy=policy)
    if source.policy in (AutoShardPolicy.FILE, AutoShardPolicy.OFF):
        topology.refuse_survivors(
            f"The policy {source.policy.name} of a dataset, of which each worker reads other batches,"
        )
    return _distributed(source, BatchPlacer(topology), options)


def distribute_from_function(
    topology: Topology,
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
    worker: Membership | None = None,
) -> DistributedDataset:
    """Returns a dataset of per-replica batches, as ``dataset_fn`` makes it.

    Args:
      worker: This worker, if each worker runs its own program.
    """
    options = _checked(options)
    if not callable(dataset_fn):
        raise InvalidArgumentError(
            f"distribute_datasets_from_function needs a function of an InputContext that returns a dataset, got "
            f"{dataset_fn!r}. Distribute a dataset with experimental_distribute_dataset."
        )
    num_replicas, share = topology.num_replicas, topology.share
    if topology.survivors is not None:  # each process reads what all workers would
        made = [dataset_fn(InputContext(num_replicas, r, num_replicas)) for r in range(num_replicas)]
        source = PerReplicaPulls.from_each(made)
    elif options.is_per_replica:
        if share.num_workers > 1 or worker is not None:
            raise UnsupportedError(
                "InputReplicationMode.PER_REPLICA is only supported in strategies of one process. Leave the mode out: the "
                "function is called once for each worker."
            )
        made = [dataset_fn(InputContext(num_replicas, r, num_replicas)) for r in range(num_replicas)]
        source = PerReplicaPulls.from_each(made)
    else:
        number, index = (
            (share.num_workers, share.worker_index)
            if worker is None
            else (worker.num_workers, worker.id_in_cluster)
        )
        context = InputContext(number, index, num_replicas)
        elements = [open_elements(dataset_fn(context))] * share.replicas_per_worker
        source = PerReplicaPulls(elements, num_replicas)
    return _distributed(source, PartsPlacer(topology), options)


def _checked(options: InputOptions | None) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise InvalidArgumentError(
            f"options must be an rx.InputOptions, got {options!r}. To set how workers share a dataset, pass "
            "distribute_options=rx.data.DistributeOptions(...)."
        )
    return options or InputOptions()


def _distributed(
    source: Source, placer: BatchPlacer | PartsPlacer, options: InputOptions
) -> DistributedDataset:
    return DistributedDataset(
        source,
        placer,
        buffer_size=options.experimental_per_replica_buffer_size,
        places_ahead=options.experimental_fetch_to_device,
    )


def from_numpy(numpy_input: Any) -> ArrayDataset:
    """Returns a dataset over the rows of a pytree of arrays. It copies arrays and stacks lists, as TensorFlow does."""
    stacked = jax.tree_util.tree_map(
        np.array, numpy_input, is_leaf=lambda x: isinstance(x, list) or not isinstance(x, (tuple, dict))
    )
    return from_arrays(stacked)


@dataclass(frozen=True)
class Stack:
    """The batches of several steps on the devices, for one program that loops over them.

    Attributes:
      arrays: The arrays [capacity, R, ...], or [capacity, ...] with one replica.
      form: The form of one step; see ``step_of``. It is hashable.
    """

    arrays: Sequence[jax.Array]
    form: StepForm


@dataclass(frozen=True)
class StepForm:
    """The conversion of the arrays of one step to the argument of the step function.

    Attributes:
      tree: The structure of the pytree.
      shapes: For each array, the shapes on the replicas if they differ, else None.
      num_replicas: The number of replicas R.
    """

    tree: Any
    shapes: tuple[tuple[tuple[int, ...], ...] | None, ...]
    num_replicas: int

    def step_of(self, arrays: Sequence[jax.Array]) -> Any:
        """Returns the pytree of PerReplica for arrays [R, ...], or of the arrays with one replica."""
        if self.num_replicas == 1:
            return self.tree.unflatten(arrays)
        values = [PerReplica(a, self.num_replicas, s) for a, s in zip(arrays, self.shapes, strict=True)]
        return self.tree.unflatten(values)


@final
class BatchPlacer:
    """Places LocalRows: every replica gets its rows of each array."""

    def __init__(self, topology: Topology):
        self._topology = topology

    @property
    def topology(self) -> Topology:
        """The replicas' devices."""
        return self._topology

    def place(self, step: LocalRows) -> Any:
        """Returns a pytree of PerReplica, or of arrays on the device of a single replica."""
        topology, sizes = self._topology, step.sizes
        arrays = narrowed(step.arrays, step.tree, "batch")
        if topology.num_replicas == 1:
            return step.tree.unflatten([_put_whole(topology, array) for array in arrays])
        all_sizes = sizes if topology.peers is None or step.all_sizes is None else step.all_sizes
        is_even = min(all_sizes) == max(all_sizes)
        values = [
            PerReplica(
                _put_rows(topology, _rows_of_replicas(array, sizes, max(all_sizes))),
                topology.num_replicas,
                None if is_even else _shapes(array, all_sizes),
            )
            for array in arrays
        ]
        return step.tree.unflatten(values)

    def stack(self, steps: Sequence[LocalRows], capacity: int) -> Stack:
        """Places several steps of one signature."""
        topology, sizes = self._topology, steps[0].sizes
        all_sizes = steps[0].all_sizes or sizes
        arrays_of_steps = [narrowed(step.arrays, step.tree, "batch") for step in steps]
        columns = [list(map(np.asarray, column)) for column in zip(*arrays_of_steps, strict=True)]
        is_even = min(all_sizes) == max(all_sizes)
        shapes = [None if is_even else _shapes(a, all_sizes) for a in steps[0].arrays]
        form = StepForm(steps[0].tree, tuple(shapes), topology.num_replicas)
        if topology.num_replicas == 1:
            arrays = [memory.stack(column, capacity) for column in columns]
            return Stack(topology.put_whole(arrays), form)
        most = max(all_sizes)
        arrays = [
            memory.stack([_rows_of_replicas(a, sizes, most) for a in column], capacity) for column in columns
        ]
        return Stack(topology.put_stacked(arrays), form)

    def signature(self, step: LocalRows) -> Hashable:
        """Returns a key that is equal for steps that can be stacked."""
        return step.tree, step.all_sizes or step.sizes, tuple((a.shape, a.dtype) for a in step.arrays)


def _shapes(array: HostOrDevice, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((size, *array.shape[1:]) for size in sizes)


def _put_rows(topology: Topology, array: Any) -> jax.Array:
    """Puts the rows of an array, one for each local replica, on their devices. Returns [R, ...]."""
    if topology.survivors is not None:
        return _put_whole(topology, array)
    rows = [array[replica : replica + 1] for replica in range(len(array))]
    if not isinstance(array, jax.Array):
        shape = (topology.num_replicas, *array.shape[1:])
        return topology.put_parts(shape, rows, topology.per_replica)
    if topology.peers is None:
        return jax.device_put(array, topology.per_replica)
    return topology.join_rows(rows, array.shape[1:])


def _put_whole(topology: Topology, array: HostOrDevice) -> jax.Array:
    """Puts an array on the devices of the only replica, or on the device of a process with all rows."""
    if isinstance(array, jax.Array):
        return topology.put_whole(array)
    return topology.put_parts(array.shape, [array], topology.replicated)


def _rows_of_replicas(array: HostOrDevice, sizes: tuple[int, ...], most: int) -> Any:
    """Returns the rows of an array as [replicas, most, ...], padded with zeros for replicas with fewer rows."""
    shape = (len(sizes), most, *array.shape[1:])
    if min(sizes) == most:
        return array.reshape(shape)
    stops = list(itertools.accumulate(sizes))
    parts = [array[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
    if isinstance(array, jax.Array):
        return jnp.stack([pad(part, shape[1:]) for part in parts])
    result = memory.empty(shape, array.dtype)
    for rows, part in zip(result, parts, strict=True):
        rows[: len(part)], rows[len(part) :] = part, 0
    return result


@final
class PartsPlacer:
    """Places lists of one pytree for each replica."""

    def __init__(self, topology: Topology):
        self._topology = topology

    @property
    def topology(self) -> Topology:
        """The replicas' devices."""
        return self._topology

    def place(self, step: Sequence[Any]) -> Any:
        """Returns a pytree of PerReplica, or of arrays on the device of a single replica."""
        if self._topology.num_replicas == 1:
            return self._topology.put_whole(narrowed_pytree(step[0], "batch"))
        return join_components(self._topology, step)

    def stack(self, steps: Sequence[Sequence[Any]], capacity: int) -> Stack:
        """Places several steps of one signature."""
        topology, is_single = self._topology, self._topology.num_replicas == 1
        tree, _ = _components(steps[0])
        columns_of_steps = [_components(step)[1] for step in steps]
        shapes: list[tuple[tuple[int, ...], ...] | None] = []
        arrays = []
        for columns in zip(*columns_of_steps, strict=True):  # the replicas' arrays of one leaf, for each step
            its_shapes = _shapes_of_all(steps[0], len(shapes)) or tuple(array.shape for array in columns[0])
            padded = largest_shape(its_shapes)
            rows = [np.stack([pad(np.asarray(array), padded) for array in column]) for column in columns]
            arrays.append(memory.stack([row[0] for row in rows] if is_single else rows, capacity))
            shapes.append(its_shapes if len(set(its_shapes)) > 1 else None)
        placed = topology.put_whole(arrays) if is_single else topology.put_stacked(arrays)
        return Stack(placed, StepForm(tree, tuple(shapes), topology.num_replicas))

    def signature(self, step: Sequence[Any]) -> Hashable:
        """Returns a key that is equal for steps that can be stacked."""
        flat = [jax.tree_util.tree_flatten(part) for part in step]
        local = tuple((tree, tuple((a.shape, a.dtype) for a in leaves)) for leaves, tree in flat)
        return (local, tuple(map(tuple, step.shapes))) if isinstance(step, AgreedParts) else local


def join_components(topology: Topology, pytrees: Sequence[Any]) -> Any:
    """Joins one pytree per replica into one pytree of PerReplica.

    Raises:
      InvalidArgumentError: A leaf is not an array, or structures, ranks or dtypes differ.
    """
    tree, columns = _components(pytrees)
    return tree.unflatten(
        [
            per_replica_from_components(topology, column, _shapes_of_all(pytrees, position))
            for position, column in enumerate(columns)
        ]
    )


def _shapes_of_all(pytrees: Sequence[Any], position: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the shapes of one leaf on all replicas if the processes have agreed on them; else None."""
    return tuple(pytrees.shapes[position]) if isinstance(pytrees, AgreedParts) else None


def _components(pytrees: Sequence[Any]) -> tuple[Any, list[list[HostOrDevice]]]:
    """Returns the common structure of the replicas' pytrees, and the replicas' arrays of each leaf."""
    flat = [jax.tree_util.tree_flatten(pytree) for pytree in pytrees]
    flat = [(narrowed(leaves, tree, "batch"), tree) for leaves, tree in flat]
    trees = [tree for _, tree in flat]
    if any(tree != trees[0] for tree in trees):
        raise InvalidArgumentError(
            f"The replicas' values differ in structure: {trees}. Return the same pytree for each."
        )
    return trees[0], [_checked_leaf(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]


def _checked_leaf(column: Sequence[ConvertibleToArray]) -> list[HostOrDevice]:
    arrays = []
    for value in column:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        if isinstance(array, np.ndarray) and array.dtype.kind not in "biufcV":
            raise InvalidArgumentError(
                f"A per-replica value must be an array or a number, got {value!r}, a {type(value).__name__}."
            )
        arrays.append(array)
    ranks = {a.ndim for a in arrays}
    dtypes = {str(a.dtype) for a in arrays}
    if len(ranks) > 1 or len(dtypes) > 1:
        raise InvalidArgumentError(
            f"The replicas' values must have one rank and one dtype; got shapes {[tuple(a.shape) for a in arrays]} and "
            f"dtypes {[str(a.dtype) for a in arrays]}. Sizes may differ, numbers of dims may not."
        )
    return arrays
