"""The methods of ``Strategy`` that run functions on the replicas and combine their results."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, overload

import jax

from replicax._src.collectives.cross_device import CrossDeviceOps
from replicax._src.devices.plan import Plan
from replicax._src.hooks import hook
from replicax._src.input.dataset import DistributedIterator
from replicax._src.jax_internals import jax_compat
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.lowering.eager import run_eagerly
from replicax._src.scope import context, program_guard
from replicax._src.scope.any_strategy import StrategyParts
from replicax._src.strategies import lower_method, reduction
from replicax._src.strategies.mistakes import check_arguments, check_call
from replicax._src.strategies.run_steps import StepsRunner
from replicax._src.strategies.running import DEFAULT_OPTIONS
from replicax._src.tracing.capture import current_capture
from replicax._src.user.listening import check_beside_tensorflow, listener
from replicax._src.values.distributed import Mirrored, PerReplica, is_value
from replicax._src.values.framework import use_imported
from replicax._src.vocabulary.errors import (
    CrossReplicaContextError,
    InvalidArgumentError,
    MixedStrategiesError,
)
from replicax._src.vocabulary.options import ReduceName, ReduceOp, RunOptions

_R = TypeVar("_R")


class _Required:
    """The marker for an argument that was left out."""

    def __repr__(self) -> str:
        return "<required>"


_REQUIRED: Final = _Required()


class _Members(lower_method.LowerableStrategy, Protocol):
    """The members of ``Strategy`` that these methods use."""

    _own_parts: functools.cached_property[StrategyParts]
    _parameter_device: Device | None

    @property
    def steps_runner(self) -> StepsRunner: ...

    @property
    def user_ops(self) -> CrossDeviceOps | None: ...


if not TYPE_CHECKING:  # users test isinstance, which a Protocol among the base classes makes slow
    _Members = object


class RunMethods(_Members):
    """``run`` and what compiles like it, ``reduce`` and ``gather``. The class has no state."""

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
        view = context.check_may_enter(self)
        if "tensorflow" in sys.modules:
            listener().called_beside_tensorflow("strategy.run", fn)
        try:
            if options is not None and options.eager:
                self.parts.runner.check_eager()
                with context.Scope(self):
                    return run_eagerly(self, fn, args, kwargs or {})
            with program_guard.current():
                parts = self._own_parts if view is None else view.parts
                return parts.runner.run(fn, args, kwargs or {}, options or DEFAULT_OPTIONS)
        except TypeError:
            check_call(fn, args, kwargs or {})
            raise

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
        return lower_method.lower(
            self, lower_method.StepToLower(fn, args, kwargs or {}, options or DEFAULT_OPTIONS), topology
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
        context.check_may_enter(self)
        use_imported()  # they lower functions that are not replica functions
        step = lower_method.StepToLower(fn, args, kwargs or {}, options or DEFAULT_OPTIONS, global_batch)
        return hook("plan").plan_of(self, step, topology, remedy_limit_s)

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
        check_beside_tensorflow("strategy.reduce")
        context.check_may_enter(self)
        if axis is _REQUIRED:
            self._axis_left_out()
            axis = None
        self._check_values(value)
        result = reduction.reduce(self.topology, self.user_ops, ReduceOp.parse(reduce_op), value, axis)
        return self._where_variables_are(result)

    def _axis_left_out(self) -> None:
        """Raises InvalidArgumentError. A strategy overrides it if a ``reduce`` without an axis has axis=None there."""
        raise InvalidArgumentError(
            "strategy.reduce needs an axis. Write axis=None to combine the replicas' values as they are, such as one loss per "
            "replica; axis=0 to combine the rows of each, too."
        )

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
        check_beside_tensorflow("strategy.gather")
        context.check_may_enter(self)
        self._check_values(value)
        return self._where_variables_are(reduction.gather(self.topology, value, axis))

    def _check_values(self, pytree: Any) -> None:
        is_one = isinstance(pytree, PerReplica)
        for leaf in (pytree,) if is_one else jax.tree_util.tree_leaves(pytree, is_leaf=is_value):
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
