"""``Strategy.extended``: further methods, for libraries."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, final

import jax
import jax.numpy as jnp

from replicax._src.cluster.spec import Task
from replicax._src.collectives.cross_device import CrossDeviceOps
from replicax._src.collectives.in_replica import IndexedSlices
from replicax._src.devices.named_devices import resolve_device
from replicax._src.input.dataset import DistributedIterator
from replicax._src.input.pipeline import ArrayDataset
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.scope import context
from replicax._src.scope.any_strategy import AnyStrategy
from replicax._src.strategies import data_placement, reduction
from replicax._src.strategies.mistakes import no_strategies_of_users
from replicax._src.strategies.run_steps import MultiStepContext, StepsRunner
from replicax._src.values.distributed import Mirrored, PerReplica, is_value
from replicax._src.values.narrowing import narrowed_pytree
from replicax._src.variables.variable import Variable
from replicax._src.vocabulary.errors import CrossReplicaContextError, InvalidArgumentError, VariableError
from replicax._src.vocabulary.options import CommunicationOptions, ReduceOp

_TASK_OF_DEVICE = re.compile(r"^/?job:(?P<job>[^/]+)(?:/replica:\d+)?(?:/task:(?P<task>\d+))?")

_T = TypeVar("_T")


class ExtensibleStrategy(AnyStrategy, Protocol):
    """The further members of a strategy that its ``extended`` uses."""

    @property
    def steps_runner(self) -> StepsRunner: ...

    @property
    def user_ops(self) -> CrossDeviceOps | None: ...

    def mirrored(self, array: jax.Array) -> jax.Array | Mirrored: ...


@final
class StrategyExtended:
    """Additional methods of a strategy, for algorithms that depend on replicas.

    Args:
      strategy: The strategy.
      own_task: The task of this process, if each worker runs the program separately; else None.

    Source: tf.distribute.StrategyExtended.
    """

    def __init__(self, strategy: ExtensibleStrategy, own_task: Task | None = None):
        self._strategy, self._own_task = strategy, own_task

    def __init_subclass__(cls) -> None:
        raise no_strategies_of_users(cls.__name__)

    # --- devices --------------------------------------------------------------------------------------

    @property
    def worker_devices(self) -> tuple[Device | str, ...]:
        """The devices of this process's replicas, in replica order: the first logical device of each.

        In a coordinator whose workers have several devices, these are the names of a worker's devices, as in
        TensorFlow: ``("/device:GPU:0", "/device:GPU:1")``.

        Raises:
          ContextError: This is the default strategy.
        """
        self._needs_devices("worker_devices")
        return self._strategy.variable_placement.worker_devices

    @property
    def parameter_devices(self) -> tuple[Device | str, ...]:
        """The devices that hold variables, or the names of parameter servers, such as ``"/job:ps/task:0"``.

        Raises:
          ContextError: This is the default strategy.
        """
        self._needs_devices("parameter_devices")
        return self._strategy.variable_placement.parameter_devices

    def _needs_devices(self, what: str) -> None:
        if self._strategy.is_default:
            raise context.default_has_no(what)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True if replicas must have the same shapes. It is always False."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """True if every worker builds its own program."""
        return self._strategy.topology.peers is not None or self._own_task is not None

    @property
    def experimental_should_init(self) -> bool:
        """True if this process initialises variables. If each worker runs the program on shared servers, the chief
        does.
        """
        return self._own_task is None or self._strategy.is_chief

    @property
    def should_checkpoint(self) -> bool:
        """True if this process writes checkpoints. Only the chief does."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """True if this process writes summaries. Only the chief does."""
        return self._strategy.is_chief

    # --- running --------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., _T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _T:
        """Calls ``Strategy.run``."""
        return self._strategy.run(fn, args=tuple(args), kwargs=kwargs)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: DistributedIterator,
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Calls ``fn(ctx, inputs)`` for each of the next elements, in one compiled program.

        ``fn`` is cross-replica code, which calls ``strategy.run``. ``ctx.set_last_step_output(name, output,
        reduce_op)`` keeps an output of the last step. See also ``Strategy.run_steps``.

        Args:
          iterator: ``iter`` of a distributed dataset.
          iterations: The number of elements. Fewer are taken if the data ends.
          initial_loop_values: The ``last_step_outputs`` for names that ``fn`` does not set.

        Returns:
          A MultiStepContext with ``last_step_outputs`` and ``non_tensor_outputs``.

        Raises:
          OutOfRangeError: There is no further element.
        """
        context.check_may_enter(self._strategy)
        initial = dict(initial_loop_values or {})
        return self._strategy.steps_runner.run_last(fn, iterator, iterations, initial)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> ArrayDataset:
        """Calls ``Strategy.experimental_make_numpy_dataset``."""
        del session
        return data_placement.from_numpy(numpy_input)

    # --- reducing -------------------------------------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines per-replica values and puts the result on ``destinations``.

        Args:
          destinations: A device or its name, to get an array there; or a variable or per-replica value, to get a
            Mirrored.
          options: Accepted for compatibility with TensorFlow.

        Raises:
          CrossReplicaContextError: It is called in a replica function.
          InvalidArgumentError: ``destinations`` is a list, or on another worker.
        """
        del options
        strategy = self._strategy
        if context.in_replica_function():
            raise CrossReplicaContextError(
                "reduce_to requires cross-replica context, use get_replica_context().all_reduce() instead."
            )
        if isinstance(destinations, (list, tuple)):
            raise InvalidArgumentError(
                "destinations must be one device, variable or per-replica value, got a list. For all replicas' devices "
                "give a variable or a per-replica value."
            )
        if isinstance(destinations, str):
            _check_is_of_this_worker(destinations, self._own_task)
        op = ReduceOp.parse(reduce_op)
        result = reduction.reduce(strategy.topology, strategy.user_ops, op, value, None)
        if strategy.joins_trace():
            return result
        if isinstance(destinations, (str, jax.Device)):
            return jax.device_put(result, resolve_device(destinations))
        return self.broadcast_to(result, destinations)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Calls ``reduce_to`` for several (value, destinations) pairs."""
        return [self.reduce_to(reduce_op, value, where, options) for value, where in value_destination_pairs]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Returns a ``Mirrored`` of ``tensor`` on the replicas' devices, or an array with one replica."""
        del destinations
        strategy = self._strategy
        is_traced = strategy.joins_trace()
        tensor = narrowed_pytree(tensor, "tensor")
        return strategy.mirrored(jnp.asarray(tensor) if is_traced else strategy.topology.put_whole(tensor))

    # --- variables ------------------------------------------------------------------------------------

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(var, *args, **kwargs)`` so that every copy of ``var`` is updated alike.

        ``fn`` sees one replica's copy of the variable (or its component of an ON_READ variable) and its component of
        per-replica arguments. Assignments in it are not aggregated.

        Args:
          group: True to return the result of ``fn``; False to return a tuple of the results for each replica.

        Raises:
          VariableError: ``var`` was not made in this strategy's scope.
        """
        if not self.variable_created_in_scope(var):
            raise VariableError(
                f"extended.update: {getattr(var, 'name', var)!r} is not a variable made in the scope of "
                f"{self._strategy!r}. Make it inside `with strategy.scope():`."
            )
        strategy = self._strategy
        given = (tuple(args), dict(kwargs or {}))
        has_components = isinstance(var, Variable) and var.has_components
        is_outside = context.merge_communicator() is None and not context.in_replica_function()
        if is_outside and (has_components or _has_per_replica(given)):
            result = strategy.run(lambda given: self._update(var, fn, given), args=(given,))
            return result if group else reduction.local_results(strategy.topology, result)
        result = self._update(var, fn, given)
        return result if group else (result,) * strategy.num_replicas_in_sync

    def _update(self, var: Any, fn: Callable[..., _T], given: Any) -> _T:
        args, kwargs = jax.tree_util.tree_map(_unwrap, given, is_leaf=_is_whole)
        replica = context.get_replica_context() if context.in_replica_function() else None
        communicator = replica.communicator if replica is not None else context.merge_communicator()
        with context.merge_context(self._strategy, communicator, is_update=True):
            return fn(var, *args, **kwargs)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(*args, **kwargs)`` once, for state that belongs to no variable."""
        del colocate_with
        result = fn(*args, **(kwargs or {}))
        return result if group else (result,) * self._strategy.num_replicas_in_sync

    def variable_created_in_scope(self, v: Any) -> bool:
        """Returns True if ``v`` was made in this strategy's scope."""
        return context.owner_of(v) is self._strategy

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Context that places new variables like ``colocate_with_variable``, which is where all variables are.

        Raises:
          VariableError: The variable belongs to another strategy.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise VariableError(
                "`colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope(), "
                f"got {getattr(colocate_with_variable, 'name', colocate_with_variable)!r}."
            )
        yield

    def read_var(self, v: Any) -> Any:
        """Returns the value of a variable, aggregated over replicas if it is ON_READ."""
        return v.value

    def value_container(self, value: _T) -> _T:
        """Returns ``value``, which is its own container."""
        return value

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[Device | str, ...]:
        """Returns the devices for state that belongs to no variable."""
        del var_list
        return self.parameter_devices


def _check_is_of_this_worker(device: str, here: Task | None) -> None:
    match = _TASK_OF_DEVICE.match(device)
    if match is None or here is None:
        return
    if (match["job"], int(match["task"] or 0)) != (here.type, here.index):
        raise InvalidArgumentError(
            f"Cannot reduce to another worker: {device!r}, current worker is '/job:{here.type}/task:{here.index}'. Each "
            "worker runs separately: name a device of this one, such as 'cpu:0'."
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, IndexedSlices) or is_value(value)


def _has_per_replica(pytree: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(pytree, is_leaf=_is_whole)
    return any(isinstance(leaf, PerReplica) and not leaf.is_equal for leaf in leaves)


def _unwrap(leaf: Any) -> Any:
    if isinstance(leaf, context.LocalPerReplica):
        return leaf.local
    if isinstance(leaf, Mirrored) or (isinstance(leaf, PerReplica) and leaf.is_equal):
        return leaf.as_array()
    return leaf
