"""``Strategy``: the interface of every strategy. The named strategies are compositions of its parts."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src import context, jax_compat, program_guard
from replicax._src.cluster.chief import note_role
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import ClusterResolver
from replicax._src.collectives import cross_device
from replicax._src.collectives.cross_device import CrossDeviceOps, NcclAllReduce
from replicax._src.collectives.in_replica import Communicator
from replicax._src.devices.autoshard import AutoShardPolicy, DistributeOptions
from replicax._src.devices.split import InputContext, InputOptions, InputReplicationMode
from replicax._src.devices.topology import Topology, device_name
from replicax._src.errors import (
    ContextError,
    CrossReplicaContextError,
    InvalidArgumentError,
    MixedStrategiesError,
    UnsupportedError,
)
from replicax._src.framework import use_imported
from replicax._src.input.dataset import DistributedDataset, DistributedIterator
from replicax._src.jax_compat import Device
from replicax._src.lowering.eager import run_eagerly
from replicax._src.migrate.missing_names import note_uncaught
from replicax._src.migrate.tensorflow_code import check_no_function_of_tensorflow, check_not_in_tensorflow
from replicax._src.narrowing import as_numpy, narrowed_pytree
from replicax._src.options import CommunicationOptions, ReduceOp, RunOptions, ShardState, ValueContext
from replicax._src.status.counters import counters
from replicax._src.status.job import serve_status
from replicax._src.strategies import datasets, logical_devices, lowering, reduction
from replicax._src.strategies.extended import StrategyExtended
from replicax._src.strategies.mistakes import (
    check_arguments,
    check_call,
    no_strategies_of_users,
    no_such_attribute,
)
from replicax._src.strategies.parts import FunctionRunner, Parts
from replicax._src.strategies.running import DEFAULT_OPTIONS, Runner
from replicax._src.strategies.steps import StepsRunner
from replicax._src.tracing import side_effects
from replicax._src.tracing.bindings import BindingTable, placed_by_each
from replicax._src.tracing.capture import current_capture
from replicax._src.user_code import user_line
from replicax._src.values import DistributedValues, Mirrored, PerReplica, is_value
from replicax._src.variables.layout_map import LayoutMap
from replicax._src.variables.layouts import VariableLayouts
from replicax._src.variables.placement import VariablePlacement
from replicax._src.variables.state_shards import StateShards

if TYPE_CHECKING:
    from replicax._src.plan.plan import Plan

_R = TypeVar("_R")
ReduceName = Literal["SUM", "MEAN", "sum", "mean", "Sum", "Mean"]


class _Required:
    """The marker for an argument that was left out."""

    def __repr__(self) -> str:
        return "<required>"


_REQUIRED: Final = _Required()


class Strategy:
    """A policy for where state lives and computation runs.

    Write the program once; the strategy decides where it runs. Make variables, models and optimizers in ``scope()``,
    distribute data with ``experimental_distribute_dataset``, run steps with ``run``, and combine values with
    ``reduce``.

    Do not make a ``Strategy`` itself: use ``MirroredStrategy``, ``OneDeviceStrategy``, ``CentralStorageStrategy``, or
    the default strategy, ``rx.get_strategy()``.

    Source: tf.distribute.Strategy.
    """

    is_default = False
    has_servers = False
    partitions_by_spmd = False
    worker_of_own: Membership | None = None
    """This worker, if each worker runs the program separately on shared servers; else None."""

    def __init__(
        self,
        make_topology: Callable[[], Topology],
        *,
        parameter_device: Device | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        cluster_resolver: ClusterResolver | None = None,
        is_chief: bool = True,
        communication_options: CommunicationOptions | None = None,
        make_parts: Callable[[Any], Parts] | None = None,
        shard_state: ShardState | str | None = None,
        shard_size: int | None = None,
        layout_map: LayoutMap | None = None,
    ):
        if isinstance(make_topology, StrategyExtended):  # as a subclass in TensorFlow does
            raise no_strategies_of_users(type(self).__name__)
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise InvalidArgumentError(
                f"cross_device_ops must be an rx.CrossDeviceOps, such as rx.ReductionToOneDevice(), got "
                f"{cross_device_ops!r}."
            )
        self._make_topology, self._make_parts = make_topology, make_parts
        self._parameter_device = parameter_device
        self._cluster_resolver, self._is_chief = cluster_resolver, is_chief
        note_role(cluster_resolver, is_chief)
        if not self.is_default:
            counters.strategy = type(self).__name__
            note_uncaught(side_effects.add_note)
        if not (self.is_default or self.has_servers):
            serve_status()
        self._communication_options = communication_options
        self._shard_state, self._shard_size = shard_state, shard_size
        self._layout_map = layout_map
        self._ops = cross_device_ops or NcclAllReduce()
        self._extended = StrategyExtended(self)

    # --- parts, for the rest of replicax --------------------------------------------------------------

    @functools.cached_property
    def _own_parts(self) -> Parts:
        if self._make_parts is not None:
            return self._make_parts(self)
        topology = self._make_topology()
        layouts, shards = None, self.shards_on(topology)
        if shards is not None or self._layout_map is not None or topology.num_logical_devices > 1:
            layouts = VariableLayouts(topology, shards, self._layout_map)
        return self._parts_of(topology, VariablePlacement(topology, self._parameter_device, layouts))

    def parts_on(self, topology: Topology, shards: StateShards | None) -> Parts:
        """Returns the parts of the strategy on a plan's devices, as many for each replica. ``shards`` is the sharding
        of its state over them.
        """
        own = self._own_parts.variable_placement.layouts
        layouts = own and own.on(topology, shards)
        if own is None and shards is not None:
            layouts = VariableLayouts(topology, shards)
        return self._parts_of(topology, VariablePlacement(topology, None, layouts))

    def _parts_of(self, topology: Topology, placement: VariablePlacement) -> Parts:
        bindings = BindingTable(topology.num_replicas, placement.layouts)
        return Parts(topology, placement, bindings, Runner(self, topology))

    def shards_on(self, topology: Topology) -> StateShards | None:
        """Returns the sharding of state over the strategy's or a plan's replicas; None if it is not sharded."""
        return StateShards.of(self._shard_state, self._shard_size, topology.num_replicas)

    @property
    def parts(self) -> Parts:
        """The parts of the strategy in this thread; see ``Parts``."""
        return context.stand_in_of(self) or self._own_parts

    @property
    def topology(self) -> Topology:
        """The replicas' devices."""
        return self.parts.topology

    @property
    def variable_placement(self) -> Any:
        """The placement of variables."""
        return self.parts.variable_placement

    @property
    def bindings(self) -> BindingTable:
        """The bindings of the variables that this strategy's programs use."""
        return self.parts.bindings

    @property
    def runner(self) -> FunctionRunner:
        """The runner of functions on the replicas."""
        return self.parts.runner

    @functools.cached_property
    def steps_runner(self) -> StepsRunner:
        """The runner of several steps in one call."""
        return StepsRunner(self)

    @property
    def user_ops(self) -> CrossDeviceOps | None:
        """The user's cross-device operations; None for the built-in all-reduce."""
        return None if type(self._ops) in cross_device.ALL_REDUCES else self._ops

    def reduce_in_replica(
        self, communicator: Communicator, op: ReduceOp, value: Any, options: CommunicationOptions | None
    ) -> Any:
        """Implements ``all_reduce`` of a replica function, through this strategy's cross-device operations."""
        options = options or self._communication_options
        return cross_device.reduce_in_replica(self._ops, communicator, op, value, options)

    # --- properties -----------------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas R, over which gradients are summed."""
        return self.topology.num_replicas

    @property
    def num_logical_devices(self) -> int:
        """The number of devices per replica: 1 unless ``devices_per_replica``, or a device assignment, says more."""
        return self._own_parts.topology.num_logical_devices

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that described the cluster; None on one machine."""
        return self._cluster_resolver

    @property
    def is_chief(self) -> bool:
        """True if this process writes checkpoints and summaries, which only one process writes."""
        return self._is_chief

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for libraries."""
        return self._extended

    # --- scope and run --------------------------------------------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Returns a context in which the strategy is current and owns new variables.

        ``with strategy.scope():`` may be entered again, and nested in itself. It applies to this thread. Import Keras
        before it.

        Raises:
          MixedStrategiesError: The call is inside another strategy's scope.
          CrossReplicaContextError: The call is inside a replica function.
          KerasScopeError: Keras was imported in the block. It is raised at the end of the block.
        """
        context.check_may_enter(self)
        return context.Scope(self, user_line())

    def __enter__(self) -> Self:
        raise ContextError(
            "A strategy itself is not a context. Write `with strategy.scope():`, and make variables, models and optimizers in "
            "its block."
        )

    def __exit__(self, *exc_info: object) -> None:
        raise AssertionError("__enter__ raises")

    def run(
        self,
        fn: Callable[..., _R],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> _R:
        """Runs ``fn`` once per replica, in replica context, as one compiled program.

        ``fn`` is traced once for all replicas: prints happen once, and Python's ``if`` sees only values known during
        the trace. The program is reused while ``fn`` (its code, closure and the globals it names) and the shapes and
        dtypes of the arguments stay the same. Call it in cross-replica context. It does not block: results are computed
        in the background.

        Args:
          fn: The replica function. It may read and assign variables, call Keras layers, optimizers and metrics, and use
            ``rx.get_replica_context()``.
          args, kwargs: The arguments. A replica gets its own component of each ``DistributedValues`` (at any depth);
            arrays, variables and Python values are passed unchanged. Numbers and strings are constants of the program,
            except floats that change between calls. A plain array is the same on all replicas. One log line says so if
            it is a batch: no argument differs between replicas, and a dataset of ``rx.data`` yielded the array, or
            ``rx.nn.compute_average_loss`` averages over as many losses as it has rows.
          options: See ``RunOptions``; ``eager=True`` runs the Python function itself, for debugging.

        Returns:
          The result of ``fn``, with a ``PerReplica`` for every array, or plain arrays with one replica. Python values,
          None and variables are unchanged. Type checkers see the return type of ``fn``.

        Raises:
          InvalidArgumentError: ``args`` is not a list or tuple, or ``kwargs`` not a dict, or ``fn`` cannot be called
            with them.
          DivergenceError: A mirrored variable would differ between replicas.
          StructureError: Replicas with different shapes return different structures.
          NotFiniteError: ``check_finite=True`` is set, and a result or the new value of a variable is not finite.
          LabelError: ``check_finite=True`` is set, and a Keras loss gets a label outside the range of its classes.
          ReducedLossError: The function sums gradients of a loss that is already reduced over replicas.
          UnsupportedError: ``check_finite=True`` or ``check_same=True`` is set with parameter servers; or
            ``eager=True`` is set in a cluster of several workers, with parameter servers, or for per-replica values
            that are not rows of one batch.
          Exception: Any exception of ``fn``. All state is then unchanged.

        Source: tf.distribute.Strategy.run.
        """
        if options is not None or kwargs is not None or type(args) is not tuple or not callable(fn):
            given = {} if kwargs is None else kwargs
            check_arguments("strategy.run", fn, args, given, DEFAULT_OPTIONS if options is None else options)
        context.check_may_enter(self)
        if options is not None and (options.check_finite or options.check_same) and self.has_servers:
            name = "check_finite" if options.check_finite else "check_same"
            raise UnsupportedError(
                f"RunOptions({name}=True) is not supported by {type(self).__name__}. Look for the value with "
                f"{'rx.OneDeviceStrategy' if options.check_finite else 'rx.MirroredStrategy'}."
            )
        if "tensorflow" in sys.modules:
            check_not_in_tensorflow("strategy.run")
            check_no_function_of_tensorflow("strategy.run", fn)
        try:
            if options is not None and options.eager:
                self._check_may_run_eagerly()
                with context.Scope(self):
                    return run_eagerly(self, fn, args, kwargs or {})
            with program_guard.current():
                return self.parts.runner.run(fn, args, kwargs or {}, options or DEFAULT_OPTIONS)
        except TypeError:
            check_call(fn, args, kwargs or {})
            raise

    def _check_may_run_eagerly(self) -> None:
        if self.has_servers:
            raise UnsupportedError(
                f"strategy.run(..., options=rx.RunOptions(eager=True)) is not supported by {type(self).__name__}: its functions "
                "travel as compiled programs. Debug with rx.OneDeviceStrategy, or leave eager out: Python code, and print in it, runs "
                "once, on the coordinator, when a function is traced."
            )
        peers = self.topology.peers
        if peers is not None:
            num_local = len(self.topology.local_devices)
            raise UnsupportedError(
                f"strategy.run(..., options=rx.RunOptions(eager=True)) runs in one process, on the rows of all "
                f"{self.topology.num_replicas} replicas, and {peers.names[peers.number]} has only those of {num_local}. Debug "
                f"without TF_CONFIG, with as many devices in one process: "
                f"rx.config.set_local_devices({self.topology.num_replicas}) and MirroredStrategy. Or leave eager out; "
                "jax.debug.print prints on every worker."
            )

    def run_steps(
        self, fn: Callable[..., Any], iterator: DistributedIterator, steps: int, state: Any = None
    ) -> Any:
        """Runs ``fn`` on each of the next batches, in one compiled program. It is for models with short steps.

        One call does the same as ``[run(fn, args=(next(iterator),)) for _ in range(steps)]``, with stacked results:
        variables, gradients and collectives are those of ``steps`` single steps. If the data ends earlier, it runs the
        remaining batches. A batch of another shape needs a separate program.

        ``state`` passes functional state from step to step, as in ``jax.lax.scan``: ``fn(state, batch)`` returns
        ``(state, result)``, and ``run_steps`` returns the last state and the stacked results.

        Call it in cross-replica context, not inside ``rx.function``. Does not block.

        Args:
          fn: A replica function of one batch; with ``state``, of a state and a batch.
          iterator: ``iter`` of a distributed dataset. The next call continues after these batches. All of them are on
            the devices at the same time.
          steps: The number of steps, at least 1. Use the same number in every call, because each number is compiled
            separately.
          state: A pytree of arrays, from ``replicate`` or an earlier call; None for no state. A step returns a state of
            the same structure, shapes and dtypes. It is not donated.

        Returns:
          The results of ``fn``, with the steps as a new first dim of every array: ``[steps, ...]`` per replica. Python
          values are unchanged. With ``state`` it is the pair ``(state, results)``, with the arrays of the state in the
          form that ``run`` returns.

        Raises:
          OutOfRangeError: There is no further batch.
          InvalidArgumentError: ``iterator`` is not one of a distributed dataset, ``steps`` is less than 1, or a leaf of
            ``state`` is not an array.
          StructureError: ``fn`` returns a state of another structure, shape or dtype; or it returns a value per row and
            the batches have different numbers of rows. The steps have run in the second case.

        Source: lax.scan over the batches; tf.distribute's experimental_run_steps_on_iterator is the older form.

        >>> import jax.numpy as jnp, numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(["cpu:0"])
        >>> batches = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(6.0)).batch(2))
        >>> step = lambda total, batch: (total + jnp.sum(batch), jnp.max(batch))
        >>> total, largest = strategy.run_steps(step, iter(batches), steps=3, state=jnp.float32(0))
        >>> float(total), largest.tolist()
        (15.0, [1.0, 3.0, 5.0])
        """
        context.check_may_enter(self)
        with program_guard.current():
            return self.steps_runner.run_all(fn, iterator, steps, state)

    def lower(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *,
        topology: str | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the program of a step, as ``jax.jit(f).lower`` does, here or for hardware that is not here.

        It runs and keeps nothing, makes no array, and leaves variables unchanged. It does not communicate. It blocks
        while it traces; ``compile()`` of the result blocks while it compiles. Call it in cross-replica context.

        Args:
          fn: A replica function, an ``rx.function``, or a Keras model's ``fit``, which stands for its first step.
          args, kwargs: The arguments of ``fn``. A ``jax.ShapeDtypeStruct`` stands for a per-replica value [per-replica
            batch, ...] or, if it is from ``replicate``, for a replicated one. A ``PerReplica`` stands for its number of
            rows per replica.
          options: See ``run``.
          topology: ``"v5p:16x16x16"`` (a TPU slice), ``"h100:16x8"`` (hosts × GPUs), ``"cpu:8"`` (virtual devices of
            this machine); None for the strategy's own devices.

        Returns:
          JAX's own ``Lowered``, with ``as_text()``, and ``compile()`` with ``memory_analysis()`` and ``as_text()``. It
          is for inspection only, because the program also takes variables. Use ``run`` to run a step.

        Raises:
          TopologyError: The hardware is unknown. The text lists the known kinds.
          MissingExtraError: The compiler for the hardware is not installed.
          PlanError: This process cannot compile for it.
          UnsupportedError: The strategy does not keep its variables on the replicas' devices.

        >>> import jax, replicax as rx
        >>> step = lambda x: rx.get_replica_context().all_reduce("sum", (x @ x.T).sum())
        >>> x = jax.ShapeDtypeStruct((64, 32), "float32")
        >>> lowered = rx.MirroredStrategy(["cpu:0"]).lower(step, args=(x,), topology="cpu:4")
        >>> compiled = lowered.compile()
        >>> compiled.memory_analysis().argument_size_in_bytes, "all-reduce" in compiled.as_text()
        (8192, True)
        """
        context.check_may_enter(self)
        use_imported()  # they lower functions that are not replica functions
        return lowering.lower(
            self, lowering.Step(fn, args, kwargs or {}, options or DEFAULT_OPTIONS), topology
        )

    def plan(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *,
        topology: str | None = None,
        global_batch: int | None = None,
        remedy_limit_s: float = 120.0,
    ) -> Plan:
        """Compiles the program of ``lower`` and reports the memory that it needs. It runs nothing and makes no array.

        It does not communicate. It blocks while it compiles: seconds for small models, a minute or more for large ones.

        Args:
          fn: A replica function, an ``rx.function``, or a Keras model's ``fit``.
          args, kwargs: The arguments of ``fn``. A ``jax.ShapeDtypeStruct`` stands for a per-replica value [per-replica
            batch, ...] or, if it is from ``replicate``, for a replicated one. A ``PerReplica`` stands for its number of
            rows per replica.
          options: See ``run``.
          topology: ``"v5p:16x16x16"`` (a TPU slice), ``"h100:16x8"`` (hosts × GPUs), ``"cpu:8"`` (virtual devices of
            this machine); None for the strategy's own devices.
          global_batch: The rows of all replicas together. By default each replica has as many as here.
          remedy_limit_s: The time limit, in seconds, for remedies. A step that does not fit is planned again with fewer
            rows, more devices, and sharded state. After this time no further remedy is compiled, and only the size of
            its arguments is known.

        Returns:
          A ``Plan``. ``print`` it, or use ``fits``, ``memory``, ``to_json()`` and ``to_svg()``.

        Raises:
          TopologyError: The hardware is unknown. The text lists the known kinds.
          MissingExtraError: The compiler for the hardware is not installed.
          PlanError: This process cannot compile for it.
          UnsupportedError: The strategy does not keep its variables on the replicas' devices.

        >>> import jax, replicax as rx
        >>> step = lambda x: (x @ x.T).sum()
        >>> x = jax.ShapeDtypeStruct((64, 32), "float32")
        >>> plan = rx.MirroredStrategy(["cpu:0"]).plan(step, args=(x,), topology="cpu:4")
        >>> plan.fits, plan.global_batch, plan.memory.arguments
        (True, 256, 8192)
        """
        from replicax._src.plan.planning import plan_of  # plans are at the edge: nothing else imports them

        context.check_may_enter(self)
        use_imported()  # they lower functions that are not replica functions
        step = lowering.Step(fn, args, kwargs or {}, options or DEFAULT_OPTIONS, global_batch)
        return plan_of(self, step, topology, remedy_limit_s)

    # --- combining ------------------------------------------------------------------------------------

    @overload  # no overload leaves axis out, so that type checkers require it
    def reduce(self, reduce_op: ReduceOp | ReduceName, value: Any, axis: None) -> Any: ...

    @overload
    def reduce(self, reduce_op: ReduceOp | ReduceName, value: Any, axis: int | Sequence[int]) -> Any: ...

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = _REQUIRED) -> Any:
        """Combines per-replica values into one.

        With R replicas and x_r the value of replica r: axis=None gives SUM = x_0 + ... + x_{R-1} and
        MEAN = SUM / R. With an axis (or several) each replica's value is first summed along it; MEAN then divides
        by the true number of elements over all replicas, so that partial batches are weighted by their rows.

        Call it in cross-replica context (also inside ``rx.function`` and ``merge_call``). Does not block.

        Args:
          reduce_op: ``ReduceOp.SUM`` or ``MEAN``, or their names.
          value: A per-replica value of [...] per replica, or a pytree of such.
          axis: None, an int, or a tuple of ints: dims of the per-replica value. It is required, except if every worker
            runs the program separately on shared parameter servers; there it is None by default, as in TensorFlow 1.

        Returns:
          One array. The mean of integers has the default floating dtype.

        Raises:
          ReductionError: The value cannot be reduced: it is a plain value or a mirrored variable with SUM, its shapes
            differ with axis=None, or an axis is out of range.
          InvalidArgumentError: ``axis`` is left out.
          CrossReplicaContextError: The call is inside a replica function.

        Source: tf.distribute.Strategy.reduce.
        """
        check_not_in_tensorflow("strategy.reduce")
        context.check_may_enter(self)
        if axis is _REQUIRED and self.worker_of_own is not None:
            axis = None  # as in the class of TensorFlow 1
        if axis is _REQUIRED:
            raise InvalidArgumentError(
                "strategy.reduce needs an axis. Write axis=None to combine the replicas' values as they are, such as one loss per "
                "replica; axis=0 to combine the rows of each, too."
            )
        self._check_values(value)
        result = reduction.reduce(self.topology, self.user_ops, ReduceOp.parse(reduce_op), value, axis)
        return self._where_variables_are(result)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the components of per-replica values along ``axis``, in replica order.

        Call it in cross-replica context. Does not block.

        Args:
          value: An array [...] per replica, or a pytree of such. Sizes may differ along ``axis`` only.
          axis: A dim of the per-replica value.

        Raises:
          CrossReplicaContextError: The call is inside a replica function; use ``all_gather`` there.
          ReductionError: The components are scalars, the axis is invalid, or other dims differ.
        """
        if context.in_replica_function():
            raise CrossReplicaContextError(
                "strategy.gather method requires cross-replica context, use get_replica_context().all_gather() "
                "instead."
            )
        check_not_in_tensorflow("strategy.gather")
        context.check_may_enter(self)
        self._check_values(value)
        return self._where_variables_are(reduction.gather(self.topology, value, axis))

    def _check_values(self, pytree: Any) -> None:
        for leaf in jax.tree_util.tree_leaves(pytree, is_leaf=is_value):
            if isinstance(leaf, PerReplica) and leaf.is_of_whole_batch:
                continue
            if isinstance(leaf, (PerReplica, Mirrored)) and leaf.num_replicas != self.num_replicas_in_sync:
                raise MixedStrategiesError(
                    f"Mixing different tf.distribute.Strategy objects is not possible: got a {type(leaf).__name__} over "
                    f"{leaf.num_replicas} replicas, and {self!r} has {self.num_replicas_in_sync}. Use the strategy that made it."
                )

    def joins_trace(self) -> bool:
        """True while JAX traces the caller. An ``rx.function`` then runs on this strategy's devices."""
        if jax_compat.is_evaluating():
            return False
        capture = current_capture()
        if capture is not None and context.merge_communicator() is None:
            capture.use_strategy(self)
        return True

    def _where_variables_are(self, pytree: Any) -> Any:
        """Moves arrays to the device where central storage keeps variables, so that code can compute with both."""
        device = self._parameter_device
        if device is None or current_capture() is not None:
            return pytree
        return jax.tree_util.tree_map(
            lambda leaf: jax.device_put(leaf, device) if isinstance(leaf, jax.Array) else leaf, pytree
        )

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a per-replica value on this process's replicas.

        Returns:
          A tuple of one component per replica; a tuple of one pytree per replica for a pytree; ``(value,)`` for others.
        """
        return reduction.local_results(self.topology, value)

    def replicate(self, tree: Any) -> Any:
        """Copies the arrays of a pytree to every replica's device, as state for functional JAX code.

        It converts a ``jax.ShapeDtypeStruct`` to a stand-in for such an array in ``plan``.

        Pass the result to ``run``, and the new state from ``run`` to the next call. With
        ``RunOptions(donate_args=(0,))`` the results reuse the first argument's memory.

        Returns:
          The pytree with ``Mirrored`` leaves, or with arrays on the device of a single replica.
        """

        def copy(path: Any, leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return Mirrored(leaf, self.num_replicas_in_sync)
            if is_value(leaf):
                leaf = leaf.as_array() if isinstance(leaf, DistributedValues) else leaf.value
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
                raise InvalidArgumentError(
                    f"strategy.replicate takes a pytree of arrays and numbers, got {leaf!r}."
                )
            leaf = narrowed_pytree(as_numpy(leaf), f"tree{jax.tree_util.keystr(path)}")
            if is_traced or not self.topology.devices:  # a coordinator has none
                return self.mirrored(jnp.asarray(leaf))
            array = placed_by_each(leaf, self.topology)
            if self.num_replicas_in_sync == 1:
                return self.runner.owned(array)
            return Mirrored(array, self.num_replicas_in_sync, is_ours=True)

        is_traced = self.joins_trace()
        return jax.tree_util.tree_map_with_path(copy, tree, is_leaf=is_value)

    def mirrored(self, array: Any) -> Any:
        """Returns a replicated ``array`` as a ``Mirrored``, or unchanged with one replica."""
        return Mirrored(array, self.num_replicas_in_sync) if self.num_replicas_in_sync > 1 else array

    def unreplicate(self, tree: Any) -> Any:
        """Returns one plain array for each replicated leaf of a pytree, the reverse of ``replicate``.

        Raises:
          PerReplicaUseError: A component is not proven to be the same on all replicas.
        """

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, DistributedValues):
                return leaf
            return jax_compat.on_words(lambda words: jnp.asarray(np.asarray(words)), leaf.as_array())

        return jax.tree_util.tree_map(plain, tree, is_leaf=lambda x: isinstance(x, DistributedValues))

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes per-replica values from a function.

        Call it in cross-replica context (also inside ``rx.function`` and ``merge_call``).

        Args:
          value_fn: Called once for each replica of this process with a ``ValueContext``. It returns an array or number,
            or a pytree of such, of the same structure and dtypes each time. Shapes may differ, except in
            ``merge_call``. In a trace it is also called for the replicas of other processes, because all processes
            trace one program.

        Returns:
          A pytree of ``PerReplica``, or the result of ``value_fn`` with one replica.

        Raises:
          InvalidArgumentError: A leaf is not an array, or structures, ranks or dtypes differ.
          UnsupportedError: Shapes differ in ``merge_call``.
        """
        context.check_may_enter(self)
        num_replicas = self.num_replicas_in_sync
        replicas = range(num_replicas) if self.joins_trace() else self.topology.local_replicas
        results = [value_fn(ValueContext(r, num_replicas)) for r in replicas]
        if num_replicas == 1:
            return results[0]
        values = datasets.join_components(self.topology, results)
        communicator = context.merge_communicator()
        return values if communicator is None else context.local_components(values, communicator)

    # --- data -----------------------------------------------------------------------------------------

    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        distribute_options: DistributeOptions | AutoShardPolicy | str | None = None,
    ) -> DistributedDataset:
        """Distributes a dataset of global batches over the replicas.

        A batch of B rows is split into R contiguous slices whose sizes differ by at most one, larger first. No row is
        dropped or repeated, also in a last partial batch. A thread reads ahead of the loop.

        Args:
          dataset: Batches [global_batch, ...]: ``rx.data.from_arrays(...).batch(n)``, files (``rx.data``), a grain
            or tf.data dataset, a torch DataLoader, a Hugging Face dataset, a Keras PyDataset, or any iterable of
            (pytrees of) arrays.
          options: The number of prefetched elements, and their place.
          distribute_options: The way in which workers share the dataset, or only the policy or its name; by default the
            dataset's own policy, or AUTO.

        Returns:
          An iterable of pytrees of ``PerReplica``, or of arrays on the device of a single replica.

        Raises:
          UnsupportedSourceError: ``dataset`` is not a supported dataset.
          UnbatchedDatasetError: Its elements are rows; call its ``batch``.
          NotEnoughFilesError: The policy is FILE, and there are fewer files than workers.

        Source: tf.distribute.Strategy.experimental_distribute_dataset.
        """
        use_imported()  # Keras may get the dataset before any scope is entered
        return datasets.distribute(self.topology, dataset, options, distribute_options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes the dataset of ``dataset_fn``. It has per-replica batches, and each step takes R of them.

        Args:
          dataset_fn: Called with an ``InputContext``: once, or once per replica with
            ``InputReplicationMode.PER_REPLICA``.
          options: The number of calls of ``dataset_fn``, and the number and place of prefetched elements.

        Source: tf.distribute.Strategy.distribute_datasets_from_function.
        """
        use_imported()
        return datasets.distribute_from_function(self.topology, dataset_fn, options, self.worker_of_own)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Calls ``distribute_datasets_from_function``, under its older name."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """Returns a dataset over the rows of NumPy arrays (a pytree; a list is stacked). Call ``batch`` on it next."""
        del session
        return datasets.from_numpy(numpy_input)

    def make_experimental_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """Calls ``experimental_make_numpy_dataset``, under the name in the TensorFlow guide."""
        return self.experimental_make_numpy_dataset(numpy_input, session)

    # --- logical devices ------------------------------------------------------------------------------

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Returns ``tensor`` after a check of the id.

        TensorFlow would run the operations on ``tensor`` only on that device of the replica. Here all devices of a
        replica run one program, and each computes everything that is not sharded. With several devices a warning says
        so, once.

        Args:
          tensor: [...] per replica.
          logical_device_id: Less than the number of logical devices of a replica, which is 1, except for
            ``TPUStrategy`` with a device assignment.

        Raises:
          InvalidArgumentError: There is no such device; or the strategy was made with
            ``experimental_spmd_xla_partitioning=True``.

        Source: tf.distribute.TPUStrategy.experimental_assign_to_logical_device.
        """
        return logical_devices.assign(self, tensor, logical_device_id)

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Shards ``tensor`` over the logical devices of its replica, and with it the computations that use it.

        The values do not change. In traced code (``run``, ``rx.function``, a layer in ``fit``) it is a request to the
        compiler, which also decides the sharding of operations before and after. A variable outside of traced code and
        before the first step is moved: each device keeps its shard from then on. Anything else is returned unchanged.

        Args:
          tensor: An array [...] per replica, or a variable.
          partition_dimensions: The number of shards along each dim. Their product is the number of logical devices.

        Returns:
          The same values, or the variable itself.

        Raises:
          InvalidArgumentError: The number of dims is wrong, a dim is not divisible, or the product is wrong.
          VariableError: A compiled program already uses the variable, or each replica has its own value.

        Source: tf.distribute.TPUStrategy.experimental_split_to_logical_devices.
        """
        return logical_devices.split(self, tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Replicates ``tensor`` over the logical devices of its replica, the reverse of sharding it.

        The values do not change. In ``fit`` the compiler decides.

        Args:
          tensor: An array [...] per replica, or a variable.

        Source: tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices.
        """
        return logical_devices.replicate(self, tensor)

    # --- older names ----------------------------------------------------------------------------------

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Calls ``experimental_local_results``, under its older name."""
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> Any:
        """Returns ``value``, which is computed anyway. In TensorFlow's graphs it made one operation of many."""
        del name
        return value

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Runs ``fn`` on the next element of an iterator (or without arguments). This is the older form of ``run``."""
        args = () if input_iterator is None else (input_iterator.get_next(),)
        return self.run(fn, args=args)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """Returns an iterator over a distributed dataset. ``initialize()`` restarts it."""
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """Returns an iterator over the dataset of ``input_fn``. ``initialize()`` restarts it."""
        options = InputOptions(experimental_replication_mode=replication_mode)
        return iter(self.distribute_datasets_from_function(input_fn, options))

    def colocate_vars_with(self, colocate_with_variable: Any) -> contextlib.AbstractContextManager:
        """See ``extended.colocate_vars_with``."""
        return self._extended.colocate_vars_with(colocate_with_variable)

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Raises, because only TensorFlow 1 sessions have this.

        Raises:
          UnsupportedError: It is always raised, and names the replacement.
        """
        del session_config, cluster_spec, task_type, task_id
        raise UnsupportedError(
            "strategy.configure set up TensorFlow 1 sessions, which do not exist here. Describe a cluster by TF_CONFIG "
            "or a cluster resolver when you make the strategy, and virtual devices by "
            "replicax.config.set_local_devices(n)."
        )

    def update_config_proto(self, config_proto: Any) -> None:
        """Raises, because only TensorFlow 1 sessions have this.

        Raises:
          UnsupportedError: It is always raised, and names the replacement.
        """
        del config_proto
        raise UnsupportedError(
            "strategy.update_config_proto changed the ConfigProto of TensorFlow 1 sessions, which do not exist here. "
            "Set JAX's options with jax.config.update(...), compiler options with "
            "rx.RunOptions(experimental_xla_options={...})."
        )

    # --- Python ---------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            # Python calls this for an unknown name, or after a property raised an AttributeError. It only raises.
            if name.startswith("_") or name in dir(type(self)):
                return object.__getattribute__(self, name)
            raise no_such_attribute(self, name)

    def __copy__(self) -> Strategy:
        raise UnsupportedError("Must only deepcopy DistributionStrategy: a strategy cannot be copied.")

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self  # a strategy is tied to its devices, and references must keep the same object

    def __repr__(self) -> str:
        names = ", ".join("+".join(map(device_name, of_replica)) for of_replica in self.topology.grid)
        return f"<{type(self).__name__} on {names}>"

    def _repr_html_(self) -> str:
        from replicax._src.pictures.strategies import table_of  # at the edge: it uses public names

        return table_of(type(self).__name__, self.topology, self.variable_placement)
