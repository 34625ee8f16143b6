"""Installs and removes the changes that let Keras work in traced functions, with public names of Keras where they
exist.

For ``keras.Variable``, ``keras.optimizers.Optimizer`` and ``keras.Model``, a class of replicax is put first among the
bases and overrides their methods. Where Keras defines a method in the class itself or in each subclass, the method is
replaced (``_REPLACED`` and ``Metric.result``). Nothing changes before the first scope is entered, ``run`` is called or
a function is decorated with ``rx.function`` (``framework.py``). After that the changes stay, because ``fit`` runs after
the ``with`` block of its scope has ended. Outside of scopes and of functions that replicax traces, Keras behaves as
before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import keras

from replicax._src.jax_internals import jax_compat
from replicax._src.keras import checkpointing, internals, losses, metric_results, models, planned_steps
from replicax._src.keras import variable_capture as keras_capture
from replicax._src.keras.backend import check_keras
from replicax._src.keras.models import PlacedModel
from replicax._src.keras.on_devices import ON_DEVICES as ON_DEVICES
from replicax._src.keras.optimizer import PlacedOptimizer, wrapped_loss_scale_apply
from replicax._src.keras.variable import PlacedVariable, value_of
from replicax._src.scope import context
from replicax._src.tracing.capture import current_capture
from replicax._src.user.tracebacks import bounded, is_full
from replicax._src.values.framework import Framework, stop_using, use


def _outside_functions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the method as if no function were being traced, because its result is kept. TensorFlow does this with
    ``tf.init_scope``.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        capture = current_capture()
        # A plan does not need values.
        if capture is None or capture.is_for_plan or getattr(self, "built", False):
            return original(self, *args, **kwargs)
        with keras_capture.outside_functions():
            return original(self, *args, **kwargs)

    return method


def _reads_from_disk(original: Callable[..., bool]) -> Callable[..., bool]:
    """Makes Keras use a temporary file, in scopes, where it would hold all weights of a ``.keras`` file in memory."""

    def is_memory_sufficient(model: Any) -> bool:
        return not context.has_strategy() and original(model)

    return is_memory_sufficient


_BASES: Final = (
    (keras.Variable, PlacedVariable),
    (keras.optimizers.Optimizer, PlacedOptimizer),
    (keras.Model, PlacedModel),
)

# Methods that a base class cannot override, because the class itself defines them. Each has the reason for replacing
# it.
_REPLACED: Final = (
    # It assigns in the branches of a condition, which JAX cannot trace. LossScaleOptimizer defines it, not Optimizer.
    (keras.optimizers.LossScaleOptimizer, "apply", wrapped_loss_scale_apply),
    # Differentiating a mean on several replicas raises an error. The base class of all losses defines this method.
    (keras.losses.Loss, "__call__", losses.wrapped_call),
    # Checked programs note labels outside the range. Losses, metrics and ``keras.ops`` call this function.
    (internals.nn, "sparse_categorical_crossentropy", losses.wrapped_sparse_categorical),
    # The losses of layers are of the global batch. keras.Layer defines this, and layers have losses as models do.
    (keras.Layer, "losses", losses.wrapped_losses),
    # Layers keep the arrays that ``build`` computes. No public hook runs before a subclass's ``build`` (Keras 3.16).
    (keras.Layer, "_maybe_build", _outside_functions),
    # These two regularizers turn their factors into arrays and keep them (Keras 3.12 to 3.16).
    (keras.regularizers.L1, "__init__", _outside_functions),
    (keras.regularizers.OrthogonalRegularizer, "__init__", _outside_functions),
    # A step of `fit` has its state in these scopes, and a value that leaves a scan or condition would be JAX's raw error.
    (keras.StatelessScope, "__enter__", keras_capture.wrapped_enter),
    (keras.StatelessScope, "add_update", keras_capture.wrapped_add_update),
    (keras.StatelessScope, "add_loss", keras_capture.wrapped_add_loss),
    # `load_model` and `model.save` hold the full file in memory if the host has twice as much (Keras 3.12 to 3.16).
    (internals.saving_lib, "is_memory_sufficient", _reads_from_disk),
    # Loops would move and stack the batches that a step of replicax places itself.
    (internals.Loop, "_get_iterator", internals.wrapped_get_iterator),
)

_originals: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Makes Keras work in traced functions. Does nothing the second time.

    Raises:
      KerasBackendError: Keras does not run on the JAX backend.
      KerasVersionError: A part of this version of Keras is not what replicax needs.
    """
    check_keras("replicax")
    if _originals:
        return
    internals.check()
    if is_full():
        keras.config.disable_traceback_filtering()
    for owner, base in _BASES:
        owner.__bases__ = (base, *owner.__bases__)
    for owner, name, wrap in _REPLACED:
        if getattr(owner, name, None):
            _replace(owner, name, wrap)
    jax_compat.take_as_arrays(keras.Variable, value_of)
    use(KERAS)


def uninstall() -> None:
    """Restores everything that ``install`` changed."""
    for owner, base in _BASES:
        owner.__bases__ = tuple(kept for kept in owner.__bases__ if kept is not base)
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)
    stop_using("keras")


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    wrapped = wrap(original)
    _originals.append((owner, name, original))
    setattr(
        owner, name, bounded(wrapped) if isinstance(wrapped, property) else functools.wraps(original)(wrapped)
    )


def _scope(capture: Any) -> Any:
    _wrap_results()
    return keras_capture.capture_scope(capture)


def _wrap_results() -> None:
    """Makes ``metric.result()`` in a replica function cover all replicas.

    Each class of metrics defines its own ``result``, so it is replaced in every class that exists by now.
    """
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


KERAS: Final = Framework(
    "keras",
    variable_types=(keras.Variable,),
    make_binding=keras_capture.make_binding,
    trace_scope=_scope,
    tracking=checkpointing.TRACKING,
    lowering_of=planned_steps.placer(models.PHASES),
    assignable=keras_capture.assignable_state,
)
