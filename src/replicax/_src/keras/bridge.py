"""Installs and removes what makes Keras work in traced functions, through public names of Keras where it has them.

Outside of functions that replicax traces, and of scopes, everything behaves as before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import keras

from replicax._src import context, jax_compat
from replicax._src.collectives.eager import kept_states
from replicax._src.keras import capture as keras_capture
from replicax._src.keras import (
    checkpointing,
    divided_state,
    losses,
    metric_results,
    models,
    placed_variables,
    planned_steps,
    replica_steps,
    servers,
    shared_reads,
)
from replicax._src.keras.capture import accessor
from replicax._src.keras.optimizer import wrapped_apply, wrapped_loss_scale_apply
from replicax._src.keras.steps import PREDICT, TEST, TRAIN
from replicax._src.keras.threads import carry_state
from replicax._src.keras_backend import check_keras
from replicax._src.placement.eager import thread_states
from replicax._src.program.capture import current_capture, note_created, planning
from replicax._src.program.program import trace_scopes
from replicax._src.program.slots import is_local, slot_makers
from replicax._src.strategies.lowering import placers
from replicax._src.tracebacks import bounded, is_full
from replicax._src.values import variable_types
from replicax._src.variables.server_placement import ServerPlacement

_originals: list[tuple[type, str, Any]] = []
_placer = planned_steps.placer(models.PHASES)


class _Alone(threading.local):
    """Whether this thread makes variables that the other processes do not make."""

    is_alone = False


_alone = _Alone()


def install() -> None:
    """Makes Keras work in traced functions. Does nothing if it has been done.

    Raises:
      KerasBackendError: Keras runs on another backend than JAX.
    """
    check_keras("replicax")
    if _originals:
        return
    if is_full():
        keras.config.disable_traceback_filtering()
    _replace(keras.Variable, "__init__", _wrapped_variable_init)
    if getattr(keras.Variable, "_deferred_initialize", None):  # else its first use compares, and warns
        _replace(keras.Variable, "_deferred_initialize", _wrapped_deferred_initialize)
    for name in ("assign", "assign_add", "assign_sub"):
        _replace(keras.Variable, name, placed_variables.wrapped_assign)
    for kind, name in _MADE_ONCE:
        if getattr(kind, name, None):
            _replace(kind, name, _outside_functions)
    _replace(keras.optimizers.Optimizer, "__init__", _wrapped_optimizer_init)
    _replace(keras.StatelessScope, "get_current_value", _wrapped_get_current_value)
    _replace(keras.optimizers.Optimizer, "add_variable", divided_state.wrapped_add_variable)
    _replace(
        keras.optimizers.Optimizer,
        "add_variable_from_reference",
        divided_state.wrapped_add_variable_from_reference,
    )
    _replace(keras.optimizers.Optimizer, "apply", wrapped_apply)
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _replace(optimizer, "stateless_apply", divided_state.wrapped_stateless_apply)
    _replace(keras.optimizers.LossScaleOptimizer, "apply", wrapped_loss_scale_apply)
    _replace(keras.losses.Loss, "__call__", losses.wrapped_call)
    _replace(keras.Layer, "add_loss", losses.wrapped_add_loss)
    _replace_in_models("__init__", models.wrapped_init)
    _replace_in_models("compile", models.wrapped_compile)
    _replace_in_models("losses", losses.wrapped_losses)
    _replace_in_models("compute_loss", losses.wrapped_compute_loss)
    for phase in (TRAIN, TEST, PREDICT):
        _replace_in_models(phase.step_name, replica_steps.wrapped_step(phase))
    for name in models.PHASES:
        _replace_in_models(name, models.wrapped_method(name))
    placers.append(_placer)
    slot_makers.insert(0, keras_capture.make_slot)
    variable_types.append(keras.Variable)
    jax_compat.take_as_arrays(keras.Variable, _value_of)
    trace_scopes.append(_scope)
    thread_states.append(carry_state)
    kept_states.append(losses.keep_losses)
    checkpointing.install()


def install_servers() -> None:
    """Makes Keras variables that are made in the scope of a strategy with parameter servers live there."""
    install()
    if sum(name == "assign" for _, name, _ in _originals) > 1:  # once in install
        return
    _replace(keras.Variable, "value", servers.wrapped_value)
    _replace(keras.Variable, "assign", servers.wrapped_assign)
    _replace(
        keras.optimizers.Optimizer, "add_variable_from_reference", servers.wrapped_add_variable_from_reference
    )


def install_shared_reads() -> None:
    """Makes Keras variables that several processes divide readable."""
    if any(owner is keras.Variable and name == "value" for owner, name, _ in _originals):
        return
    _replace(keras.Variable, "value", shared_reads.wrapped_value)
    if any("_get_jax_state" in vars(cls) for cls in keras.Model.__mro__):
        _replace_in_models("_get_jax_state", shared_reads.wrapped_get_state)


def uninstall() -> None:
    """Puts everything back as it was."""
    while _originals:
        owner, name, original = _originals.pop()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    if keras_capture.make_slot in slot_makers:
        placers.remove(_placer)
        slot_makers.remove(keras_capture.make_slot)
        variable_types.remove(keras.Variable)
        trace_scopes.remove(_scope)
        thread_states.remove(carry_state)
        kept_states.remove(losses.keep_losses)


def _replace(owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    wrapped = wrap(original)
    _originals.append((owner, name, owner.__dict__.get(name)))
    setattr(owner, name, wrapped if isinstance(wrapped, property) else functools.wraps(original)(wrapped))


def _replace_in_models(name: str, wrap: Callable[[Any], Any]) -> None:
    """Where it is defined: Keras compares ``type(model).compile`` with that to see whether a user has replaced it.

    ``__init__`` is no boundary of tracebacks: Keras (3.15) reads its first argument's name.
    """
    owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
    _replace(owner, name, wrap if name == "__init__" else lambda original: bounded(wrap(original)))


def _scope(capture: Any) -> Any:
    _wrap_results()
    return keras_capture.capture_scope(capture)


def _value_of(variable: Any) -> Any:
    return variable.value


def _take_leaders_value(variable: Any) -> None:
    """In several processes a new variable begins with the value that it has in the first."""
    strategy = context.owners.get(id(variable))
    if strategy is None or strategy.topology.peers is None or _alone.is_alone:
        return
    if not accessor.is_built(variable):
        return
    with jax_compat.outside_traces():
        (value,) = accessor.get([variable])
        if is_local(value):
            accessor.set([variable], [strategy.topology.put_leaders(value)])


def _note_shared(variable: Any) -> None:
    reads = shared_reads.of(context.owners.get(id(variable)))
    if reads is not None and not _alone.is_alone:
        install_shared_reads()
        reads.note(variable)


def _wrapped_variable_init(original: Callable[..., None]) -> Callable[..., None]:
    """Remembers the strategy in whose scope a variable is made.

    One that a traced function creates has its value at once.
    """

    @_outside_functions
    def make(self: Any, args: Any, kwargs: Any) -> None:
        placement = servers.placement_of_scope()
        if placement is not None:
            install_servers()
            servers.make(original, self, placement, args, kwargs)
        else:
            divided_state.make(original, self, args, kwargs, is_alone=_alone.is_alone)
        context.remember_owner(self)
        layouts = getattr(_placement_of(self), "logical_layouts", None)
        if layouts is not None:
            layouts.note(self)
        _note_shared(self)
        _take_leaders_value(self)
        placed_variables.place(self)
        jax_compat.take_as_arrays(type(self), _value_of)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, args, kwargs)
        note_created(self.path)

    return __init__


# What makes arrays that Keras keeps in a layer: those that `build` computes, and the factors of regularizers. No public name
# comes before the `build` of a subclass (Keras 3.15).
_MADE_ONCE: Final = (
    (keras.Layer, "_maybe_build"),
    (keras.regularizers.L1, "__init__"),
    (keras.regularizers.OrthogonalRegularizer, "__init__"),
)


def _outside_functions(original: Callable[..., Any]) -> Callable[..., Any]:
    """What the method makes is kept: it is made as if no function were traced, as TensorFlow does in
    ``tf.init_scope``.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A plan needs no values.
        if current_capture() is None or planning.get() or getattr(self, "built", False):
            return original(self, *args, **kwargs)
        with keras_capture.outside_functions():
            return original(self, *args, **kwargs)

    return method


def _placement_of(variable: Any) -> Any:
    """Where the strategy in whose scope a variable was made keeps variables; None if it was made in none."""
    return getattr(context.owners.get(id(variable)), "variable_placement", None)


def _wrapped_deferred_initialize(original: Callable[..., None]) -> Callable[..., None]:
    """The first value of a variable of a model that was built while Keras traced it."""

    def _deferred_initialize(self: Any) -> None:
        if accessor.is_built(self):
            return
        placement = _placement_of(self)
        if isinstance(placement, ServerPlacement):
            servers.keep(self, placement)
            return
        if planning.get():
            keras_capture.without_values.append(self)
            return
        owner = context.owners.get(id(self))
        with divided_state.laid_out(owner, self._initializer) as self._initializer:
            original(self)
        divided_state.stay_as_assigned(owner, self)
        _take_leaders_value(self)
        placed_variables.place(self)

    return _deferred_initialize


def _wrapped_optimizer_init(original: Callable[..., None]) -> Callable[..., None]:
    """One of the base class itself is not for training: Keras makes it, to see its attributes, where a model is saved.

    One worker may save alone, so the others are not asked for the values of its variables.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        before = _alone.is_alone
        _alone.is_alone = before or type(self) is keras.optimizers.Optimizer
        try:
            original(self, *args, **kwargs)
        finally:
            _alone.is_alone = before

    return __init__


def _wrapped_get_current_value(original: Callable[..., Any]) -> Callable[..., Any]:
    """In a user's own StatelessScope a variable that it does not map is read from the trace, not frozen."""

    def get_current_value(self: Any, variable: Any) -> Any:
        value = original(self, variable)
        capture = current_capture()
        if value is None and capture is not None and not isinstance(self, keras_capture.CaptureScope):
            return keras_capture.read(capture, variable)
        if value is None and capture is None:
            return servers.stand_in(variable)
        return value

    return get_current_value


def _wrap_results() -> None:
    """``metric.result()`` in a replica function is over all replicas, for every Metric class there is by now."""
    for cls in _metric_classes(keras.metrics.Metric):
        if "result" in cls.__dict__ and not getattr(cls.__dict__["result"], "_replicax_wrapped", False):
            _replace(cls, "result", _wrapped_result)
            cls.__dict__["result"]._replicax_wrapped = True


def _metric_classes(cls: type) -> Iterator[type]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _metric_classes(sub)


def _wrapped_result(original: Callable[..., Any]) -> Callable[..., Any]:
    def result(self: Any, *args: Any, **kwargs: Any) -> Any:
        capture = current_capture()
        if capture is None or not capture.is_replica:
            return metric_results.noted(self, original(self, *args, **kwargs))
        with capture.aggregated_reads():
            return original(self, *args, **kwargs)

    return result
