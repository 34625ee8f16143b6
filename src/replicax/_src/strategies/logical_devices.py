"""Shards and replicates values and variables over the logical devices of a replica. Values do not change."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicax._src.devices.sharding_specs import Axes, axes_of
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.scope.any_strategy import AnyStrategy
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.markers import logical_p
from replicax._src.values.distributed import PerReplica
from replicax._src.values.framework import is_variable
from replicax._src.vocabulary.errors import InvalidArgumentError, MixedStrategiesError

_T = TypeVar("_T")
log = logging.getLogger("replicax")
_told: weakref.WeakSet[Any] = weakref.WeakSet()


class HasLogicalDevices(AnyStrategy, Protocol):
    """A strategy whose replicas may have several devices each."""

    partitions_by_spmd: bool

    @property
    def num_logical_devices(self) -> int: ...


def assign(strategy: HasLogicalDevices, tensor: _T, logical_device_id: int) -> _T:
    """See ``Strategy.experimental_assign_to_logical_device``."""
    if strategy.partitions_by_spmd:
        raise InvalidArgumentError(
            "Cannot assign a tensor to a logical device in SPMD mode: all logical devices run one program there. To disable "
            "SPMD, make the TPUStrategy with `experimental_spmd_xla_partitioning=False`; to divide the tensor over the "
            "logical devices, use experimental_split_to_logical_devices."
        )
    count = strategy.num_logical_devices
    is_id = isinstance(logical_device_id, int) and not isinstance(logical_device_id, bool)
    if not is_id or not 0 <= logical_device_id < count:
        raise InvalidArgumentError(
            f"`logical_core_id` to assign must be lower then total number of logical devices per replica, got "
            f"{logical_device_id!r}; a replica of {type(strategy).__name__} has {count} (0 to {count - 1})."
        )
    if count > 1 and strategy not in _told:
        _told.add(strategy)
        log.warning(
            "experimental_assign_to_logical_device has no effect: all %d logical devices of a replica run one program, and "
            "each computes everything that is not sharded. Shard work with experimental_split_to_logical_devices.",
            count,
        )
    return tensor


def split(strategy: HasLogicalDevices, tensor: _T, partition_dimensions: Sequence[int]) -> _T:
    """See ``Strategy.experimental_split_to_logical_devices``."""
    topology = strategy.topology
    pieces = _checked_pieces(tensor, partition_dimensions, strategy.num_logical_devices)
    if topology.num_logical_devices == 1:
        return tensor
    if is_variable(tensor) and current_capture() is None:
        return _lay_out(strategy, tensor, axes_of(topology.logical_spec(pieces)))
    return _marked(topology, tensor, topology.logical_spec(pieces, PartitionSpec.UNCONSTRAINED))


def replicate(strategy: AnyStrategy, tensor: _T) -> _T:
    """See ``Strategy.experimental_replicate_to_logical_devices``."""
    topology = strategy.topology
    if topology.num_logical_devices == 1:
        return tensor
    if is_variable(tensor) and current_capture() is None:
        return _lay_out(strategy, tensor, ())
    return _marked(topology, tensor, PartitionSpec(*[None] * len(_shape(tensor))))


def _checked_pieces(tensor: Any, partition_dimensions: Sequence[int], count: int) -> tuple[int, ...]:
    shape = _shape(tensor)
    try:
        pieces = tuple(int(piece) for piece in partition_dimensions)
    except (TypeError, ValueError):
        pieces = ()
    if any(piece < 1 for piece in pieces) or (not pieces and shape):
        raise InvalidArgumentError(
            f"`partition_dimensions` must be a list of whole numbers of at least 1, one for each dim: the number "
            f"of its shards. Received {partition_dimensions!r} for shape {shape}."
        )
    if len(pieces) != len(shape):
        raise InvalidArgumentError(
            f"Length of `partition_dimensions` must equal to the rank of `tensor.shape` ({len(shape)}: {shape}). Received "
            f"len(partition_dimensions)={len(pieces)}."
        )
    for dim, (size, piece) in enumerate(zip(shape, pieces, strict=True)):
        if size % piece:
            raise InvalidArgumentError(
                f"Tensor shape at `partition_dimensions[{dim}]` must be divisible by corresponding value specified by "
                f"`partition_dimensions` ({piece}). Received: {size}, of shape {shape}. Cut another dim, or pad this one to "
                f"{math.ceil(size / piece) * piece}."
            )
    if math.prod(pieces) != count:
        raise InvalidArgumentError(
            f"The product of `partition_dimensions` should be the same as the number of logical devices (={count}). Received "
            f"`partition_dimensions`={list(pieces)}, and their product is {math.prod(pieces)}."
        )
    return pieces


def _shape(tensor: Any) -> tuple[int, ...]:
    """Returns the shape that one replica sees."""
    if isinstance(tensor, PerReplica):
        return tensor.component_shape(0)
    return tuple(tensor.shape) if is_variable(tensor) else jnp.shape(tensor)


def _marked(topology: Topology, tensor: Any, spec: PartitionSpec) -> Any:
    """Returns the tensor, and in a trace marks its sharding for the compiler."""
    value = tensor.value if is_variable(tensor) else tensor
    if not isinstance(value, jax_compat.Tracer):
        return tensor
    return logical_p.bind(value, mesh=topology.mesh, spec=spec)


def _lay_out(strategy: AnyStrategy, variable: _T, axes: Axes) -> _T:
    owner = context.owner_of(variable)
    if owner is not None and owner is not strategy:
        raise MixedStrategiesError(
            f"The variable was made under {owner!r}, but should be sharded over the logical devices of {strategy!r}. Make it in "
            "the scope of the strategy that shards it."
        )
    strategy.bindings.lay_out(variable, axes, strategy.topology)
    return variable
