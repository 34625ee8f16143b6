"""Variables on parameter servers: what a variable keeps in place of its value is a ``ServerArray``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from replicax._src.ps.arrays import ServerArray
from replicax._src.ps.session import Session
from replicax._src.topology import Topology

RunHere = Callable[..., Any]


@final
@dataclass(frozen=True, eq=False)
class ServerPlacement:
    """Puts the values of variables on parameter servers; as ``VariablePlacement`` puts them on devices.

    Attributes:
      topology: Of a worker, as this process sees it.
      session: Where the values are.
      run_here: Runs a function of cross-replica code in this process, on the servers' variables.
    """

    topology: Topology
    session: Session
    run_here: RunHere

    parameter_device: Any = None

    @property
    def num_replicas(self) -> int:
        return self.topology.num_replicas

    def place_initial(self, value: Any, components: Any | None, name: str) -> ServerArray:
        """The array that a new variable keeps; it is made on the servers when it is first used."""
        del components
        held = np.array(value)
        return self.session.add(ServerArray(self.session, name, held.shape, held.dtype, lambda: held))

    def replaced(self, stored: ServerArray, value: Any, components: Any | None) -> ServerArray:
        """What a variable keeps once it has been assigned ``value``."""
        del components
        stored.assign(value)
        return stored

    def current(self, stored: ServerArray) -> jax.Array:
        """The value now. Communicates, and waits."""
        return stored.read()

    def update(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Runs an assignment on the servers, where others assign at the same time."""
        self.run_here(fn, *args)
        return True

    def beside(self, value: Any, has_components: bool) -> Any:
        """``value`` where it can be assigned."""
        del has_components
        return value

    def components(self, stored: ServerArray, has_components: bool) -> tuple[jax.Array, ...]:
        """The value, once: whatever the number of replicas, there is one on the servers."""
        del has_components
        return (stored.read(),)
