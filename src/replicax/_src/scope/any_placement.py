"""``Placement``: where the values of variables live, on the strategy's devices or on servers, as lower layers see it.

Programs on devices take variables as inputs. Where they cannot, the placement runs the code itself (``run_here``), and
a variable stores a ``RemoteArray``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from replicax._src.devices.topology import Topology
from replicax._src.jax_internals.jax_compat import Device


class Placement(Protocol):
    """Makes, reads and assigns the values of variables where they live."""

    @property
    def topology(self) -> Topology:
        """The replicas' devices."""
        ...

    @property
    def num_replicas(self) -> int:
        """The number of components of a variable with one for each replica; 1 if there is one value for all."""
        ...

    @property
    def parameter_device(self) -> Device | None:
        """The one device that holds all variables (central storage); None if there is no such device."""
        ...

    @property
    def layouts(self) -> Any:
        """The ``VariableLayouts`` of variables that programs may shard; None if they shard none."""
        ...

    @property
    def partitioner(self) -> Callable[..., Sequence[int]] | None:
        """Returns the number of shards of a new variable; None if every variable has one piece."""
        ...

    @property
    def is_on_replicas(self) -> bool:
        """True if every replica's devices hold the variables, so that a step can be lowered for other devices."""
        ...

    @property
    def run_here(self) -> Callable[..., Any] | None:
        """Runs cross-replica code of this process with its variables where they live; None if programs take variables
        as inputs.
        """
        ...

    @property
    def worker_devices(self) -> tuple[Device | str, ...]:
        """The devices of this process's replicas, or the names of the devices of a worker elsewhere."""
        ...

    @property
    def parameter_devices(self) -> tuple[Device | str, ...]:
        """The devices that hold variables, or their names."""
        ...

    def place_initial(self, value: Any, components: Any | None, name: str, layout: Any) -> Any:
        """Returns what a new variable stores."""
        ...

    def in_shards(self, variable: Any) -> Any:
        """Returns a new variable, or a ``ShardedVariable`` of it if the partitioner has cut it."""
        ...

    def replaced(self, stored: Any, value: Any, components: Any | None) -> Any:
        """Returns what a variable stores after ``value`` is assigned to it."""
        ...

    def current(self, stored: Any) -> Any:
        """Returns the current value."""
        ...

    def components(self, stored: Any, has_components: bool) -> tuple[Any, ...]:
        """Returns the value or component of each replica of this process."""
        ...

    def update(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Runs an assignment where the variables live, if programs do not take them. Returns True if it did."""
        ...

    def beside(self, value: Any, has_components: bool) -> Any:
        """Returns ``value`` where one computation can use it with a variable."""
        ...

    def table_of(self, variable: Any) -> Any:
        """Returns the ``RemoteArray`` of a variable of which only the rows that are looked up should travel; else
        None.
        """
        ...

    def for_framework(self, name: str) -> Any:
        """Returns the object with which a framework keeps its variables and runs its steps on this placement. The
        framework defines it: for Keras see ``keras/keras_placement.py``.
        """
        ...
