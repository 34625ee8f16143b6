"""Variables on parameter servers: a variable stores a ``ServerArray`` instead of its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np

from replicax._ps.placement.server_arrays import Initial, ServerArray
from replicax._src.program_kit.captures import BindingTable
from replicax._src.program_kit.own_process import Device, export_platform
from replicax._src.program_kit.strategy_parts import hook
from replicax._src.program_kit.traced_programs import Topology
from replicax._src.program_kit.variables import (
    ShardedVariable,
    partition,
)

if TYPE_CHECKING:
    from replicax._ps.client.session import Session

RunHere = Callable[..., Any]


@final
@dataclass(frozen=True, eq=False)
class ServerPlacement:
    """Puts the values of variables on parameter servers, as ``VariablePlacement`` puts them on devices.

    Attributes:
      topology: The devices of a worker, from the view of this process.
      session: The session with the parameter servers.
      partitioner: Returns the number of shards of a variable; None to keep every variable in one piece.
      run_here: Runs cross-replica code in this process, on the servers' variables.
      bindings: The bindings of the strategy.
    """

    topology: Topology
    session: Session
    run_here: RunHere
    bindings: BindingTable
    partitioner: Callable[..., Sequence[int]] | None = None
    parameter_device: Any = None
    layouts: Any = None

    @property
    def is_on_replicas(self) -> bool:
        """False: the servers hold the variables."""
        return False

    @property
    def num_replicas(self) -> int:
        """The number of components of a variable: 1, whatever the number of a worker's devices."""
        return 1

    @property
    def worker_devices(self) -> tuple[Device | str, ...]:
        """The devices of this process's replicas, or the names of the devices of a worker elsewhere."""
        platform = (self.session.worker_platforms or (export_platform(),))[0]
        kind = platform.upper() if platform in ("cpu", "tpu") else "GPU"
        names = (f"/device:{kind}:{number}" for number in range(self.topology.num_replicas))
        return self.topology.local_devices or tuple(names)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the parameter servers, as in TensorFlow."""
        return tuple(f"/job:ps/task:{number}" for number in range(self.session.num_ps))

    def for_framework(self, name: str) -> Any:
        """Returns the object with which a framework keeps its variables on servers."""
        return hook(f"{name}_on_servers").OnServers(self)

    def table_of(self, variable: Any) -> ServerArray | None:
        """Returns the array of a variable if it is a table."""
        stored = self.bindings.binding_of(variable).value
        return stored if isinstance(stored, ServerArray) and stored.is_table else None

    def new_array(self, name: str, shape: Sequence[int], dtype: Any, initial: Initial) -> ServerArray:
        """Returns an array for a new variable, in shards if the partitioner says so. Its first use makes the value."""
        shards = partition(self.partitioner, shape, dtype)
        return self.session.add(ServerArray(self.session, name, shape, dtype, initial, shards))

    def in_shards(self, variable: Any) -> Any:
        """Returns a variable, or a ``ShardedVariable`` of it if its array is in shards."""
        stored: ServerArray = variable._value
        if not stored.row_ranges:
            return variable
        return ShardedVariable.in_one(variable, len(stored.row_ranges))

    def place_initial(self, value: Any, components: Any | None, name: str, layout: Any) -> ServerArray:
        """Returns the array that a new variable stores. Its first use makes the value on the servers."""
        del components, layout
        held = np.array(value)
        return self.new_array(name, held.shape, held.dtype, lambda: held)

    def replaced(self, stored: ServerArray, value: Any, components: Any | None) -> ServerArray:
        """Returns the array that a variable stores after ``value`` is assigned to it."""
        del components
        stored.assign(value)
        return stored

    def current(self, stored: ServerArray) -> jax.Array:
        """Returns the current value. Communicates, and blocks."""
        return stored.read()

    def update(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Runs an assignment on the servers, where other tasks may assign at the same time."""
        if not _is_sent_as_it_is(fn, *args):
            self.run_here(fn, *args)
        else:
            variable, value = args
            variable._value.assign(value)
        return True

    def beside(self, value: Any, has_components: bool) -> Any:
        """Returns ``value`` in a form that can be assigned."""
        del has_components
        return value

    def components(self, stored: ServerArray, has_components: bool) -> tuple[jax.Array, ...]:
        """Returns the value for each replica of a worker. All replicas read the one value on the servers."""
        del has_components
        return (stored.read(),) * self.topology.num_replicas


def _is_sent_as_it_is(fn: Callable[..., Any], variable: Any, value: Any) -> bool:
    """Returns True if an assignment replaces a value by an array of the same shape and dtype, without computation."""
    return (
        getattr(fn, "replicax_family", None) == "assign"
        and type(value) is np.ndarray
        and value.dtype == variable.dtype
        and value.shape == tuple(variable.shape)
        and not variable._has_components
        and variable._value.is_made  # otherwise this process would keep the caller's array
    )
