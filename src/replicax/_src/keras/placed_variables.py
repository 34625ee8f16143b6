"""Puts Keras variables made in a scope on the devices of its strategy: their first value and each assigned value.

Programs find them there. Other modules place variables that are sharded over replicas or logical devices, variables on
parameter servers and variables of several processes.
"""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.keras.internals import accessor, current_scope
from replicax._src.keras.keras_placement import placement_of
from replicax._src.scope import context
from replicax._src.tracing.bindings import note_unshared, own_copy
from replicax._src.tracing.capture import current_capture
from replicax._src.variables.placement import VariablePlacement

_HOST_VALUES = (np.ndarray, np.generic, bool, int, float, list, tuple)


def place(variable: Any) -> None:
    """Moves the first value of a variable, if it has one yet, to the devices of its strategy."""
    placement = _placement_of(variable)
    if placement is None or not accessor.is_built(variable):
        return
    if context.owner_of(variable).bindings.layout_of(variable) is not None:  # Keras made it in its layout
        return
    (value,) = accessor.get([variable])
    if isinstance(value, jax.Array) and not isinstance(value, jax_compat.Tracer):
        accessor.set([variable], [_own(value, placement)])


def _own(value: jax.Array, placement: VariablePlacement) -> jax.Array:
    """Returns a first value on the devices of its variable. The first program need not copy it again."""
    if placement.parameter_device is not None:
        return placement.beside(value, has_components=False)
    placed = own_copy(value, placement.topology.replicated)
    note_unshared(placed)
    return placed


def beside(variable: Any, value: Any) -> Any:
    """Returns a value, assigned outside of functions, moved to the devices of the variable."""
    is_outside = current_capture() is None and current_scope() is None
    placement = _placement_of(variable) if is_outside else None
    if placement is None or not accessor.is_built(variable):
        return value
    if isinstance(value, keras.Variable):
        value = value.value
    if any(isinstance(leaf, jax_compat.Tracer) for leaf in jax.tree_util.tree_leaves(value)):
        return value
    if isinstance(value, _HOST_VALUES):
        value = np.asarray(value, variable.dtype)
    elif not isinstance(value, jax.Array):
        return value
    (stored,) = accessor.get([variable])
    if isinstance(value, jax.Array) and value.sharding.device_set == stored.sharding.device_set:
        return value  # keeps its sharding
    if variable.has_parts:
        return placement.beside(value, has_components=False)
    return placement.moved(value, stored)


def _placement_of(variable: Any) -> VariablePlacement | None:
    strategy = context.owner_of(variable)
    if strategy is None or not placement_of(strategy).stores_arrays:
        return None
    topology = strategy.variable_placement.topology
    return None if topology.is_ahead or topology.peers is not None else strategy.variable_placement
