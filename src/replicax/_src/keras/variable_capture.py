"""Bindings of Keras variables for programs, and the scope in which reads and writes are captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import jax.numpy as jnp
import keras
import numpy as np

from replicax._src.collectives.seeds import seed_of_replica, shared_seed
from replicax._src.jax_internals import jax_compat
from replicax._src.keras import internals
from replicax._src.keras.internals import accessor
from replicax._src.keras.losses import note_added
from replicax._src.keras.overriding import overridden
from replicax._src.scope import context
from replicax._src.tracing.bindings import Binding, SyncPolicy
from replicax._src.tracing.capture import (
    Capture,
    assigned_in_inner_trace,
    current_capture,
    replaced_capture,
)
from replicax._src.tracing.loss_counts import loss_counts
from replicax._src.user.user_code import user_line
from replicax._src.values.framework import AssignableState
from replicax._src.vocabulary.errors import TraceError


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
    _give_value(capture, variable)
    context.check_strategy_of(context.owner_of(variable), f"variable {variable.path!r}")
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
    _give_value(capture, variable)
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


def _give_value(capture: Capture, variable: Any) -> None:
    """Gives a variable that was created in a Keras scope its first value, which that scope would otherwise give on
    exit.
    """
    if not accessor.is_built(variable) and not capture.is_for_plan:
        with outside_functions():
            internals.initialize(variable)


# --- scopes of Keras and of users: the state of a step of ``fit`` ---------------------------------------


def wrapped_enter(original: Any) -> Any:
    """Makes a ``keras.StatelessScope`` in a step remember the trace in which it is entered."""

    def __enter__(self: Any) -> Any:
        is_in_step = loss_counts() is not None
        self.replicax_trace = jax_compat.current_trace() if is_in_step else None
        return original(self)

    return __enter__


def wrapped_add_update(original: Any) -> Any:
    """Makes a ``keras.StatelessScope`` refuse a value that an inner function of JAX would leak."""

    def add_update(self: Any, update: tuple[Any, Any]) -> None:
        if _leaves(self, update[1]):
            raise assigned_in_inner_trace(update[0].path)
        original(self, update)

    return add_update


def wrapped_add_loss(original: Any) -> Any:
    """Makes a ``keras.StatelessScope`` refuse a loss that an inner function of JAX would leak."""

    def add_loss(self: Any, loss: Any) -> None:
        if _leaves(self, loss):
            raise _loss_in_inner_trace()
        original(self, loss)

    return add_loss


def _leaves(scope: Any, value: Any) -> bool:
    home = getattr(scope, "replicax_trace", None)
    # Keras computes the shapes of a layer's outputs in a symbolic scope, and drops all values.
    return home is not None and not internals.in_symbolic_scope() and jax_compat.leaves(value, home)


def _loss_in_inner_trace() -> TraceError:
    return TraceError(
        f"A layer adds a loss at {user_line()} inside a function that JAX traces on its own (a scan, loop, "
        f"condition or jax.checkpoint, or a branch of rx.cond), and the loss cannot leave it. Return the loss and add it "
        f"outside."
    )


@final
class _BranchScope(keras.StatelessScope):
    """A copy of a scope, for one branch of ``rx.cond``."""

    def __init__(self, scope: Any):
        super().__init__(collect_losses=scope.collect_losses, initialize_variables=scope.initialize_variables)
        self.state_mapping = dict(scope.state_mapping)
        self.losses = list(scope.losses)
        self.writes: dict[int, tuple[Any, Any, str]] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self.writes[id(update[0])] = (*update, user_line())

    def add_loss(self, loss: Any) -> None:
        raise _loss_in_inner_trace()


@final
class _StateOfScope:
    """The innermost ``keras.StatelessScope`` as state that ``rx.cond`` passes through its branches."""

    def branch(self) -> _BranchScope:
        return _BranchScope(internals.current_scope())

    def read(self, variable: Any) -> Any:
        value = internals.current_scope().get_current_value(variable)
        if value is None:  # the other branch assigns it, and the scope does not have it yet
            with overridden(variable, _autocast=False):
                value = variable.value
        return jnp.asarray(value, internals.stored_dtype(variable))  # Keras 3.12 keeps autocast values

    def write(self, variable: Any, value: Any, line: str) -> None:
        del line
        internals.current_scope().add_update((variable, value))


def assignable_state() -> AssignableState | None:
    """Returns the innermost scope of Keras or of the user; None without one, or if a capture has the values."""
    scope = internals.current_scope()
    is_capture = scope is None or (isinstance(scope, CaptureScope) and current_capture() is not None)
    return None if is_capture else _StateOfScope()


class CaptureScope(keras.StatelessScope):
    """Sends reads and writes of Keras variables to the current capture, and collects ``model.losses``."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(collect_losses=True, initialize_variables=not capture.is_for_plan)

    def get_current_value(self, variable: Any) -> Any:
        capture = current_capture()
        return super().get_current_value(variable) if capture is None else read(capture, variable)

    def add_loss(self, loss: Any) -> None:
        note_added(loss, sys._getframe(1))
        self.losses.append(loss)  # the function that jax.grad differentiates may use it

    def add_update(self, update: tuple[Any, Any]) -> None:
        capture = current_capture()
        if capture is None:
            super().add_update(update)
        else:
            write(capture, *update)


@contextmanager
def capture_scope(capture: Capture) -> Iterator[None]:
    """Returns the scope that is entered around each trace."""
    with CaptureScope(capture):
        yield


def is_planned() -> bool:
    """True if a step is lowered here and not run: variables without a value then stay without."""
    capture = current_capture()
    if capture is not None:
        return capture.is_for_plan
    view = context.view_of(context.get_strategy())
    return view is not None and view.is_for_plan


def give_values(model: Any) -> None:
    """Gives the variables of a model and its optimizer first values if a plan left them without.

    Inside of a plan it does nothing.
    """
    if is_planned():
        return
    optimizer = getattr(model, "optimizer", None)
    for variable in (*model.variables, *(() if optimizer is None else optimizer.variables)):
        if not accessor.is_built(variable):
            internals.initialize(variable)
