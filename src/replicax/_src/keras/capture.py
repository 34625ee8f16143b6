"""Bindings of Keras variables for programs, and the scope in which reads and writes are captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from replicax._src import context, jax_compat
from replicax._src.collectives.seeds import seed_of_replica, shared_seed
from replicax._src.keras import internals
from replicax._src.keras.internals import accessor
from replicax._src.keras.losses import note_added
from replicax._src.tracing.bindings import Binding, SyncPolicy
from replicax._src.tracing.capture import Capture, current_capture, planning, replaced_capture


def make_binding(variable: Any, num_replicas: int) -> Binding:
    """Returns the binding of a Keras variable."""
    dtype = jnp.dtype(internals.stored_dtype(variable))
    sync_policy = _sync_policy(variable, dtype) if num_replicas > 1 else SyncPolicy.MIRRORED
    return Binding(variable, accessor, variable.path, tuple(variable.shape), dtype, sync_policy)


def _sync_policy(variable: Any, dtype: np.dtype) -> SyncPolicy:
    """Returns the sync policy of a variable from its purpose, since Keras declares aggregation "none" for almost
    everything.
    """
    if variable.has_parts:
        return SyncPolicy.PARTS
    if dtype == jnp.uint32 and variable.name == "seed_generator_state":
        return SyncPolicy.SEED
    if variable.synchronization == "on_read" and variable.aggregation == "sum":
        return SyncPolicy.SUMMED
    if variable.aggregation == "only_first_replica":
        return SyncPolicy.FIRST
    if variable.trainable:
        return SyncPolicy.MIRRORED
    return SyncPolicy.AVERAGED if jnp.issubdtype(dtype, jnp.inexact) else SyncPolicy.FIRST


def read(capture: Capture, variable: Any) -> Any:
    """Returns the value of a Keras variable in a traced function."""
    _give_value(variable)
    context.check_strategy_of(context.owners.get(id(variable)), f"variable {variable.path!r}")
    raw = capture.read(variable)
    sync_policy = capture.sync_policy_of(variable)
    if sync_policy is SyncPolicy.SEED and capture.is_replica:
        return seed_of_replica(raw, _communicator().replica_id())
    if sync_policy.is_sum:
        if not capture.is_replica:
            return jnp.sum(raw, axis=0, dtype=raw.dtype)
        if capture.num_aggregated_reads or context.merge_communicator() is not None:
            return _communicator().sum([raw])[0]
    return raw


def write(capture: Capture, variable: Any, value: Any) -> None:
    """Assigns a Keras variable in a traced function."""
    _give_value(variable)
    sync_policy = capture.sync_policy_of(variable)
    if sync_policy is SyncPolicy.SEED and capture.is_replica:
        value = shared_seed(value, _communicator().replica_id())
    elif sync_policy.is_sum and context.merge_communicator() is not None:
        value = jnp.where(_communicator().replica_id() == 0, value, jnp.zeros_like(value))
    elif sync_policy.is_sum and not capture.is_replica:
        value = jnp.zeros_like(capture.read(variable)).at[0].set(value)
    capture.write(variable, value)


def _communicator() -> Any:
    merged = context.merge_communicator()
    if merged is not None:
        return merged
    replica = context.get_replica_context()
    assert replica is not None
    assert replica.communicator is not None
    return replica.communicator


@contextmanager
def outside_functions() -> Iterator[None]:
    """Gives a variable that a traced function creates its first value at once, as if no function were being traced."""
    with internals.outside_scopes(), jax_compat.as_if_untraced(), replaced_capture(None):
        yield


def _give_value(variable: Any) -> None:
    """Gives a variable that was created in a Keras scope its first value, which that scope would otherwise give on
    exit.
    """
    if not accessor.is_built(variable) and not planning.get():
        with outside_functions():
            internals.initialize(variable)


class CaptureScope(keras.StatelessScope):
    """Sends reads and writes of Keras variables to the current capture, and collects ``model.losses``."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True, initialize_variables=not planning.get())

    def get_current_value(self, variable: Any) -> Any:
        capture = current_capture()
        return super().get_current_value(variable) if capture is None else read(capture, variable)

    def add_loss(self, loss: Any) -> None:
        note_added(loss, sys._getframe(1))
        super().add_loss(loss)

    def add_update(self, update: tuple[Any, Any]) -> None:
        capture = current_capture()
        if capture is None:
            super().add_update(update)
        else:
            write(capture, *update)


@contextmanager
def capture_scope(capture: Capture) -> Iterator[None]:
    """Returns the scope that is entered around each trace."""
    del capture
    give_values()
    with CaptureScope():
        yield


# Variables that stayed without values while a plan was made. Keras would have given them values.
without_values: list[Any] = []


def give_values() -> None:
    """Gives the variables that a plan left without values their first values. Inside of a plan it does nothing."""
    while without_values and not planning.get():
        variable = without_values.pop()
        if not accessor.is_built(variable):
            internals.initialize(variable)
