"""Leaves that are arrays: variables anywhere, and the leaves of pytrees. Reads them, and sets their values."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src import context, jax_compat
from replicax._src.checkpoint.tracked import Leaf
from replicax._src.devices.topology import Topology
from replicax._src.framework import is_variable, make_binding
from replicax._src.options import VariableAggregation
from replicax._src.tracing.bindings import Binding, SyncPolicy, note_unshared, own_copy
from replicax._src.variables.server_arrays import ServerArray
from replicax._src.variables.sharded import ShardedVariable
from replicax._src.variables.shards import ShardsOfOne
from replicax._src.variables.variable import Variable

_BLOCK_BYTES = 16 << 20


@final
@dataclass(frozen=True)
class Held:
    """The current value of a leaf.

    Attributes:
      value: An array, or a ``ServerArray``; None if it has components only.
      components: [R, ...], if replicas have values of their own.
      combine: Computes the value from the components, on the host.
      topology: The topology of the devices, if it is known.
    """

    value: Any
    components: Any = None
    combine: Callable[[np.ndarray], np.ndarray] | None = None
    topology: Topology | None = None


class ArrayLeaf(Leaf):
    """A leaf that is one array."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the full value."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """The dtype, as NumPy has it."""

    @abc.abstractmethod
    def held(self) -> Held | None:
        """Returns its current value; None if it has no value yet."""

    @abc.abstractmethod
    def give(self, value: np.ndarray, components: np.ndarray | None) -> None:
        """Sets a value of its shape and dtype, and the components that were saved with it, if any."""

    @property
    def takes_rows(self) -> bool:
        """True if it should get rows rather than a full value, which may not fit in memory here."""
        return False

    def give_rows(self, blocks: Iterable[tuple[int, np.ndarray]]) -> None:
        """Sets its value block by block: the number of a row, and the rows from it on. Only if ``takes_rows`` is
        true.
        """
        raise AssertionError("this leaf does not take rows")

    def finish(self) -> None:
        """Called when all leaves have their values."""


def placed_as(value: np.ndarray, stored: Any) -> jax.Array:
    """Returns a new copy of a host value, on the devices of ``stored`` if that is an array."""
    with jax_compat.outside_traces():
        if isinstance(stored, jax.Array) and stored.committed:
            return jnp.copy(jax_compat.put(value, stored.sharding))
        return jnp.copy(jnp.asarray(value))


# --- variables ------------------------------------------------------------------------------------------


def binding_of(variable: Any) -> Binding:
    """Returns the binding of a variable, from the strategy in whose scope it was made, if there is one."""
    strategy = context.owner_of(variable)
    if strategy is not None:
        return strategy.bindings.binding_of(variable)
    return make_binding(variable, 1)


@final
class VariableLeaf(ArrayLeaf):
    """A variable, of replicax or a framework, that is one array: on devices, or on parameter servers."""

    def __init__(self, variable: Any):
        self.of = variable
        self.binding = binding_of(variable)
        self.label = self.binding.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.binding.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.binding.dtype)

    @property
    def stored(self) -> Any:
        """The stored value of the variable; None if it has no value yet."""
        return self.binding.value

    @property
    def _topology(self) -> Topology | None:
        strategy = context.owner_of(self.of)
        return None if strategy is None else strategy.topology

    def held(self) -> Held | None:
        stored, topology = self.stored, self._topology
        if stored is None:
            return None
        if self.binding.sync_policy is SyncPolicy.COMPONENTS:
            return Held(None, stored, self._combined, topology)
        if self.binding.sync_policy is SyncPolicy.SUMMED and self.binding.placed is stored:
            return Held(stored, self.binding.components, None, topology)
        return Held(stored, topology=topology)

    def _combined(self, components: np.ndarray) -> np.ndarray:
        """Returns the value as it is read outside of replicas; the first component if the components are not
        aggregated.
        """
        if self.of.aggregation is VariableAggregation.SUM:
            return np.asarray(np.sum(components, axis=0, dtype=components.dtype))
        if self.of.aggregation is VariableAggregation.MEAN:
            total = np.sum(components, axis=0, dtype=components.dtype)
            return np.asarray(total / np.asarray(len(components), components.dtype)).astype(components.dtype)
        return components[0]

    def give(self, value: np.ndarray, components: np.ndarray | None) -> None:
        stored = self.stored
        if stored is None:
            self._begin_with(value)
        elif isinstance(stored, ServerArray):
            self._give_servers(stored, value)
        elif self.binding.sync_policy is SyncPolicy.COMPONENTS:
            self._set(placed_as(self._spread(value, components), stored))
        elif self.binding.sync_policy is SyncPolicy.SUMMED:
            self._give_summed(placed_as(value, stored), components)
        else:
            placed = placed_as(value, stored)
            note_unshared(placed)
            self._set(placed)

    def _set(self, value: Any) -> None:
        self.binding.value = value

    def _begin_with(self, value: np.ndarray) -> None:
        """Sets the first value of a variable that is initialized later."""
        first = np.array(value)

        def initializer(shape: Sequence[int], dtype: Any = None) -> Any:
            del shape, dtype
            return jnp.asarray(first)

        self.of._initializer = initializer

    def _spread(self, value: np.ndarray, components: np.ndarray | None) -> np.ndarray:
        """Returns components [R, ...]: the saved ones if their number fits, else components that combine to the
        value.

        For a sum, the first replica gets all of it, so that integers stay exact. Components without aggregation are
        repeated in
        turn.
        """
        num_replicas = self.binding.num_replicas
        if components is not None and len(components) == num_replicas:
            return components
        if self.of.aggregation is VariableAggregation.SUM:
            return np.concatenate([value[None], np.zeros((num_replicas - 1, *value.shape), value.dtype)])
        if self.of.aggregation is VariableAggregation.NONE and components is not None:
            return components[np.arange(num_replicas) % len(components)]
        return np.broadcast_to(value, (num_replicas, *value.shape))

    def _give_summed(self, placed: jax.Array, components: np.ndarray | None) -> None:
        """Sets a variable that shows a sum. Its parts keep their saved values if their number fits."""
        strategy, topology = context.owner_of(self.of), self._topology
        if components is not None and topology is not None and len(components) == topology.num_replicas:
            strategy.bindings.give_components(self.of, placed, own_copy(components, topology.per_replica))
        self._set(placed)

    def _give_servers(self, stored: ServerArray, value: np.ndarray) -> None:
        if stored.is_table:
            self.give_rows([(0, value)])
        else:
            stored.assign(value)

    @property
    def takes_rows(self) -> bool:
        stored = self.stored
        return isinstance(stored, ServerArray) and stored.is_table and bool(math.prod(stored.shape))

    def give_rows(self, blocks: Iterable[tuple[int, np.ndarray]]) -> None:
        stored: ServerArray = self.stored
        stored.holder.make([stored])
        strategy, variable = context.owner_of(self.of), self.of

        def assign(ids: Any, rows: Any) -> None:
            whole = variable.read_value() if isinstance(variable, Variable) else variable.value
            variable.assign(whole.at[ids].set(rows))  # the servers get only these rows

        for first, values in blocks:
            for rows in blocks_of_rows(values.shape, values.dtype):
                numbers = np.arange(first + rows.start, first + rows.stop, dtype=np.int32)
                strategy.run_here(assign, numbers, np.array(values[rows.start : rows.stop]))


def blocks_of_rows(shape: Sequence[int], dtype: Any) -> Iterator[range]:
    """Yields ranges of rows that have up to 16 MiB each."""
    row_bytes = max(1, int(np.prod(shape[1:])) * np.dtype(dtype).itemsize)
    rows_per_block = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, shape[0], rows_per_block):
        yield range(start, min(start + rows_per_block, shape[0]))


@final
class ShardsLeaf(ArrayLeaf):
    """A ``ShardedVariable`` whose shards are variables: saved as one array, and restored into any number of shards."""

    def __init__(self, variable: ShardedVariable):
        self.of = variable
        self.label = variable.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.of.dtype)

    def held(self) -> Held:
        return Held(self.of.shards.read())

    def give(self, value: np.ndarray, components: np.ndarray | None) -> None:
        del components
        self.of.assign(value)


def leaf_of_variable(tracked: Any) -> Leaf | None:
    """Returns the leaf of a variable; None for other objects."""
    if isinstance(tracked, ShardedVariable):
        shards = tracked.shards
        return VariableLeaf(shards.held[0]) if isinstance(shards, ShardsOfOne) else ShardsLeaf(tracked)
    return VariableLeaf(tracked) if is_variable(tracked) else None
