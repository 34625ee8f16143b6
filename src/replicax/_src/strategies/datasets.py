"""How a strategy places data: batches cut over the replicas, elements taken per replica."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from replicax._src.errors import InvalidArgumentError
from replicax._src.input.arrays import ArrayDataset, from_arrays
from replicax._src.input.dataset import DistributedDataset
from replicax._src.input.sources import PerReplicaPulls, open_source
from replicax._src.input.split import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    split_offsets,
    split_sizes,
)
from replicax._src.topology import Topology
from replicax._src.values import PerReplica, per_replica_from_components


def distribute(topology: Topology, dataset: Any) -> DistributedDataset:
    """A dataset whose global batches are cut over the replicas."""
    source = open_source(dataset, num_replicas=topology.num_replicas)
    return DistributedDataset(source, functools.partial(place_batch, topology))


def distribute_from_function(
    topology: Topology, dataset_fn: Callable[[InputContext], Any], options: InputOptions
) -> DistributedDataset:
    """A dataset of per-replica batches, as ``dataset_fn`` makes it."""
    num_replicas = topology.num_replicas
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        made = [dataset_fn(InputContext(num_replicas, r, num_replicas)) for r in range(num_replicas)]
        source = PerReplicaPulls.from_each(made)
    else:
        source = PerReplicaPulls.from_one(dataset_fn(InputContext(1, 0, num_replicas)), num_replicas)
    return DistributedDataset(source, functools.partial(place_parts, topology))


def from_numpy(numpy_input: Any) -> ArrayDataset:
    """A dataset over the rows of a nest of arrays; lists are stacked, as TensorFlow does."""
    stacked = jax.tree_util.tree_map(
        np.asarray, numpy_input, is_leaf=lambda x: isinstance(x, list) or not isinstance(x, (tuple, dict))
    )
    return from_arrays(stacked)


def place_batch(topology: Topology, batch: Any) -> Any:
    """Puts a global batch on the devices, cut by the rule of ``split_sizes``."""
    return jax.tree_util.tree_map(functools.partial(_place_array, topology), batch)


def _place_array(topology: Topology, array: Any) -> Any:
    num_replicas = topology.num_replicas
    if num_replicas == 1:
        return jax.device_put(array, topology.replicated)
    if np.ndim(array) == 0:
        raise InvalidArgumentError(
            f"A batch holds the scalar {array!r}; every leaf needs the batch as its first dim, to be cut over "
            f"{num_replicas} replicas."
        )
    rows = array.shape[0]
    if rows % num_replicas == 0:
        stacked = array.reshape(num_replicas, rows // num_replicas, *array.shape[1:])
        return PerReplica(jax.device_put(stacked, topology.per_replica), num_replicas)
    sizes = split_sizes(rows, num_replicas)
    offsets = split_offsets(rows, num_replicas)
    parts = [array[start : start + size] for start, size in zip(offsets, sizes, strict=False)]
    return per_replica_from_components(topology, parts)


def place_parts(topology: Topology, parts: Sequence[Any]) -> Any:
    """Puts one element per replica on the devices."""
    if topology.num_replicas == 1:
        return jax.tree_util.tree_map(lambda a: jax.device_put(a, topology.replicated), parts[0])
    return join_components(topology, parts)


def join_components(topology: Topology, nests: Sequence[Any]) -> Any:
    """One nest of PerReplica from one nest per replica.

    Raises:
      InvalidArgumentError: Leaves that are no arrays; structures, ranks or dtypes that differ.
    """
    flat = [jax.tree_util.tree_flatten(nest) for nest in nests]
    trees = [tree for _, tree in flat]
    if any(tree != trees[0] for tree in trees):
        raise InvalidArgumentError(
            f"The replicas' values differ in structure: {trees}. Return the same nest for each."
        )
    joined = [_join_leaf(topology, column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    return jax.tree_util.tree_unflatten(trees[0], joined)


def _join_leaf(topology: Topology, column: Sequence[Any]) -> PerReplica:
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
    return per_replica_from_components(topology, arrays)
