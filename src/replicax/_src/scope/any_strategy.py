"""``AnyStrategy``: what layers below ``strategies/``, and the classes that ``Strategy`` is made of, use of a strategy.

``StrategyParts`` are the objects behind it, and say what is possible: the placement where variables live, the runner
what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from replicax._src.collectives.in_replica import Communicator
from replicax._src.devices.topology import Topology
from replicax._src.scope.any_placement import Placement
from replicax._src.tracing.bindings import BindingTable
from replicax._src.vocabulary.options import CommunicationOptions, ReduceName, ReduceOp, RunOptions


class FunctionRunner(Protocol):
    """Runs functions on replicas: ``ReplicaRunner``, or a wrapper that observes one."""

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> Any:
        """Runs ``fn`` once per replica; see ``Strategy.run``."""
        ...

    def owned(self, array: Any) -> Any:
        """Records that nobody else holds the buffers of ``array``, and returns it."""
        ...

    def check_eager(self) -> None:
        """Raises UnsupportedError if replica functions cannot run eagerly, as Python, in this process."""
        ...

    def check_steps(self) -> None:
        """Raises UnsupportedError if several steps cannot run in one call."""
        ...


@dataclass(frozen=True, eq=False)
class StrategyParts:
    """The parts of a strategy.

    Attributes:
      topology: The replicas' devices.
      variable_placement: The placement of variables.
      bindings: The bindings of the variables that programs use.
      runner: The runner of functions on the replicas.
    """

    topology: Topology
    variable_placement: Placement
    bindings: BindingTable
    runner: FunctionRunner


class AnyStrategy(Protocol):
    """The members of ``rx.Strategy`` that code uses without knowing the class.

    Attributes:
      is_default: True for the strategy outside of every scope.
    """

    is_default: bool

    @property
    def is_chief(self) -> bool:
        """True if this process writes checkpoints and summaries."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas R."""
        ...

    @property
    def parts(self) -> StrategyParts:
        """The parts of the strategy, or of the view whose scope this is; the next three are of them."""
        ...

    @property
    def topology(self) -> Topology:
        """The replicas' devices."""
        ...

    @property
    def variable_placement(self) -> Placement:
        """The placement of variables."""
        ...

    @property
    def bindings(self) -> BindingTable:
        """The bindings of the variables that programs use."""
        ...

    @property
    def extended(self) -> Any:
        """The ``rx.StrategyExtended``."""
        ...

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs ``fn`` once per replica."""
        ...

    def reduce(self, reduce_op: ReduceOp | ReduceName, value: Any, axis: None) -> Any:
        """Combines per-replica values into one."""
        ...

    def reduce_in_replica(
        self, communicator: Communicator, op: ReduceOp, value: Any, options: CommunicationOptions | None
    ) -> Any:
        """Combines the replicas' values inside a replica function."""
        ...

    def joins_trace(self) -> bool:
        """True while JAX traces the caller, whose ``rx.function`` then runs on this strategy's devices."""
        ...


@final
@dataclass(frozen=True, eq=False)
class StrategyView:
    """A strategy with other parts, such as other devices.

    A plan takes a view on the devices of another machine, ``rx.testing`` one on a single device, eager mode one with a
    single replica. In the scope of a view (``context.Scope``) the strategy itself has these parts too, because the
    user's code holds it and not the view.

    Attributes:
      strategy: The strategy. It owns the variables, and is the current one in the scope.
      parts: The parts of the view.
    """

    strategy: AnyStrategy
    parts: StrategyParts

    @property
    def topology(self) -> Topology:
        """The devices of the view."""
        return self.parts.topology

    @property
    def is_for_plan(self) -> bool:
        """True if programs are lowered and not run: variables have no values there."""
        return self.topology.is_ahead
