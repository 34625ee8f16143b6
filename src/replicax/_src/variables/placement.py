"""The placement of variables on a strategy's devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from replicax._src.devices.topology import Topology
from replicax._src.hooks import hook
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.tracing.bindings import own_copy, placed_by_each
from replicax._src.values.array_types import HostOrDevice
from replicax._src.values.distributed import ArrayLike, shards_of_replicas
from replicax._src.variables.layouts import VariableLayouts
from replicax._src.variables.remote_array import RemoteArray

_V = TypeVar("_V")


@dataclass(frozen=True, eq=False)
class VariablePlacement:
    """Puts new values of variables on the strategy's devices.

    Attributes:
      topology: The replicas' devices.
      parameter_device: The one device that holds all variables (central storage); None if every replica's device does.
      layouts: The layouts of variables that may be sharded; None if all are replicated.
      partitioner, run_here: None: there is no variable in pieces, and programs take variables as inputs.
    """

    topology: Topology
    parameter_device: Device | None = None
    layouts: VariableLayouts | None = None
    partitioner: Callable[..., Sequence[int]] | None = None
    run_here: Callable[..., Any] | None = None

    @property
    def num_replicas(self) -> int:
        return self.topology.num_replicas

    @property
    def is_on_replicas(self) -> bool:
        """True if every replica's devices hold the variables."""
        return self.parameter_device is None

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices of this process's replicas."""
        return self.topology.local_devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices of this process that hold variables."""
        one = self.parameter_device
        return (one,) if one is not None else self.topology.all_local_devices

    def for_framework(self, name: str) -> Any:
        """Returns the object with which a framework keeps its variables on devices."""
        return hook(name).ON_DEVICES

    def table_of(self, variable: ArrayLike) -> None:
        """Returns None: programs look up rows."""
        del variable

    def in_shards(self, variable: _V) -> _V:
        """Returns the variable."""
        return variable

    def place(self, value: HostOrDevice, components: HostOrDevice | None) -> jax.Array:
        """Returns a copy on the strategy's devices of ``value``, or of ``components`` [R, ...] if each replica has its
        own.
        """
        if components is not None:
            return own_copy(components, self.topology.per_replica)
        if self.parameter_device is not None:
            return own_copy(value, jax.sharding.SingleDeviceSharding(self.parameter_device))
        return placed_by_each(value, self.topology)

    def place_initial(
        self,
        value: HostOrDevice,
        components: HostOrDevice | None,
        name: str,
        layout: NamedSharding | None,
    ) -> jax.Array:
        """Places the value of a new variable: in its layout, or as ``place`` does. All processes take the value of the
        first one.
        """
        del name
        if components is None and self.topology.peers is not None:
            return self.topology.put_leaders(value, layout)
        return self.place(value, components) if layout is None else own_copy(value, layout)

    def replaced(self, stored: jax.Array, value: HostOrDevice, components: HostOrDevice | None) -> jax.Array:
        """Returns the array that a variable stores after an assignment; ``stored`` is the array before it."""
        if components is None and self._is_sharded(stored):
            return own_copy(value, stored.sharding)
        return self.place(value, components)

    def _is_sharded(self, stored: jax.Array) -> bool:
        """Returns True if the array is sharded. (Processes compare full values, and shard them afterwards.)"""
        return self.layouts is not None and self.topology.peers is None and not stored.is_fully_replicated

    def current(self, stored: jax.Array) -> jax.Array:
        """Returns the stored value. If other processes have shards of it, it is gathered, and they must read it too."""
        if self.layouts is not None and not stored.is_fully_addressable and self._lies_in_shards(stored):
            return self.layouts.whole(stored)
        return stored

    def _lies_in_shards(self, stored: jax.Array) -> bool:
        return not stored.is_fully_replicated and stored.sharding != self.topology.per_replica

    def update(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Runs an assignment where the variable is, if that is elsewhere. Returns True if it did."""
        del fn, args
        return False

    def beside(self, value: HostOrDevice, has_components: bool) -> jax.Array:
        """Returns ``value`` on the devices of a variable, so that one computation can use both."""
        if self.parameter_device is None or has_components:
            return self.topology.put_whole(value)
        return jax.device_put(value, self.parameter_device)

    def moved(self, value: HostOrDevice, stored: jax.Array | RemoteArray) -> jax.Array:
        """Returns ``value`` on the devices of a variable, to replace ``stored``. The result may share memory with
        ``value``.
        """
        if isinstance(stored, jax.Array) and self._is_sharded(stored):
            return jax.device_put(value, stored.sharding)
        return self.beside(value, has_components=False)

    def components(self, stored: jax.Array, has_components: bool) -> tuple[jax.Array, ...]:
        """Returns copies of the stored value on each replica's device, in replica order."""
        if has_components and self.topology.survivors is not None:
            return tuple(stored)  # each process has the components of all replicas
        if has_components:
            shards = shards_of_replicas(stored, self.num_replicas, has_rows=True)
            return tuple(shard.data[0] for shard in shards)
        if self._is_sharded(stored):
            stored = self.topology.put_whole(stored)
        shards = shards_of_replicas(stored, self.num_replicas, has_rows=False)
        if len(shards) == 1:
            is_alone = self.topology.survivors is None
            replicas = self.topology.local_replicas if is_alone else range(self.num_replicas)
            return tuple(jnp.copy(shards[0].data) for _ in replicas)
        return tuple(jnp.copy(shard.data) for shard in shards)
