"""``strategy.run`` with parameter servers: runs the replicas of a worker, inside the function that is traced for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax

from replicax._ps.client.session import Session
from replicax._ps.programs.replicas import Observers, PlacedReplicas
from replicax._ps.programs.variable_changes import Events
from replicax._ps.strategy.strategy_form import StrategyForm
from replicax._src.program_kit.captures import Call, current_capture, name_of
from replicax._src.program_kit.errors import UnsupportedError
from replicax._src.program_kit.strategy_parts import ReplicaCall, RunOptions, Strategy
from replicax._src.program_kit.traced_programs import Topology
from replicax._src.program_kit.variables import call_replica, is_value


def run_on_replicas(
    strategy: Strategy,
    session: Session,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Adds a replica function to the function that is being traced."""
    if strategy.num_replicas_in_sync > 1:
        return _run_on_several(strategy, session, fn, args, kwargs)
    return call_replica(strategy, fn, args, kwargs)


def run_as_one(strategy: Strategy, fn: Callable[..., Any], batch: Any) -> Any:
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
    strategy: Strategy,
    session: Session,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    topology = Topology.elsewhere(strategy.num_replicas_in_sync, is_cpu=session.platforms == ("cpu",))
    observers = Observers()
    call = ReplicaCall.traced(strategy, topology, Call(fn, args, kwargs, is_value), observers.observe)
    placed = PlacedReplicas(call, observers)
    return call.results(placed.program).wrap(placed())


@final
class RemoteRunner:
    """``Strategy.run`` with parameter servers: a part of the function for workers that is being traced.

    Outside of a trace, the function runs in this process, on the servers' variables.

    Args:
      strategy: The strategy.
      form: The way in which it uses parameter servers.
      run_here: Runs a replica function in this process, given its arguments.
    """

    def __init__(
        self,
        strategy: Strategy,
        form: StrategyForm,
        run_here: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any],
    ):
        self._strategy, self._form, self._run_here = strategy, form, run_here

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> Any:
        """Runs ``fn`` once per replica; see ``Strategy.run``."""
        if options.check_finite or options.check_same:
            name = "check_finite" if options.check_finite else "check_same"
            raise UnsupportedError(
                f"RunOptions({name}=True) is not supported by {type(self._strategy).__name__}. Look for the value with "
                f"{'rx.OneDeviceStrategy' if options.check_finite else 'rx.MirroredStrategy'}."
            )
        capture = current_capture()
        if capture is None:
            self._form.note_run_here(name_of(fn))
            return self._run_here(fn, args, kwargs)
        capture.use_strategy(self._strategy)  # an rx.function records it, and runs in this process
        assert isinstance(capture.observer, Events)
        return run_on_replicas(self._strategy, self._form.session, fn, args, kwargs)

    def check_eager(self) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            f"strategy.run(..., options=rx.RunOptions(eager=True)) is not supported by {type(self._strategy).__name__}: its "
            "functions travel as compiled programs. Debug with rx.OneDeviceStrategy, or leave eager out: Python code, and print in "
            "it, runs once, on the coordinator, when a function is traced."
        )

    def check_steps(self) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            f"Several steps in one call are not supported by {type(self._strategy).__name__}. Give each step to "
            "ClusterCoordinator.schedule, which does not wait for it; or loop in the scheduled function."
        )

    def owned(self, array: Any) -> Any:
        """Returns the array and records nothing, because workers get copies of arguments."""
        return array
