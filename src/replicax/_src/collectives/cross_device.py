"""Cross-device operations: combine the values of several devices into one. Users may replace them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.collectives import in_replica
from replicax._src.collectives.in_replica import Communicator
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.markers import reduced_p
from replicax._src.values.distributed import DistributedValues
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import CommunicationOptions, ReduceOp


class CrossDeviceOps:
    """The way in which a strategy reduces and broadcasts. Subclass it to change that.

    A subclass overrides some of the three ``*_implementation`` methods. They use jax.numpy on
    ``per_replica_value.values``, a tuple of one array per replica. ``Strategy.reduce`` calls them. Replicas that reduce
    gradients or call ``all_reduce`` call them in a trace.

    Source: tf.distribute.CrossDeviceOps.
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces one per-replica value.

        Args:
          reduce_op: SUM or MEAN.
          per_replica_value: A DistributedValues of [...] per replica.
          destinations: The devices that need the result; in one program all devices get it.

        Returns:
          [...], the sum or mean over replicas.
        """
        op = ReduceOp.parse(reduce_op)
        value = Gathered.of(per_replica_value)
        return self.reduce_implementation(op, value, destinations, options or CommunicationOptions())

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces several per-replica values at once, given with their destinations."""
        op = ReduceOp.parse(reduce_op)
        pairs = [(Gathered.of(value), destinations) for value, destinations in value_destination_pairs]
        return list(self.batch_reduce_implementation(op, pairs, options or CommunicationOptions()))

    def broadcast(self, tensor: Any, destinations: Any = None) -> Any:
        """Copies one array to all replicas."""
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduces one value. Subclasses may override it."""
        del destinations, options
        components = [in_replica.reducible(v, reduce_op) for v in _components(per_replica_value)]
        total = functools.reduce(jnp.add, components)
        return in_replica.from_sum(reduce_op, total, len(components))

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduces several values, by default one by one. Subclasses may override it."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Broadcasts an array. By default it returns the array, because a program has it on every device. Subclasses
        may override it.
        """
        del destinations
        return tensor

    def sum_in_replica(
        self, communicator: Communicator, values: Sequence[Any], options: CommunicationOptions | None
    ) -> list[Any]:
        """Returns the sums over replicas of a replica's arrays, in a program."""
        pairs = [(Gathered(communicator.components(v)), None) for v in values]
        return self.batch_reduce(ReduceOp.SUM, pairs, options)


class Gathered(DistributedValues):
    """The components of all replicas in one place, where arithmetic on them works."""

    __slots__ = ("_components",)

    def __init__(self, components: Sequence[Any]):
        self._components = tuple(components)

    @classmethod
    def of(cls, value: Any) -> Any:
        """Copies the components of a per-replica value from their devices to the default one."""
        if not isinstance(value, DistributedValues) or isinstance(value, cls):
            return value
        values = value.values
        return cls([v if isinstance(v, jax_compat.Tracer) else jnp.asarray(np.asarray(v)) for v in values])

    @property
    def values(self) -> tuple[Any, ...]:
        return self._components

    def as_array(self) -> Any:
        raise InvalidArgumentError("CrossDeviceOps got a per-replica value: use value.values.")


def _components(value: Any) -> Sequence[Any]:
    return value.values if isinstance(value, DistributedValues) else (value,)


class _AllReduce(CrossDeviceOps):
    """Reduces with XLA's all-reduce.

    Args:
      num_packs: The number of buffers into which the values of one call are packed; 0 lets replicax choose.
    """

    def __init__(self, num_packs: int = 1):
        if isinstance(num_packs, bool) or not isinstance(num_packs, int) or num_packs < 0:
            raise InvalidArgumentError(
                f"{type(self).__name__}: num_packs must be an int of at least 0, got {num_packs!r}."
            )
        self._num_packs = num_packs

    def sum_in_replica(
        self, communicator: Communicator, values: Sequence[Any], options: CommunicationOptions | None
    ) -> list[Any]:
        options = options or CommunicationOptions()
        if self._num_packs > 1 and options.bytes_per_pack == 0:
            total = sum(v.size * v.dtype.itemsize for v in values)
            options = CommunicationOptions(-(-total // self._num_packs) or 0)
        return communicator.sum(values, options)


@final
class NcclAllReduce(_AllReduce):
    """All-reduce by the fastest library of the platform: NCCL on GPUs, XLA's own elsewhere."""


@final
class HierarchicalCopyAllReduce(_AllReduce):
    """All-reduce by XLA, which chooses the algorithm. The class exists for TensorFlow programs; the results are the
    same.
    """


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Copies all components to one place, adds them there, and sends the result back.

    Args:
      reduce_to_device: It is ignored, because in one program every device adds. TensorFlow programs may pass it.
      accumulation_fn: A function of a list of arrays that returns their sum; addition by default.
    """

    def __init__(
        self, reduce_to_device: Any = None, accumulation_fn: Callable[[Sequence[Any]], Any] | None = None
    ):
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise InvalidArgumentError(
                f"ReductionToOneDevice: accumulation_fn must be a function of a list of arrays, got "
                f"{accumulation_fn!r}."
            )
        self._device = reduce_to_device
        self._accumulate = accumulation_fn or (lambda values: functools.reduce(jnp.add, values))

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: CommunicationOptions
    ) -> Any:
        del destinations, options
        components = [in_replica.reducible(v, reduce_op) for v in _components(per_replica_value)]
        total = self._accumulate(list(components))
        return in_replica.from_sum(reduce_op, total, len(components))


def reduce_in_replica(
    ops: CrossDeviceOps,
    communicator: Communicator,
    op: ReduceOp,
    value: Any,
    options: CommunicationOptions | None,
) -> Any:
    """Returns ``all_reduce`` of a value, through a strategy's cross-device operations."""
    reduced = in_replica.all_reduce(_Through(ops, communicator), op, value, options)
    return jax.tree_util.tree_map(reduced_p.bind, reduced)


@final
class _Through(Communicator):
    """A communicator whose sums go through cross-device operations."""

    def __init__(self, ops: CrossDeviceOps, inner: Communicator):
        self._ops = ops
        self._inner = inner

    @property
    def num_replicas(self) -> int:
        return self._inner.num_replicas

    def replica_id(self) -> Any:
        return self._inner.replica_id()

    def sum(self, values: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        return self._ops.sum_in_replica(self._inner, [jnp.asarray(v) for v in values], options)

    def components(self, value: Any) -> list[Any]:
        return self._inner.components(value)


# Classes whose reductions are XLA's own all-reduce, so that no method of a user must be called.
ALL_REDUCES = frozenset({NcclAllReduce, HierarchicalCopyAllReduce})
