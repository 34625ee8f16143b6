"""Leaves that are arrays: variables anywhere, and the leaves of pytrees. Reads them, and sets their values."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.checkpoint.tracked import Leaf
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.held_state import note_of_program
from replicax._src.scope import context
from replicax._src.tracing.bindings import (
    Binding,
    SyncPolicy,
    forget_unshared,
    is_stored_as_parts,
    note_unshared,
)
from replicax._src.values.framework import is_variable, make_binding
from replicax._src.variables.remote_array import RemoteArray
from replicax._src.variables.sharded import ShardedVariable
from replicax._src.variables.shards import ShardsOfOne
from replicax._src.variables.variable import Variable
from replicax._src.vocabulary.options import VariableAggregation

_BLOCK_BYTES = 16 << 20


@final
@dataclass(frozen=True)
class Held:
    """The current value of a leaf.

    Attributes:
      value: An array, or a ``RemoteArray``; None if it is computed from the components.
      components: [R, ...], if replicas have values of their own.
      combine: The name of the ``VariableAggregation`` that computes the value, if it is None.
    """

    value: Any
    components: Any = None
    combine: str = ""


class ValueReader(Protocol):
    """A saved value. Reading it verifies it."""

    @property
    def num_components(self) -> int:
        """The number of components, R; 0 if there are none."""
        ...

    def read(self, index: tuple[Any, ...] = (), into: np.ndarray | None = None) -> np.ndarray:
        """Returns the values of an index, in memory that nobody else holds: in that of ``into``, if it can be."""
        ...

    def read_components(self, index: tuple[Any, ...] = (), into: np.ndarray | None = None) -> np.ndarray:
        """Returns some of the components [R, ...]."""
        ...

    def slabs(self, max_bytes: int | None = None) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yields all values in parts, each with its index."""
        ...


class ArrayLeaf(Leaf):
    """A leaf that is one array.

    Attributes:
      shape, dtype: The shape of the full value, and its dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def held(self) -> Held | None:
        """Returns its current value; None if it has no value yet."""

    @abc.abstractmethod
    def fetch(self, source: ValueReader) -> Any:
        """Reads what this process needs of a saved value of its shape and dtype, and changes nothing."""

    @abc.abstractmethod
    def give(self, fetched: Any) -> None:
        """Sets the value that ``fetch`` has returned."""


Read = Callable[[tuple[Any, ...], np.ndarray | None], np.ndarray]
"""Returns the values of an index: in the given memory, if there is some and it can."""


@final
class HostParts:
    """The parts of an array that this process's devices need, on the host. Parts on CPUs are read into the memory of
    the new array.

    Args:
      shape: The shape of the full array.
      dtype: Its dtype.
      sharding: Its sharding; None for the default device.
      read: Reads the values of an index.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Any, read: Read):
        self._shape, self._dtype, self._sharding = shape, dtype, sharding
        self._on: dict[Any, tuple[Any, ...]] = {None: ()}  # the index of each device
        if sharding is not None:
            self._on = dict(sharding.addressable_devices_indices_map(shape))
        self._parts: dict[Any, np.ndarray] = {}
        self._made: dict[Any, jax.Array] = {}  # by device
        for device, index in self._on.items():
            if _bounds(index) not in self._parts:
                self._parts[_bounds(index)] = self._read(device, index, read)

    def _read(self, device: Any, index: tuple[Any, ...], read: Read) -> np.ndarray:
        with jax_compat.outside_traces():
            new = jax_compat.new_with_memory(self._shape_of(index), self._dtype, self._on_device(device))
        if new is None:
            return read(index, None)
        array, memory = new
        part = read(index, memory)
        if part is memory:
            self._made[device] = array
        return part

    def _shape_of(self, index: tuple[Any, ...]) -> tuple[int, ...]:
        parts = (one.indices(size) for one, size in zip(index, self._shape, strict=False))
        sizes = tuple(stop - start for start, stop, _ in parts)
        return (*sizes, *self._shape[len(sizes) :])

    def _on_device(self, device: Any) -> jax.sharding.SingleDeviceSharding | None:
        if device is None:
            return None
        return jax.sharding.SingleDeviceSharding(device, memory_kind=self._sharding.memory_kind)

    @classmethod
    def like(cls, stored: Any, read: Read) -> Self:
        """Reads what an array of the same shape needs, on the devices of ``stored`` if that is an array on some."""
        is_placed = isinstance(stored, jax.Array) and stored.committed
        return cls(tuple(stored.shape), stored.dtype, stored.sharding if is_placed else None, read)

    def placed(self) -> jax.Array:
        """Returns the new array, which shares no memory with another one. It may be called once.

        It waits, so that the next variable is not read while this one is on its way.
        """
        with jax_compat.outside_traces():
            parts = [self._part_on(device, index) for device, index in self._on.items()]
            if self._sharding is None:
                return jax.block_until_ready(parts[0])
            whole = jax.make_array_from_single_device_arrays(self._shape, self._sharding, parts)
            return jax.block_until_ready(whole)

    def _part_on(self, device: Any, index: tuple[Any, ...]) -> jax.Array:
        if device in self._made:
            return self._made[device]
        part = self._parts[_bounds(index)]
        if device is None:
            return jnp.copy(jnp.asarray(part))
        return jax_compat.copied(jax.device_put(part, self._on_device(device)))


def _bounds(index: tuple[slice, ...]) -> tuple[Any, ...]:
    return tuple((one.start, one.stop) for one in index)


# --- variables ------------------------------------------------------------------------------------------


def binding_of(variable: Any) -> Binding:
    """Returns the binding of a variable, from the strategy in whose scope it was made, if there is one."""
    strategy = context.owner_of(variable)
    if strategy is not None:
        return strategy.bindings.binding_of(variable)
    return make_binding(variable, 1)


@final
class VariableLeaf(ArrayLeaf):
    """A variable, of replicax or a framework, that is one array: on devices, or elsewhere."""

    def __init__(self, variable: Any):
        self.of = variable
        self.binding = binding_of(variable)
        self.label = self.binding.name
        self.shape, self.dtype = self.binding.shape, np.dtype(self.binding.dtype)

    @property
    def stored(self) -> Any:
        """The stored value of the variable; None if it has no value yet."""
        return self.binding.value

    @property
    def _is_table(self) -> bool:
        stored = self.stored
        return isinstance(stored, RemoteArray) and stored.is_table and bool(math.prod(stored.shape))

    def held(self) -> Held | None:
        stored = self.stored
        if stored is None:
            return None
        if self.binding.sync_policy is SyncPolicy.COMPONENTS:
            return Held(None, stored, self.of.aggregation.name)
        if self.binding.sync_policy is SyncPolicy.PARTS and is_stored_as_parts(stored, self.shape):
            return Held(None, stored, VariableAggregation.SUM.name)
        if self.binding.sync_policy is SyncPolicy.SUMMED and self.binding.placed is stored:
            return Held(stored, self.binding.components)
        return Held(stored)

    def fetch(self, source: ValueReader) -> Any:
        stored = self.stored
        if self._is_table:
            for _ in source.slabs(_BLOCK_BYTES):  # verifies it; it may not fit in memory here
                pass
            return source
        if stored is None or isinstance(stored, RemoteArray):
            return source.read()
        if self.binding.sync_policy is SyncPolicy.COMPONENTS:
            if source.num_components == self.binding.num_replicas:
                return HostParts.like(stored, source.read_components)
            spread = self._spread(source)
            return HostParts.like(stored, lambda index, into: spread[index])
        components = self._fetched_components(source)
        if self.binding.sync_policy is SyncPolicy.PARTS:
            topology = context.owner_of(self.of).topology
            return components or HostParts(self.shape, self.dtype, topology.replicated, source.read), None
        return self._host_parts(stored, source.read), components

    def _host_parts(self, stored: Any, read: Read) -> HostParts:
        """Reads what the variable stores in its layout. A value that was assigned since the last program may still be
        replicated.
        """
        strategy = context.owner_of(self.of)
        if strategy is None or strategy.variable_placement.layouts is None:
            return HostParts.like(stored, read)
        return HostParts(self.shape, self.dtype, self.binding.layout or strategy.topology.replicated, read)

    def _fetched_components(self, source: ValueReader) -> HostParts | None:
        """Returns the components behind a variable that shows a sum, if their number fits."""
        strategy = context.owner_of(self.of)
        if not self.binding.sync_policy.is_sum or strategy is None:
            return None
        topology = strategy.topology
        if topology is None or source.num_components != topology.num_replicas:
            return None
        shape = (source.num_components, *self.shape)
        return HostParts(shape, self.dtype, topology.per_replica, source.read_components)

    def give(self, fetched: Any) -> None:
        stored = self.stored
        if self._is_table:
            self._give_rows(stored, fetched)
        elif isinstance(stored, RemoteArray):
            stored.assign(fetched)
        elif stored is None:
            self._begin_with(fetched)
        elif self.binding.sync_policy is SyncPolicy.COMPONENTS:
            self.binding.value = fetched.placed()
        else:
            value, components = fetched
            placed = value.placed()
            if components is not None:
                context.owner_of(self.of).bindings.give_components(self.of, placed, components.placed())
            elif not self.binding.sync_policy.is_sum:
                note_unshared(placed)
            self.binding.value = placed

    def note_compared(self, *, is_adopted: bool, is_of_program: bool) -> None:
        """Notes in which places the value that it was given needs no comparison with those of other processes, because
        they do not compare theirs there. See ``bindings.adopt``, and ``HeldState.adopt`` for loops.
        """
        value = self.stored
        if isinstance(value, jax.Array):
            if not is_adopted:
                forget_unshared(value)
            if is_of_program:
                note_of_program(value)

    def _begin_with(self, value: np.ndarray) -> None:
        """Sets the first value of a variable that is initialized later."""

        def initializer(shape: Sequence[int], dtype: Any = None) -> Any:
            del shape, dtype
            return jnp.array(value)

        self.of._initializer = initializer

    def _spread(self, source: ValueReader) -> np.ndarray:
        """Returns components [R, ...] that combine to the value.

        For a sum, the first replica gets all of it, so that integers stay exact. Components without aggregation are
        repeated in turn.
        """
        num_replicas = self.binding.num_replicas
        if self.of.aggregation is VariableAggregation.NONE and source.num_components:
            return source.read_components()[np.arange(num_replicas) % source.num_components]
        value = source.read()
        if self.of.aggregation is VariableAggregation.SUM:
            return np.concatenate([value[None], np.zeros((num_replicas - 1, *value.shape), value.dtype)])
        return np.broadcast_to(value, (num_replicas, *value.shape))

    def _give_rows(self, stored: RemoteArray, source: ValueReader) -> None:
        """Sets the rows of a table in blocks."""
        stored.make()
        placement, variable = context.owner_of(self.of).variable_placement, self.of

        def assign(ids: Any, rows: Any) -> None:
            whole = variable.read_value() if isinstance(variable, Variable) else variable.value
            variable.assign(whole.at[ids].set(rows))  # only these rows travel

        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        for (rows,), values in source.slabs(max(_BLOCK_BYTES, row_bytes)):
            placement.update(assign, np.arange(rows.start, rows.stop, dtype=np.int32), values)


@final
class ShardsLeaf(ArrayLeaf):
    """A ``ShardedVariable`` whose shards are variables: saved as one array, and restored into any number of shards."""

    def __init__(self, variable: ShardedVariable):
        self.of = variable
        self.label = variable.name
        self.shape, self.dtype = variable.shape, np.dtype(variable.dtype)

    def held(self) -> Held:
        return Held(self.of.shards.read())

    def fetch(self, source: ValueReader) -> np.ndarray:
        return source.read()

    def give(self, fetched: np.ndarray) -> None:
        self.of.assign(fetched)


def leaf_of_variable(tracked: Any) -> Leaf | None:
    """Returns the leaf of a variable; None for other objects."""
    if isinstance(tracked, ShardedVariable):
        shards = tracked.shards
        return VariableLeaf(shards.held[0]) if isinstance(shards, ShardsOfOne) else ShardsLeaf(tracked)
    return VariableLeaf(tracked) if is_variable(tracked) else None
