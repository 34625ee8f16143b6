"""``ParameterServerStrategy``: variables on parameter servers, functions on workers, each at its own pace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import jax
import numpy as np

from replicax._src.cluster.resolver import ClusterResolver
from replicax._src.errors import InvalidArgumentError
from replicax._src.program.slots import SlotTable
from replicax._src.ps.runner import ClosureCall, Runner
from replicax._src.ps.session import Session
from replicax._src.strategies.parts import Parts
from replicax._src.strategies.remote_running import Closures, PreparedClosure, RemoteRunner
from replicax._src.strategies.strategy import Strategy
from replicax._src.topology import Topology
from replicax._src.variables.partitioners import Partitioner
from replicax._src.variables.server_placement import ServerPlacement

log = logging.getLogger("replicax")


@final
class ParameterServerStrategy(Strategy):
    """Asynchronous training: parameter servers hold the variables, workers compute, this process coordinates.

    Make variables, models, optimizers and metrics in ``scope()``; give functions to
    ``rx.coordinator.ClusterCoordinator(strategy).schedule``: some worker runs each. It reads the variables, computes, and
    pushes gradients and other assignments to the servers, each of which applies them once and as one. The workers do not
    wait for each other.

    Args:
      cluster_resolver: Describes a cluster of one chief, this process, at least one worker and one ps; default: from the
        environment. Workers and parameter servers run ``rx.Server``, or ``replicax server``.
      variable_partitioner: Into how many shards a variable is cut: ``rx.experimental.partitioners``. Without it each
        variable is whole, on the server that has the fewest bytes.

    Raises:
      TaskError: The cluster has no worker or no ps, or this process is one of them.
      UnavailableError: A task does not answer.

    Source: tf.distribute.ParameterServerStrategy.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
    ):
        raise NotImplementedError

    @classmethod
    def _of_session(cls, session: Session, variable_partitioner: Partitioner | None = None) -> Self:
        strategy = cls.__new__(cls)
        strategy._set_up(session, variable_partitioner, None)
        return strategy

    def _set_up(
        self, session: Session, variable_partitioner: Partitioner | None, resolver: ClusterResolver | None
    ) -> None:
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(
                f"variable_partitioner must be a function of a shape and a dtype, such as "
                f"rx.experimental.partitioners.MinSizePartitioner(), got {variable_partitioner!r}."
            )
        self.session = session
        self.variable_partitioner = variable_partitioner
        self.closures = Closures(self, session)
        self._runner_here = Runner(session.links, pulls_ahead=False)
        self._num_here = 0
        Strategy.__init__(
            self,
            lambda: Topology.of(jax.local_devices()[:1]),
            cluster_resolver=resolver,
            make_parts=_make_parts,
        )

    def prepare(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> PreparedClosure:
        """A call of ``fn``, traced for workers. For coordinators."""
        return self.closures.prepare(fn, args, kwargs)

    def run_here(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Runs a function of cross-replica code in this process, with its variables on the servers."""
        prepared = self.prepare(fn, args)
        traced, runner = prepared.traced, self._runner_here
        for digest in traced.programs.values():
            runner.add_program(traced.program(digest))
        for name, array in traced.constants.items():
            runner.add_constant(name, array)
        number, self._num_here = self._num_here, self._num_here + 1
        result = runner.run(
            ClosureCall(
                (f"{self.session.incarnation}/here", number),
                number,
                (self.session.epoch, number),
                traced.programs,
                prepared.arguments,
            )
        )
        return prepared.assemble([jax.numpy.asarray(array) for array in result.results])


def _make_parts(strategy: ParameterServerStrategy) -> Parts:
    topology = Topology.of(jax.local_devices()[:1])
    placement = ServerPlacement(
        topology, strategy.session, strategy.run_here, strategy.variable_partitioner
    )
    return Parts(topology, placement, SlotTable(1), RemoteRunner(strategy, strategy.run_here))
