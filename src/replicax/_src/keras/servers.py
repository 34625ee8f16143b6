"""Keras variables on parameter servers: how they are made, read and assigned, and how optimizers update them.

Such a variable holds a ``ServerArray`` in place of its array. Installed when a strategy has parameter servers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._src import context, jax_compat
from replicax._src.errors import UnsupportedError
from replicax._src.keras import internals
from replicax._src.keras.initial_values import InitialValue
from replicax._src.keras.internals import accessor
from replicax._src.keras.overriding import overridden
from replicax._src.keras.tables import why_not_for_tables
from replicax._src.parameter_servers.programs.events import Events, OptimizerCall
from replicax._src.tracing.branches import without_conditions
from replicax._src.tracing.capture import current_capture, replaced_capture
from replicax._src.tracing.optimizer_slots import kept_for
from replicax._src.user_code import user_line
from replicax._src.variables.server_arrays import ServerArray
from replicax._src.variables.server_placement import ServerPlacement


def placement_of_scope() -> ServerPlacement | None:
    """Returns the placement of variables that are made now, if it is on parameter servers."""
    if not context.has_strategy():
        return None
    placement = context.strategy_for_new_variable().variable_placement
    return placement if isinstance(placement, ServerPlacement) else None


def make(
    original: Callable[..., None], variable: Any, placement: ServerPlacement, args: Sequence[Any], kwargs: Any
) -> None:
    """Wraps ``Variable.__init__``. An initializer makes its array on the servers, not in this process."""
    initializer = args[0] if args else kwargs.get("initializer")
    if callable(initializer) or isinstance(initializer, str):
        with keras.StatelessScope(initialize_variables=False):
            original(variable, *args, **kwargs)
    else:
        original(variable, *args, **kwargs)
    if not jax_compat.is_staging():
        keep(variable, placement)


def keep(variable: Any, placement: ServerPlacement) -> None:
    """Gives a variable an array on the servers, with its value or that of its initializer."""
    shape, dtype = tuple(variable.shape), jnp.dtype(variable.dtype)
    initializer, value = internals.initializer_of(variable), internals.stored(variable)
    if value is None:
        initial: Any = InitialValue(initializer, shape, dtype)
    else:
        held = np.asarray(value)
        initial = lambda: held  # noqa: E731

    array = placement.new_array(variable.path, shape, dtype, initial)
    reference = kept_for(variable)
    stored = None if reference is None else internals.stored(reference)
    if isinstance(stored, ServerArray):
        array.beside = stored
    accessor.set([variable], [array])
    internals.set_initializer(variable, None)


def adopt(optimizer: Any, placement: ServerPlacement) -> None:
    """Moves the variables of a new optimizer, made outside of every scope, to the servers. An optimizer already in use
    belongs to another model.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer) or optimizer.built:
        return
    for variable in optimizer.variables:
        if id(variable) not in context.owners:
            keep(variable, placement)
            context.remember_owner(variable)


def is_kept(variable: Any) -> bool:
    """True if a variable's value is on parameter servers."""
    return isinstance(accessor.get([variable])[0], ServerArray)


@contextlib.contextmanager
def where(reference_variable: Any) -> Iterator[None]:
    """Makes an optimizer create a slot beside the variable that it belongs to, also in a ``build()`` outside of the
    scope.
    """
    owner = context.owners.get(id(reference_variable))
    with contextlib.ExitStack() as stack:
        if owner is not None and owner.has_servers and not context.has_strategy():
            stack.enter_context(context.Scope(owner))
        yield


def stand_in(variable: Any) -> Any:
    """Returns zeros in place of a server variable while Keras only asks for shapes; otherwise None."""
    if jax_compat.is_staging() and is_kept(variable):
        if _local.optimizer:
            raise UnsupportedError(
                f"{_local.optimizer} reads variable {variable.path!r}, which it neither owns nor updates here. "
                "Parameter servers update a variable only from its gradient and optimizer slots. Pass a varying value "
                "as the learning rate, which can be assigned, or apply gradients to all variables at once."
            )
        return jnp.zeros(variable.shape, variable.dtype)
    return None


# --- optimizers ---------------------------------------------------------------------------------------


def apply(
    original: Callable[..., Any],
    optimizer: Any,
    gradients: Sequence[Any],
    trainable_variables: Any,
    events: Events,
) -> Any:
    """Records ``Optimizer.apply`` in a function for workers. The servers apply the gradients to their variables."""
    if events.is_applying:  # an optimizer inside another one
        return original(optimizer, gradients, trainable_variables)
    capture = current_capture()
    if capture is not None and capture.is_in_branch:
        raise UnsupportedError(
            f"{type(optimizer).__name__} {optimizer.name!r} is applied in a branch of rx.cond at {user_line()}, and its variables are "
            "on parameter servers, which always apply updates. Select the gradients by the condition (jnp.where, with "
            "zeros), "
            "or return them from the branches and apply them outside."
        )
    variables = list(internals.trained_by(optimizer) if trainable_variables is None else trainable_variables)
    present = [(g, v) for g, v in zip(gradients, variables, strict=False) if g is not None]
    updated = [v for _, v in present]
    state = list(optimizer.variables)

    def trace(shape_of: Callable[[Any], tuple[int, ...]]) -> tuple[Any, list[Any]]:
        return _trace_update(original, optimizer, updated, state, shape_of)

    name = f"{type(optimizer).__name__} {optimizer.name!r}"
    call = OptimizerCall(updated, state, kept_for, trace, name, why_not_for_tables(optimizer))
    with events.applying(call, [_as_of(v, g) for g, v in present]):
        return original(optimizer, gradients, trainable_variables)


def _as_of(variable: Any, gradient: Any) -> Any:
    gradient, dtype = jnp.asarray(gradient), jnp.dtype(variable.dtype)
    if gradient.dtype != dtype:
        gradient = gradient.astype(dtype)
    shape = tuple(variable.shape)
    return gradient if gradient.shape == shape else jnp.broadcast_to(gradient, shape)


def _trace_update(
    original: Callable[..., Any],
    optimizer: Any,
    variables: Sequence[Any],
    state: Sequence[Any],
    shape_of: Callable[[Any], tuple[int, ...]],
) -> tuple[Any, list[Any]]:
    name = f"{type(optimizer).__name__} {optimizer.name!r}"
    every = [*state, *variables]
    avals = [_aval(v, shape_of) for v in [*state, *variables, *variables]]

    def update(*args: Any) -> list[Any]:
        gradients = args[len(state) : len(every)]
        values = [*args[: len(state)], *args[len(every) :]]
        with replaced_capture(None), _of_shapes(every, shape_of), overridden(_local, optimizer=name):
            with keras.StatelessScope(state_mapping=list(zip(every, values, strict=True))) as scope:
                original(optimizer, list(gradients), list(variables))
            return [scope.get_current_value(v) for v in [*variables, *state]]

    return without_conditions(*jax_compat.trace(update, avals))


class _Local(threading.local):
    optimizer = ""  # the name of the optimizer whose update is being traced


_local = _Local()


def _aval(variable: Any, shape_of: Callable[[Any], tuple[int, ...]]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_of(variable), jnp.dtype(variable.dtype))


@contextlib.contextmanager
def _of_shapes(variables: Sequence[Any], shape_of: Callable[[Any], tuple[int, ...]]) -> Iterator[None]:
    """Makes variables report the shape of a shard inside the block, because optimizers read it."""
    shapes = [(variable, tuple(variable.shape)) for variable in variables]
    try:
        for variable, shape in shapes:
            if shape_of(variable) != shape:
                internals.set_shape(variable, shape_of(variable))
        yield
    finally:
        for variable, shape in shapes:
            if tuple(variable.shape) != shape:
                internals.set_shape(variable, shape)
