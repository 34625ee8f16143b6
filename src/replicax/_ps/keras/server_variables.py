"""Keras variables on parameter servers: how they are made, read and assigned, and how optimizers update them.

Such a variable holds a ``ServerArray`` in place of its array. Installed when a strategy has parameter servers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from replicax._ps.keras.initial_values import InitialValue
from replicax._ps.keras.tables import why_not_for_tables
from replicax._ps.placement.server_arrays import ServerArray
from replicax._ps.placement.server_placement import ServerPlacement
from replicax._ps.programs.branches import without_conditions
from replicax._ps.programs.variable_changes import Events, OptimizerCall
from replicax._src.program_kit.captures import current_capture
from replicax._src.program_kit.errors import UnsupportedError, user_line
from replicax._src.program_kit.keras_variables import StatelessUpdate, initializer_of, kept_for, store, stored


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


def keep(variable: Any, placement: ServerPlacement) -> None:
    """Gives a variable an array on the servers, with its value or that of its initializer."""
    shape, dtype = tuple(variable.shape), jnp.dtype(variable.dtype)
    initializer, value = initializer_of(variable), stored(variable)
    if value is None:
        initial: Any = InitialValue(initializer, shape, dtype)
    else:
        held = np.asarray(value)
        initial = lambda: held  # noqa: E731

    array = placement.new_array(variable.path, shape, dtype, initial)
    reference = kept_for(variable)
    held_by_reference = None if reference is None else stored(reference)
    if isinstance(held_by_reference, ServerArray):
        array.colocated_with = held_by_reference
    store(variable, array)


def stand_in(variable: Any) -> Any:
    """Returns zeros in place of a variable while Keras only asks for shapes."""
    if _local.optimizer:
        raise UnsupportedError(
            f"{_local.optimizer} reads variable {variable.path!r}, which it neither owns nor updates here. "
            "Parameter servers update a variable only from its gradient and optimizer slots. Pass a varying value "
            "as the learning rate, which can be assigned, or apply gradients to all variables at once."
        )
    return jnp.zeros(variable.shape, variable.dtype)


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
    update = StatelessUpdate(original, optimizer, gradients, trainable_variables)
    name = f"{type(optimizer).__name__} {optimizer.name!r}"

    def trace(shape_of: Callable[[Any], tuple[int, ...]]) -> tuple[Any, list[Any]]:
        with _tracing(name):
            return without_conditions(*update.traced(shape_of))

    call = OptimizerCall(update.variables, update.state, kept_for, trace, name, why_not_for_tables(optimizer))
    with events.applying(call, update.gradients):
        return original(optimizer, gradients, trainable_variables)


class _Local(threading.local):
    optimizer = ""  # the name of the optimizer whose update is being traced


_local = _Local()


@contextlib.contextmanager
def _tracing(name: str) -> Iterator[None]:
    """Context in which the update of an optimizer is traced."""
    before, _local.optimizer = _local.optimizer, name
    try:
        yield
    finally:
        _local.optimizer = before
