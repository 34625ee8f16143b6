"""``strategy.run`` with parameter servers: runs the replicas of a worker, inside the function that is traced for it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import jax

from replicax._src import context
from replicax._src.collectives.in_replica import OneReplica
from replicax._src.context import ReplicaContext
from replicax._src.devices.topology import Topology
from replicax._src.errors import CrossReplicaContextError
from replicax._src.options import RunOptions
from replicax._src.parameter_servers.programs.events import Events
from replicax._src.parameter_servers.programs.replicas import Observers, PlacedReplicas
from replicax._src.strategies.replica_tracing import describe_distributed, results_of, trace_replicas
from replicax._src.tracing import key
from replicax._src.tracing.arguments import Call
from replicax._src.tracing.cache import Leaf
from replicax._src.tracing.capture import current_capture
from replicax._src.values import Mirrored, PerReplica, is_value

if TYPE_CHECKING:
    from replicax._src.parameter_servers.strategy.parameter_server import ParameterServerStrategy

log = logging.getLogger("replicax")


def run_on_replicas(
    strategy: ParameterServerStrategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Adds a replica function to the function that is being traced."""
    if strategy.num_replicas_in_sync > 1:
        return _run_on_several(strategy, fn, args, kwargs)
    replica = ReplicaContext(strategy, None, OneReplica())
    with context.replica_context(strategy, replica):
        return fn(*args, **kwargs)


def run_as_one(strategy: ParameterServerStrategy, fn: Callable[..., Any], batch: Any) -> Any:
    """Calls ``fn`` with a full batch, in the function that is being traced, and computes it on all devices of a
    worker.

    Args:
      strategy: The strategy.
      fn: The function.
      batch: A pytree of arrays [rows, ...], or of their per-replica parts.
    """
    capture = current_capture()
    assert capture is not None
    events = capture.observer
    assert isinstance(events, Events)
    topology = Topology.elsewhere(strategy.num_replicas_in_sync)
    events.num_replicas = topology.num_replicas

    def spread(array: Any) -> Any:
        is_even = array.ndim and array.shape[0] % topology.num_replicas == 0
        return jax.lax.with_sharding_constraint(array, topology.per_replica) if is_even else array

    return fn(jax.tree_util.tree_map(spread, strategy.gather(batch, axis=0)))


def _run_on_several(
    strategy: ParameterServerStrategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    capture = current_capture()
    assert capture is not None
    events = capture.observer
    assert isinstance(events, Events)
    topology = Topology.elsewhere(
        strategy.num_replicas_in_sync, is_cpu=strategy.session.platforms == ("cpu",)
    )

    def rule(leaf: Any) -> tuple[Leaf, Any] | None:
        if not isinstance(leaf, (PerReplica, Mirrored)):
            return None
        return describe_distributed(leaf, strategy, topology.num_replicas), leaf.stored

    call = Call(fn, args, kwargs, is_value)
    call.describe(None, rule)
    observers = Observers()
    program, rows = trace_replicas(
        strategy,
        topology,
        call.fn,
        call.tree,
        call.described,
        binding_of=strategy.bindings.binding_of,
        observe=observers.observe,
    )
    call.closure_check([variant.jaxpr for variant in program.variants])(call.leaves)
    is_row = [leaf.kind == "row" for leaf in call.inputs]
    placed = PlacedReplicas(program, key.name_of(call.fn), observers, topology, rows, is_row)
    return results_of(placed.program, topology).wrap(placed(capture, events, call.arrays))


@final
class RemoteRunner:
    """``Strategy.run`` with parameter servers: a part of the function for workers that is being traced.

    Outside of a trace, the function runs in this process, on the servers' variables.

    Args:
      strategy: The strategy.
      run_here: Runs a replica function in this process, given its arguments.
      is_coordinator: True if this process is a coordinator, whose workers should compute instead.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        run_here: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any],
        *,
        is_coordinator: bool,
    ):
        self._strategy, self._run_here, self._is_coordinator = strategy, run_here, is_coordinator

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> Any:
        """Runs ``fn`` once per replica; see ``Strategy.run``."""
        del options
        capture = current_capture()
        if capture is None:
            if self._is_coordinator:
                _say_it_runs_here(key.name_of(fn))
            return self._run_here(fn, args, kwargs)
        if not context.in_replica_function():
            capture.use_strategy(self._strategy)  # an rx.function records it, and runs in this process
        if context.in_replica_function() or not isinstance(capture.observer, Events):
            raise CrossReplicaContextError(
                "strategy.run was called inside a function that strategy.run runs, or in merge_call. Do the "
                "work in the replica function, or after run."
            )
        return run_on_replicas(self._strategy, key.unwrap(fn), args, kwargs)

    def owned(self, array: Any) -> Any:
        """Returns the array and records nothing, because workers get copies of arguments."""
        return array


@functools.cache
def _say_it_runs_here(name: str) -> None:
    log.warning(
        "strategy.run of %s was called outside of a scheduled function, so it runs in this process, the "
        "coordinator. To run it on the workers, give a function that calls it to ClusterCoordinator.schedule.",
        name,
    )
