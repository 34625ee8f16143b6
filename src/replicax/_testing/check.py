"""``check_against_one_device``: compares a step on a strategy's replicas with the same step on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax._src.devices.split import split_sizes
from replicax._src.devices.topology import Topology
from replicax._src.input.arrays import as_array
from replicax._src.input.sources import LocalRows
from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.strategies.data_placement import BatchPlacer
from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing.capture import current_capture
from replicax._src.values.distributed import DistributedValues, PerReplica, is_value
from replicax._src.values.framework import use_imported
from replicax._src.vocabulary.errors import (
    CrossReplicaContextError,
    InvalidArgumentError,
    MixedStrategiesError,
    ScopeNestingError,
)
from replicax._testing.comparison import Comparison
from replicax._testing.comparison_report import OneDeviceReport
from replicax._testing.measure import Tolerance, default_rtol
from replicax._testing.observation import on_one_device
from replicax._testing.runs import Side, StepOutcome


def check_against_one_device(
    fn: Callable[..., Any],
    batch: Any,
    strategy: Strategy,
    *,
    args: Sequence[Any] = (),
    rtol: float | None = None,
    atol: float = 0.0,
) -> OneDeviceReport:
    """Runs one step under ``strategy`` and the same step, on the whole batch, on one device, and compares.

    It compares the results of ``fn``, the gradients that optimizers apply (Keras's, or those after
    ``rx.optax.aggregate_gradients``), and the changes of variables. Both runs start from the current values of the
    variables and work on copies: every variable keeps its value, even if ``fn`` raises. Objects that ``fn`` creates in
    its first call (layers, optimizer slots) remain. On one device ``num_replicas_in_sync`` is 1, and an all-reduce
    changes nothing. Matrix products are computed in full precision.

    A scalar result, including a Python number, agrees if its sum or its mean over replicas equals one device's value.
    Arrays ``[rows, ...]`` are compared in replica order, as one array. Typed random keys must be equal. Call it in
    cross-replica context or outside every scope. It blocks.

    Args:
      fn: A replica function, called as ``strategy.run(fn, args=(batch, *args))``; or a step that calls ``strategy.run``
        itself, called as ``fn(distributed_batch, *args)``. It may be decorated with ``rx.function``.
      batch: A pytree of arrays [global_batch, ...] on the host. It is split as a distributed dataset splits it.
      strategy: The strategy that owns the variables of ``fn``.
      args: Further arguments, replicated on every replica: functional state and random keys.
      rtol: The tolerance relative to the largest magnitude of a value. The default is 1e-5 for float32, 1e-9 for
        float64, 5e-3 for float16 and 3e-2 for bfloat16, by the coarsest dtype in the step.
      atol: The absolute tolerance.

    Returns:
      A report. Print it, read ``ok`` and ``differences``, or call ``raise_if_different()``.

    Raises:
      InvalidArgumentError: ``batch`` has scalars, no rows, or arrays with different numbers of rows; ``args`` have
        per-replica values.
      UnsupportedElementError: ``batch`` has elements that datasets refuse: text, masked arrays, random keys.
      CrossReplicaContextError: It was called in a replica function.
      Exception: The error that ``fn`` raises.

    >>> import jax.numpy as jnp, numpy as np, replicax as rx
    >>> report = rx.testing.check_against_one_device(lambda x: jnp.sum(x), np.ones((4, 2)), rx.get_strategy())
    >>> report.ok
    True
    """
    _check_arguments(fn, strategy, args)
    strategy.topology.refuse_survivors("The comparison of a step with one device")
    use_imported()
    pytree, num_rows = _checked_batch(batch)
    sizes = split_sizes(num_rows, strategy.num_replicas_in_sync)
    with jax.default_matmul_precision("highest"):
        sides = Side.on_replicas(strategy, num_rows), Side.on_one_device(strategy, num_rows)
        given = (_distributed(sides[0].parts.topology, pytree, num_rows), *args)
        step, ours = _run_as_either(fn, strategy, sides[0], given)
        given = (_distributed(sides[1].parts.topology, pytree, num_rows), *on_one_device(args))
        try:
            wanted = sides[1].run(step, given)
        except Exception as error:
            error.add_note(
                "This happened when check_against_one_device ran the function over all rows on one device."
            )
            raise
    tolerance = Tolerance(_coarsest(ours, wanted) if rtol is None else rtol, atol)
    return Comparison(strategy, sizes, ours, wanted, on_one_device(args), tolerance).report()


def _run_as_either(
    fn: Callable[..., Any], strategy: Strategy, side: Side, given: tuple[Any, ...]
) -> tuple[Callable[..., Any], StepOutcome]:
    """Runs ``fn`` as a replica function, or as a step if it calls ``strategy.run`` itself."""

    def replicated(*args: Any) -> Any:
        return strategy.run(fn, args=args)

    try:
        return replicated, side.run(replicated, given)
    except (CrossReplicaContextError, MixedStrategiesError) as refused:
        try:
            return fn, side.run(fn, given)
        except Exception as error:
            raised = error if side.has_run else refused
            if isinstance(error, (MixedStrategiesError, ScopeNestingError)):
                raised.add_note(
                    f"(check_against_one_device was given {strategy!r}. Give the strategy that the function runs on.)"
                )
            if side.has_run:
                raise
            raise refused from None  # a replica function that makes a call of cross-replica context


def _check_arguments(fn: Any, strategy: Strategy, args: Any) -> None:
    if not callable(fn):
        raise InvalidArgumentError(
            f"check_against_one_device needs a replica function, or a step that calls strategy.run, got {fn!r}."
        )
    if not isinstance(strategy, Strategy):
        raise InvalidArgumentError(f"check_against_one_device needs a strategy, got {strategy!r}.")
    if not isinstance(args, (list, tuple)):
        raise InvalidArgumentError(
            f"args must be a list or tuple, got {type(args)}. For one write args=(value,)."
        )
    if current_capture() is not None or context.in_replica_function():
        raise CrossReplicaContextError(
            "check_against_one_device was called in a function that is being traced. Call it from plain Python."
        )
    context.check_may_enter(strategy)
    for leaf in jax.tree_util.tree_leaves(tuple(args), is_leaf=is_value):
        if isinstance(leaf, PerReplica) and not leaf.is_equal:
            raise InvalidArgumentError(
                "check_against_one_device: args has a per-replica value, which has no defined value on one device. Give rows "
                "of the batch in `batch`, and replicated values in `args`."
            )


def _checked_batch(batch: Any) -> tuple[Any, int]:
    """Returns the batch with NumPy or JAX arrays as leaves, and its number of rows."""
    leaves, tree = jax.tree_util.tree_flatten(batch, is_leaf=lambda x: isinstance(x, DistributedValues))
    if any(isinstance(leaf, (DistributedValues, jax_compat.Tracer)) for leaf in leaves):
        raise InvalidArgumentError(
            "check_against_one_device takes the global batch [global_batch, ...] before it is distributed, and splits it "
            "itself; got a distributed value. Give an element of the dataset, not one of the distributed dataset."
        )
    arrays = list(map(as_array, leaves))
    rows = {array.shape[0] if array.ndim else 0 for array in arrays}
    if len(rows) != 1 or 0 in rows:
        shapes = [tuple(array.shape) for array in arrays]
        has_numbers = any(not array.ndim for array in arrays)
        raise InvalidArgumentError(
            f"check_against_one_device needs a batch of arrays [global_batch, ...] with one number of rows, at least 1; got "
            f"shapes {shapes}. Give values without rows in args=(…).{_NUMBERS if has_numbers else ''}"
        )
    return tree.unflatten(arrays), rows.pop()


_NUMBERS = (
    " A number has no rows, and a Python list is a pytree of numbers: for one array write np.asarray([…]), whose first dim "
    "is the rows."
)


def _distributed(topology: Topology, pytree: Any, num_rows: int) -> Any:
    """Returns the batch as a distributed dataset yields it."""
    arrays, tree = jax.tree_util.tree_flatten(pytree)
    return BatchPlacer(topology).place(LocalRows(arrays, tree, split_sizes(num_rows, topology.num_replicas)))


def _coarsest(*outcomes: StepOutcome) -> float:
    return max((default_rtol(dtype) for o in outcomes for dtype in o.dtypes), default=default_rtol("float32"))
