"""``RunOptions(eager=True)``: runs the Python function in the calling thread on real values, for debugging.

One replica gets the rows of all replicas. During the call the strategy has one replica, so that every denominator is
that of the global batch. This is not a lowering of a program: it traces and keeps nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.collectives.in_replica import OneReplica
from replicax._src.devices.topology import REPLICA_AXIS, Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.scope.any_strategy import AnyStrategy, StrategyView
from replicax._src.scope.context import ReplicaContext
from replicax._src.tracing import key
from replicax._src.tracing.arguments import Call
from replicax._src.tracing.capture import created_again, current_capture, replaced_capture
from replicax._src.tracing.eager_capture import NO_AXIS, EagerCapture, on_no_device
from replicax._src.tracing.loss_counts import counting
from replicax._src.user.listening import listener
from replicax._src.user.user_code import user_line_of
from replicax._src.values.distributed import DistributedValues, Mirrored, PerReplica, cut, is_value
from replicax._src.values.framework import enter_modules, frameworks_in_use, use_imported
from replicax._src.vocabulary.errors import MixedStrategiesError, TraceError, UnsupportedError

log = logging.getLogger("replicax")


def run_eagerly(
    strategy: AnyStrategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Runs ``fn`` once, on the rows of all replicas; see ``Strategy.run`` and ``RunOptions.eager``.

    A function that creates variables (Keras layers called for the first time) runs twice.

    Raises:
      TraceError: It is called in a function that is being traced.
      UnsupportedError: The components of a per-replica argument are not rows of one batch.
      MixedStrategiesError: An argument is a value of another strategy.
      VariableError: Every call would create a variable.
      Exception: Any exception of ``fn``. All state is then unchanged.
    """
    use_imported()
    if current_capture() is not None or not jax_compat.is_evaluating():
        raise TraceError(
            "strategy.run(..., options=rx.RunOptions(eager=True)) was called in a function that is being traced "
            "(rx.function, jax.jit, merge_call), which has no real values to run it with. Call it from plain Python."
        )
    if strategy.num_replicas_in_sync > 1:
        _say_what_differs()
    fn = key.unwrap(fn)
    has_created = False
    while True:
        capture = EagerCapture(strategy.bindings.binding_of, strategy.variable_placement.replaced)
        with contextlib.closing(capture):
            result = _run(strategy, fn, args, kwargs, capture)
            if not capture.created:
                return result()
            if has_created:
                raise created_again(capture.created[0])
            has_created = True


@functools.cache
def _say_what_differs() -> None:
    """Logs, once in a process, how an eager run differs from a compiled one."""
    log.warning(
        "RunOptions(eager=True) runs one replica on the whole batch. Losses, gradients and weights are those of a compiled step; "
        "batch statistics, random numbers and replica_id_in_sync_group are those of one replica."
    )


def _run(
    strategy: AnyStrategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    capture: EagerCapture,
) -> Callable[[], Any]:
    """Calls the function. Returns a function that assigns the variables and returns the results."""
    num_replicas = strategy.num_replicas_in_sync
    call = Call(fn, args, kwargs, is_value, opens_modules=True)
    # Only the replicas differ from the strategy's own parts: variables that the function creates belong to all
    # replicas.
    topology = Topology.of(strategy.topology.devices[:1])
    alone = StrategyView(strategy, dataclasses.replace(strategy.parts, topology=topology))
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(topology.devices[0]))
        opened = call.tree.unflatten([_argument(leaf, num_replicas) for leaf in call.leaves])
        for framework in frameworks_in_use():
            stack.enter_context(framework.trace_scope(capture))
        stack.enter_context(replaced_capture(capture))
        stack.enter_context(counting())
        replica = ReplicaContext(strategy, None, OneReplica())
        stack.enter_context(context.replica_context(strategy, replica, alone))
        stack.enter_context(jax_compat.in_eager_mode(True))
        stack.enter_context(jax_compat.set_current_trace(capture.trace))
        stack.enter_context(_explained())
        stack.enter_context(listener().user_code("eager"))
        (args, kwargs, cells), finish = enter_modules(opened, call.has_modules)
        returned = finish(key.with_cells(call.fn, cells)(*args, **kwargs))

    def result() -> Any:
        capture.store()
        found = jax.tree_util.tree_map(lambda leaf: _result(leaf, num_replicas), returned, is_leaf=is_value)
        return call.finished(found)

    return result


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Context that explains errors of JAX's own collectives."""
    try:
        yield
    except NameError as error:
        if not jax_compat.names_unknown_axis(error, REPLICA_AXIS):
            raise
        raise UnsupportedError(NO_AXIS.format(line=user_line_of(error))) from error


# --- arguments and results ----------------------------------------------------------------------------


def _argument(leaf: Any, num_replicas: int) -> Any:
    """Returns a leaf of the arguments for the one replica: a copy of an array, anything else unchanged."""
    if not isinstance(leaf, (PerReplica, Mirrored)):
        return on_no_device(leaf) if key.is_array(leaf) else leaf
    if isinstance(leaf, PerReplica) and leaf.is_of_whole_batch:
        return on_no_device(leaf.stored)
    if leaf.num_replicas != num_replicas:
        raise MixedStrategiesError(
            f"strategy.run got a {type(leaf).__name__} of {leaf.num_replicas} components, and the strategy has "
            f"{num_replicas} replicas: the value was made by another strategy. Mixing different "
            f"tf.distribute.Strategy objects is not possible in one call."
        )
    if isinstance(leaf, Mirrored) or leaf.is_equal:
        return on_no_device(leaf.stored)
    return _joined(leaf)


def _joined(value: PerReplica) -> jax.Array:
    """Returns the components joined into one batch; see ``RunOptions.eager``."""
    stored = on_no_device(value.stored)
    components = [cut(stored[r], value.component_shape(r)) for r in range(value.num_replicas)]
    if components[0].ndim:
        if len({component.shape[1:] for component in components}) == 1:
            return jnp.concatenate(components)
    elif jax_compat.is_typed_key(stored.dtype) or len({np.asarray(c).tobytes() for c in components}) == 1:
        return components[0]
    shown = ", ".join(str(list(component.shape)) for component in components)
    raise UnsupportedError(
        f"strategy.run(..., options=rx.RunOptions(eager=True)) runs one replica on the rows of all, and got a per-replica value "
        f"whose components have the shapes {shown}: they are not rows of one batch. Give each component a first dim for its rows, "
        f"and equal sizes in the other dims; pass one value for all replicas as an array; or leave eager out."
    )


def _result(leaf: Any, num_replicas: int) -> Any:
    """Returns a leaf of the function's result in the form that ``run`` returns."""
    if isinstance(leaf, DistributedValues):
        leaf = leaf.as_array()
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf
    array = jnp.asarray(leaf)
    return array if num_replicas == 1 else PerReplica(array, 1, is_equal=True)
