"""``Strategy``: what every strategy can do. The named strategies are compositions of its parts."""

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
from replicax._src.migrate.tensorflow_code import check_no_function_of_tensorflow, check_not_in_tensorflow
from replicax._src.narrowing import as_numpy, narrowed_pytree
from replicax._src.options import CommunicationOptions, ReduceOp, RunOptions, ShardState, ValueContext
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
from replicax._src.tracing.bindings import BindingTable, placed_by_each
from replicax._src.tracing.capture import current_capture
from replicax._src.user_code import user_line
from replicax._src.values import DistributedValues, Mirrored, PerReplica, is_value
from replicax._src.variables.layout_map import LayoutMap
from replicax._src.variables.logical_layouts import LogicalLayouts
from replicax._src.variables.placement import VariablePlacement
from replicax._src.variables.state_layouts import StateLayouts
from replicax._src.variables.state_shards import StateShards

if TYPE_CHECKING:
    from replicax._src.plan.plan import Plan

_R = TypeVar("_R")
ReduceName = Literal["SUM", "MEAN", "sum", "mean", "Sum", "Mean"]


class _Required:
    """In place of an argument that was left out."""

    def __repr__(self) -> str:
        return "<required>"


_REQUIRED: Final = _Required()


class Strategy:
    """A policy for where state lives and computation runs.

    Write the program once; the strategy says where it runs. Make variables, models and optimizers in
    ``scope()``, feed ``experimental_distribute_dataset``, run steps with ``run``, combine with ``reduce``.

    Do not make one: use ``MirroredStrategy``, ``OneDeviceStrategy``, ``CentralStorageStrategy``, or the default
    strategy, ``rx.get_strategy()``.

    Source: tf.distribute.Strategy.
    """

    is_default = False
    has_servers = False
    partitions_by_spmd = False
    worker_of_own: Membership | None = None
    """Where each worker runs the program by itself, on shared servers: which one this is."""

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
        if isinstance(make_topology, StrategyExtended):  # as a subclass does in TensorFlow
            raise no_strategies_of_users(type(self).__name__)
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise InvalidArgumentError(
                f"cross_device_ops must be an rx.CrossDeviceOps, such as rx.ReductionToOneDevice(), got "
                f"{cross_device_ops!r}."
            )
        if layout_map is not None and shard_state is not None:
            raise UnsupportedError(
                f"{type(self).__name__}(layout_map=…, shard_state={shard_state!r}): variables are divided over the logical devices of "
                "each replica, or over the replicas, not over both. Leave one of them out."
            )
        self._make_topology, self._make_parts = make_topology, make_parts
        self._parameter_device = parameter_device
        self._cluster_resolver, self._is_chief = cluster_resolver, is_chief
        note_role(cluster_resolver, is_chief)
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
        logical = None if self._layout_map is None else LogicalLayouts(self._layout_map, topology)
        placement = VariablePlacement(topology, self._parameter_device, self.layouts_on(topology), logical)
        bindings = BindingTable(topology.num_replicas, placement.layout_rule)
        return Parts(topology, placement, bindings, Runner(self, topology))

    def parts_on(self, topology: Topology, layouts: StateLayouts | None) -> Parts:
        """What the strategy is composed of on other devices, those of a plan, as many for each replica; ``layouts``
        divide its state.
        """
        own = self._own_parts
        logical = own.variable_placement.logical_layouts
        placement = VariablePlacement(topology, None, layouts, logical and logical.on(topology))
        bindings = own.bindings.on(topology, placement.layout_rule)
        return Parts(topology, placement, bindings, Runner(self, topology))

    def layouts_on(self, topology: Topology) -> StateLayouts | None:
        """How this strategy's variables lie over devices, its own or those of a plan; None: each device holds all of
        them.
        """
        shards = StateShards.of(self._shard_state, self._shard_size, topology.num_replicas)
        return None if shards is None else StateLayouts(shards, topology)

    @property
    def parts(self) -> Parts:
        """What the strategy is composed of, here: see ``Parts``."""
        return context.stand_in_of(self) or self._own_parts

    @property
    def topology(self) -> Topology:
        """The replicas' devices."""
        return self.parts.topology

    @property
    def variable_placement(self) -> Any:
        """Where variables are kept."""
        return self.parts.variable_placement

    @property
    def bindings(self) -> BindingTable:
        """The variables that this strategy's programs have met."""
        return self.parts.bindings

    @property
    def runner(self) -> FunctionRunner:
        """What runs functions on the replicas."""
        return self.parts.runner

    @functools.cached_property
    def steps_runner(self) -> StepsRunner:
        """What runs several steps in one call."""
        return StepsRunner(self)

    @property
    def user_ops(self) -> CrossDeviceOps | None:
        """The user's cross-device operations; None where the built-in all-reduce does."""
        return None if type(self._ops) in cross_device.ALL_REDUCES else self._ops

    def reduce_in_replica(
        self, communicator: Communicator, op: ReduceOp, value: Any, options: CommunicationOptions | None
    ) -> Any:
        """``all_reduce`` of a replica function, through this strategy's cross-device operations."""
        options = options or self._communication_options
        return cross_device.reduce_in_replica(self._ops, communicator, op, value, options)

    # --- properties -----------------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """R: over how many replicas gradients are summed."""
        return self.topology.num_replicas

    @property
    def num_logical_devices(self) -> int:
        """How many devices each replica has: 1, but for ``TPUStrategy`` with a device assignment."""
        return self._own_parts.topology.num_logical_devices

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What described the cluster; None on one machine."""
        return self._cluster_resolver

    @property
    def is_chief(self) -> bool:
        """True if this process writes what is written once: checkpoints, summaries."""
        return self._is_chief

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for libraries."""
        return self._extended

    # --- scope and run --------------------------------------------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Makes the strategy current, and variables made inside its own.

        ``with strategy.scope():`` may be entered again, and nested in itself. Per thread. Import Keras above it.

        Raises:
          MixedStrategiesError: Inside another strategy's scope.
          CrossReplicaContextError: Inside a replica function.
          KerasScopeError: At the end of the block, if Keras was imported in it.
        """
        context.check_may_enter(self)
        return context.Scope(self, user_line())

    def __enter__(self) -> Self:
        raise ContextError(
            "A strategy is no context by itself. Write `with strategy.scope():`, and make variables, models and optimizers in "
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

        ``fn`` is traced once for all replicas: prints happen once, and Python ``if`` works on what is known
        then. The program is kept and used again when ``fn`` (its code, closure and the globals it names) and
        the shapes and dtypes of the arguments are the same. Call it in cross-replica context. Does not block:
        the results are computed in the background.

        Args:
          fn: The replica function. May read and assign variables, call Keras layers, optimizers and metrics,
            and use ``rx.get_replica_context()``.
          args, kwargs: Of each ``DistributedValues`` in them (at any depth) a replica gets its own component;
            arrays, variables and Python values are passed as they are. Numbers and strings are constants of the
            program, but for floats that change from call to call.
          options: See ``RunOptions``; ``eager=True`` runs the Python function itself, for debugging.

        Returns:
          What ``fn`` returns, with every array a ``PerReplica``; Python values, None and variables as they are. With
          one replica plain arrays. Type checkers see the type that ``fn`` returns.

        Raises:
          InvalidArgumentError: ``args`` is not a list or tuple, or ``kwargs`` not a dict, or ``fn`` cannot be called
            with them.
          DivergenceError: A mirrored variable would differ between replicas.
          StructureError: Replicas with different shapes return different structures.
          NotFiniteError: ``check_finite=True``, and a result or the new value of a variable is not finite.
          UnsupportedError: ``check_finite=True`` or ``check_same=True`` with parameter servers; ``eager=True`` in a
            cluster of several workers, with parameter servers, or of per-replica values that are not rows of one batch.
          Exception: Whatever ``fn`` raises; all state is as it was before.

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
                "travel as compiled programs. Debug with rx.OneDeviceStrategy, or leave eager out: Python, and print in it, runs "
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
        """Runs ``fn`` on each of the next batches, in one compiled program: for models whose step is short.

        As ``[run(fn, args=(next(iterator),)) for _ in range(steps)]`` in one call, with the results stacked:
        variables, gradients and collectives are those of ``steps`` single steps. Where the data ends earlier
        the batches that are left are run; a batch of another shape is a program of its own.

        With ``state``, functional state goes from step to step, as in ``jax.lax.scan``: ``fn(state, batch)`` returns
        ``(state, result)``, and ``run_steps`` returns the last state and the stacked results.

        Call it in cross-replica context, not inside ``rx.function``. Does not block.

        Args:
          fn: A replica function of one batch; with ``state``, of a state and a batch.
          iterator: ``iter`` of a distributed dataset; the next call goes on after these batches. They are all on
            the devices at the same time.
          steps: How many, at least 1. Use one number throughout: each is compiled anew.
          state: A pytree of arrays, from ``replicate`` or an earlier call; a step returns one of the same structure,
            shapes and dtypes. It is not donated. None: there is no state.

        Returns:
          What ``fn`` returns, every array with the steps as a new first dim: per replica ``[steps, ...]``. Python
          values as they are. With ``state`` the pair ``(state, results)``; arrays of the state are as ``run`` returns
          them.

        Raises:
          OutOfRangeError: There is no further batch.
          InvalidArgumentError: ``iterator`` is none, or ``steps`` is less than 1, or a leaf of ``state`` is no array.
          StructureError: ``fn`` returns a state of another structure, shape or dtype; or something for each row, where
            the numbers of rows differ; then the steps have been run.

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

        Nothing is run or kept, no array is made, and variables keep their values. It does not communicate. It blocks
        while it traces; ``compile()`` of what it returns blocks while it compiles. Call it in cross-replica context.

        Args:
          fn: What ``run`` runs, an ``rx.function``, or a Keras model's ``fit``, of which the first step is taken.
          args, kwargs: As ``fn`` takes them. A ``jax.ShapeDtypeStruct`` stands for a per-replica value, [per-replica
            batch, ...], or, from ``replicate``, for one that all have; a ``PerReplica`` is taken with as many rows for
            each replica as it has.
          options: As for ``run``.
          topology: ``"v5p:16x16x16"`` (a TPU slice), ``"h100:16x8"`` (hosts × GPUs), ``"cpu:8"`` (virtual devices of
            this machine); None: the strategy's own devices.

        Returns:
          JAX's own ``Lowered``: ``as_text()``, and ``compile()`` with ``memory_analysis()`` and ``as_text()``. It is
          for reading: the program takes variables too, and ``run`` is what runs a step.

        Raises:
          TopologyError: No such hardware is sold; the text lists what is.
          MissingExtraError: The compiler for it is not installed.
          PlanError: This process cannot compile for it.
          UnsupportedError: The strategy keeps variables elsewhere than on the replicas' devices.

        >>> import jax, replicax as rx
        >>> step = lambda x: rx.get_replica_context().all_reduce("sum", (x @ x.T).sum())
        >>> x = jax.ShapeDtypeStruct((64, 32), "float32")
        >>> lowered = rx.MirroredStrategy(["cpu:0"]).lower(step, args=(x,), topology="cpu:4")
        >>> compiled = lowered.compile()
        >>> compiled.memory_analysis().argument_size_in_bytes, "all-reduce" in compiled.as_text()
        (8192, True)
        """
        context.check_may_enter(self)
        use_imported()  # which know how to place what is not a replica function
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
        """Compiles what ``lower`` gives, and says what it needs; nothing is run, no array is made.

        Does not communicate. Blocks while it compiles: seconds for small models, a minute or more for large ones.

        Args:
          fn: What ``run`` runs, an ``rx.function``, or a Keras model's ``fit``.
          args, kwargs: As ``fn`` takes them. A ``jax.ShapeDtypeStruct`` stands for a per-replica value, [per-replica
            batch, ...], or, from ``replicate``, for one that all have; a ``PerReplica`` is taken with as many rows for
            each replica as it has.
          options: As for ``run``.
          topology: ``"v5p:16x16x16"`` (a TPU slice), ``"h100:16x8"`` (hosts × GPUs), ``"cpu:8"`` (virtual devices of
            this machine); None: the strategy's own devices.
          global_batch: Rows of all replicas together, instead of those that ``args`` have.
          remedy_limit_s: What does not fit is planned again with fewer rows, more devices, divided state. After so many
            seconds nothing further is compiled: of the rest only arguments are known, from their shapes.

        Returns:
          A ``Plan``: ``print`` it, or use ``fits``, ``memory``, ``to_json()``, ``to_svg()``.

        Raises:
          TopologyError: No such hardware is sold; the text lists what is.
          MissingExtraError: The compiler for it is not installed.
          PlanError: This process cannot compile for it.
          UnsupportedError: The strategy keeps variables elsewhere than on the replicas' devices.

        >>> import jax, replicax as rx
        >>> step = lambda x: (x @ x.T).sum()
        >>> x = jax.ShapeDtypeStruct((64, 32), "float32")
        >>> plan = rx.MirroredStrategy(["cpu:0"]).plan(step, args=(x,), topology="cpu:4")
        >>> plan.fits, plan.global_batch, plan.memory.arguments
        (True, 256, 8192)
        """
        from replicax._src.plan.planning import plan_of  # plans stand at the edge: nothing else imports them

        context.check_may_enter(self)
        use_imported()  # which know how to place what is not a replica function
        step = lowering.Step(fn, args, kwargs or {}, options or DEFAULT_OPTIONS, global_batch)
        return plan_of(self, step, topology, remedy_limit_s)

    # --- combining ------------------------------------------------------------------------------------

    @overload  # one that leaves axis out is not there: checkers see that it is required
    def reduce(self, reduce_op: ReduceOp | ReduceName, value: Any, axis: None) -> Any: ...

    @overload
    def reduce(self, reduce_op: ReduceOp | ReduceName, value: Any, axis: int | Sequence[int]) -> Any: ...

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = _REQUIRED) -> Any:
        """Combines per-replica values into one.

        With R replicas and x_r the value of replica r: axis=None gives SUM = x_0 + ... + x_{R-1} and
        MEAN = SUM / R. With an axis (or several) each replica's value is first summed along it; MEAN then divides
        by the true number of elements over all replicas, so that partial batches count by their rows.

        Call it in cross-replica context (also inside ``rx.function`` and ``merge_call``). Does not block.

        Args:
          reduce_op: ``ReduceOp.SUM`` or ``MEAN``, or their names.
          value: A per-replica value of [...] per replica, or a pytree of such.
          axis: None, an int, or a tuple of ints: dims of the per-replica value. Required; None by default where every
            worker runs the program by itself, on shared parameter servers, as in TensorFlow 1.

        Returns:
          One array; the mean of integers has the default floating dtype.

        Raises:
          ReductionError: Nothing to reduce: a plain value with SUM, a mirrored variable with SUM, shapes that
            differ with axis=None, an axis out of range.
          InvalidArgumentError: ``axis`` is left out.
          CrossReplicaContextError: Inside a replica function.

        Source: tf.distribute.Strategy.reduce.
        """
        check_not_in_tensorflow("strategy.reduce")
        context.check_may_enter(self)
        if axis is _REQUIRED and self.worker_of_own is not None:
            axis = None  # as the class of TensorFlow 1
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
          value: [...] per replica, or a pytree of such; sizes may differ along ``axis`` only.
          axis: A dim of the per-replica value.

        Raises:
          CrossReplicaContextError: Inside a replica function; use ``all_gather`` there.
          ReductionError: Scalars, a bad axis, or other dims that differ.
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
        """Arrays of cross-replica code where central storage keeps variables, so that both can be computed with."""
        device = self._parameter_device
        if device is None or current_capture() is not None:
            return pytree
        return jax.tree_util.tree_map(
            lambda leaf: jax.device_put(leaf, device) if isinstance(leaf, jax.Array) else leaf, pytree
        )

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a per-replica value on this process's replicas.

        Returns:
          A tuple of one component per replica; of a pytree a tuple of R pytrees; of anything else ``(value,)``.
        """
        return reduction.local_results(self.topology, value)

    def replicate(self, tree: Any) -> Any:
        """Copies the arrays of a pytree to every replica's device: state for functional JAX code. Of a
        ``jax.ShapeDtypeStruct`` it makes what stands for such an array in ``plan``.

        Pass the result to ``run``, and what ``run`` returns for it to the next. With
        ``RunOptions(donate_args=(0,))`` the first argument's memory is used again for the results.

        Returns:
          The pytree with ``Mirrored`` leaves; with one replica, arrays on its device.
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
            if is_traced or not self.topology.devices:  # of a coordinator, which has none
                return self.mirrored(jnp.asarray(leaf))
            array = placed_by_each(leaf, self.topology)
            if self.num_replicas_in_sync == 1:
                return self.runner.owned(array)
            return Mirrored(array, self.num_replicas_in_sync, is_ours=True)

        is_traced = self.joins_trace()
        return jax.tree_util.tree_map_with_path(copy, tree, is_leaf=is_value)

    def mirrored(self, array: Any) -> Any:
        """``array``, which is whole on all replicas, as a ``Mirrored``; with one replica the array."""
        return Mirrored(array, self.num_replicas_in_sync) if self.num_replicas_in_sync > 1 else array

    def unreplicate(self, tree: Any) -> Any:
        """One plain array for each replicated leaf of a pytree, the reverse of ``replicate``.

        Raises:
          PerReplicaUseError: A component is not proven to be the same on all replicas.
        """
        return jax.tree_util.tree_map(
            lambda leaf: (
                jnp.asarray(np.asarray(leaf.as_array())) if isinstance(leaf, DistributedValues) else leaf
            ),
            tree,
            is_leaf=lambda x: isinstance(x, DistributedValues),
        )

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes per-replica values from a function.

        Call it in cross-replica context (also inside ``rx.function`` and ``merge_call``).

        Args:
          value_fn: Called once for each replica of this process with a ``ValueContext``; returns an array or number, or
            a pytree of such, of the same structure and dtypes each time. Shapes may differ, except in ``merge_call``.
            While a function is traced it is called for the replicas of other processes too, since all of them trace one
            program.

        Returns:
          A pytree of ``PerReplica``; with one replica what ``value_fn`` returns.

        Raises:
          InvalidArgumentError: Not arrays, or structures, ranks or dtypes that differ.
          UnsupportedError: Shapes that differ in ``merge_call``.
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

        A batch of B rows is cut into R contiguous slices whose sizes differ by at most one, larger first: no row
        is dropped, none is seen twice, the last partial batch included. A thread reads ahead of the loop.

        Args:
          dataset: Batches [global_batch, ...]: ``rx.data.from_arrays(...).batch(n)``, files (``rx.data``), a grain
            or tf.data dataset, a torch DataLoader, a Hugging Face dataset, a Keras PyDataset, or any iterable of
            (pytrees of) arrays.
          options: How many elements wait, and where.
          distribute_options: How workers share the dataset, or only the policy (or its name); by default what the
            dataset says, or AUTO.

        Returns:
          An iterable of pytrees of ``PerReplica``; with one replica of arrays on its device.

        Raises:
          UnsupportedSourceError: ``dataset`` is none.
          UnbatchedDatasetError: Its elements are rows; call its ``batch``.
          NotEnoughFilesError: The policy FILE, and fewer files than workers.

        Source: tf.distribute.Strategy.experimental_distribute_dataset.
        """
        use_imported()  # Keras may be given it before any scope is entered
        return datasets.distribute(self.topology, dataset, options, distribute_options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes what ``dataset_fn`` makes: a dataset of per-replica batches, of which each step takes R.

        Args:
          dataset_fn: Called with an ``InputContext``; once, or once per replica with
            ``InputReplicationMode.PER_REPLICA``.
          options: How often ``dataset_fn`` is called; how many elements wait, and where.

        Source: tf.distribute.Strategy.distribute_datasets_from_function.
        """
        use_imported()
        return datasets.distribute_from_function(self.topology, dataset_fn, options, self.worker_of_own)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Returns the older name of ``distribute_datasets_from_function``."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """Returns a dataset over the rows of NumPy arrays (a pytree; a list is stacked). Call ``batch`` on it next."""
        del session
        return datasets.from_numpy(numpy_input)

    def make_experimental_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """Returns the name that the TensorFlow guide uses for ``experimental_make_numpy_dataset``."""
        return self.experimental_make_numpy_dataset(numpy_input, session)

    # --- logical devices ------------------------------------------------------------------------------

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Returns ``tensor``; checks the id.

        TensorFlow would run the operations on ``tensor`` on that device of the replica alone. Here all devices of a
        replica run one program, and each of them computes what is not divided; with several a warning says so, once.

        Args:
          tensor: [...] per replica.
          logical_device_id: Less than the number of logical devices of a replica: 1, but for ``TPUStrategy`` with a
            device assignment.

        Raises:
          InvalidArgumentError: There is no such device; or the strategy was made with
            ``experimental_spmd_xla_partitioning=True``.

        Source: tf.distribute.TPUStrategy.experimental_assign_to_logical_device.
        """
        return logical_devices.assign(self, tensor, logical_device_id)

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Divides ``tensor`` over the logical devices of its replica: what is computed from it is computed in pieces.

        The values stay what they are. In traced code (``run``, ``rx.function``, a layer in ``fit``) it asks the
        compiler, which divides what comes before and after alike, as it sees fit. Of a variable, outside of traced code
        and before the first step, it moves the variable: each device keeps its piece from then on. Anything else is
        returned as it is.

        Args:
          tensor: [...] per replica, or a variable.
          partition_dimensions: For each dim into how many pieces it is cut; their product is the number of logical
            devices.

        Returns:
          The same values; a variable itself.

        Raises:
          InvalidArgumentError: Another number of dims, one that cannot be divided, or another product.
          VariableError: The variable is in a compiled program already, or each replica has a value of its own.

        Source: tf.distribute.TPUStrategy.experimental_split_to_logical_devices.
        """
        return logical_devices.split(self, tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Gives all of ``tensor`` to each logical device of its replica: the reverse of dividing it.

        The values stay what they are. In ``fit`` it is the compiler's choice.

        Args:
          tensor: [...] per replica, or a variable.

        Source: tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices.
        """
        return logical_devices.replicate(self, tensor)

    # --- older names ----------------------------------------------------------------------------------

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Returns the older name of ``experimental_local_results``."""
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> Any:
        """In graphs this made one operation of many; here it returns ``value``, which is computed anyway."""
        del name
        return value

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Returns the older form of ``run``: runs ``fn`` on the next element of an iterator (or on nothing)."""
        args = () if input_iterator is None else (input_iterator.get_next(),)
        return self.run(fn, args=args)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """Returns an iterator over a distributed dataset; ``initialize()`` restarts it."""
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """Returns an iterator over what ``input_fn`` makes; ``initialize()`` restarts it."""
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
        """TensorFlow 1 sessions only.

        Raises:
          UnsupportedError: Always; says what to use instead.
        """
        del session_config, cluster_spec, task_type, task_id
        raise UnsupportedError(
            "strategy.configure set up TensorFlow 1 sessions, which do not exist here. Describe a cluster by TF_CONFIG "
            "or a cluster resolver when you make the strategy, and virtual devices by "
            "replicax.config.set_local_devices(n)."
        )

    def update_config_proto(self, config_proto: Any) -> None:
        """TensorFlow 1 sessions only.

        Raises:
          UnsupportedError: Always; says what to use instead.
        """
        del config_proto
        raise UnsupportedError(
            "strategy.update_config_proto changed the ConfigProto of TensorFlow 1 sessions, which do not exist here. "
            "Set JAX's options with jax.config.update(...), compiler options with "
            "rx.RunOptions(experimental_xla_options={...})."
        )

    # --- Python ---------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # which would take every name for one that is there

        def __getattr__(self, name: str) -> Any:
            # Python calls it where a name was not found, or a property has raised an AttributeError: it only raises.
            if name.startswith("_") or name in dir(type(self)):
                return object.__getattribute__(self, name)
            raise no_such_attribute(self, name)

    def __copy__(self) -> Strategy:
        raise UnsupportedError("Must only deepcopy DistributionStrategy: a strategy cannot be copied.")

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self  # a strategy is its devices; what refers to it keeps referring to it

    def __repr__(self) -> str:
        names = ", ".join("+".join(map(device_name, of_replica)) for of_replica in self.topology.grid)
        return f"<{type(self).__name__} on {names}>"

    def _repr_html_(self) -> str:
        from replicax._src.pictures.strategies import table_of  # at the edge: it uses public names

        return table_of(type(self).__name__, self.topology, self.variable_placement)
