"""The parts of a strategy: devices, the placement of variables, the bindings of its programs, the runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replicax._src.devices.topology import Topology
from replicax._src.options import RunOptions
from replicax._src.tracing.bindings import BindingTable


class FunctionRunner(Protocol):
    """Runs functions on replicas: ``Runner``, or a wrapper that observes one."""

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> Any:
        """Runs ``fn`` once per replica; see ``Strategy.run``."""
        ...

    def owned(self, array: Any) -> Any:
        """Records that nobody else holds the buffers of ``array``, and returns it."""
        ...


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a strategy.

    Inside ``context.standing_in`` a strategy has other parts in this thread: with ``rx.testing`` a program sees its
    strategy with a single replica.

    Attributes:
      topology: The replicas' devices.
      variable_placement: The placement of variables: a ``VariablePlacement``, or a placement on parameter servers.
      bindings: The bindings of the variables that programs use.
      runner: The runner of functions on the replicas.
    """

    topology: Topology
    variable_placement: Any
    bindings: BindingTable
    runner: FunctionRunner
