"""What a strategy is composed of: devices, where variables live, the bindings of its programs, what runs functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replicax._src.devices.topology import Topology
from replicax._src.options import RunOptions
from replicax._src.tracing.bindings import BindingTable


class FunctionRunner(Protocol):
    """Runs functions on replicas: ``Runner``, or what looks on while one does."""

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> Any:
        """Runs ``fn`` once per replica; see ``Strategy.run``."""
        ...

    def owned(self, array: Any) -> Any:
        """Remembers that nobody else holds the buffers of ``array``; returns it."""
        ...


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a strategy.

    While ``context.standing_in`` lasts, a strategy has others in this thread: ``rx.testing`` lets a program meet
    its strategy as one of a single replica.

    Attributes:
      topology: The replicas' devices.
      variable_placement: Where variables are kept: a ``VariablePlacement``, or what keeps them on parameter servers.
      bindings: The variables that programs have met.
      runner: What runs functions on the replicas.
    """

    topology: Topology
    variable_placement: Any
    bindings: BindingTable
    runner: FunctionRunner
