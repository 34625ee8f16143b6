"""Keras models made in a strategy's scope. ``fit`` and its sister methods run their steps on the replicas.

``PlacedModel`` comes before Keras's own classes among the bases of ``keras.Model``; ``bridge.py`` puts it there. Models
made outside of every scope are left to Keras.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import keras

from replicax._src.jax_internals import jax_compat
from replicax._src.keras import internals, loop_callbacks, shared_reads
from replicax._src.keras.exclusion import alone
from replicax._src.keras.fit_arguments import without_batch
from replicax._src.keras.fit_call import PHASES, FitCall
from replicax._src.keras.fit_preparation import PreparedCall, prepare
from replicax._src.keras.keras_placement import placement_of
from replicax._src.keras.losses import in_compute_loss, rows_of_replica_step
from replicax._src.keras.optimizer import adopt
from replicax._src.keras.phases import PREDICT, TEST, TRAIN, Phase
from replicax._src.keras.planned_steps import placed_and_left
from replicax._src.keras.replica_steps import is_replica_style, keras_step
from replicax._src.keras.step_building import built_by_step
from replicax._src.keras.step_functions import StepFunction
from replicax._src.keras.variable_capture import give_values, is_planned
from replicax._src.scope import context
from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.outer_trace import called_in_trace
from replicax._src.user.listening import listener
from replicax._src.user.tracebacks import bounded
from replicax._src.vocabulary.errors import (
    ContextError,
    CrossReplicaContextError,
    KerasScopeError,
    MixedStrategiesError,
    ReplicaxError,
    UnsupportedError,
)

Method = Callable[..., Any]
_Keras: Any = keras.Model if TYPE_CHECKING else object


def _placed(name: str) -> Method:
    """Returns a ``fit``, ``evaluate``, ... that enters the scope of the model's strategy and runs the strategy's
    steps.
    """
    original = getattr(keras.Model, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_not_in_a_function(self, name)
        strategy = _strategy_of(self, name)
        if strategy is None and not context.has_strategy() and is_replica_style(self, PHASES[name]):
            strategy = context.get_strategy()  # Keras on JAX cannot run its step
        with contextlib.ExitStack() as stack:
            if strategy is not None:
                stack.enter_context(alone(self, name))
            self.jax_state_sync()  # in a callback of fit, whose `self.model` does it, and the name `model` does not
            give_values(self)
            stack.enter_context(_explained_build(self, name))
            if strategy is not None:
                placement_of(strategy).check_method(strategy, name)
                stack.enter_context(strategy.scope())
            stack.enter_context(listener().user_code("scope" if strategy is None else "fit"))
            try:
                call = FitCall.of(self, name, args, kwargs)
            except TypeError:
                return original(self, *args, **kwargs)  # Keras raises the error
            return _run(prepare(call, strategy), original)

    return functools.wraps(original)(bounded(method))


def _run(prepared: PreparedCall, original: Method) -> Any:
    """Runs Keras's method with the strategy's steps, if there is a strategy."""
    call, strategy = prepared.call, prepared.strategy
    with contextlib.ExitStack() as stack:
        for adapter in prepared.inputs:
            stack.enter_context(adapter.in_use())
        if strategy is not None:
            stack.enter_context(_placed_steps(call, strategy))
        if call.is_loop:
            stack.enter_context(internals.placing_batches(strategy is not None))
            call = stack.enter_context(loop_callbacks.in_loop(call, strategy))
        try:
            return call.run(original)
        except SystemExit as error:
            if strategy is not None and strategy.topology.peers is not None:
                strategy.topology.peers.note_exit(error)
            raise


@contextlib.contextmanager
def _explained_build(model: Any, method: str) -> Iterator[None]:
    """Adds to Keras's error for a model that it cannot build, because it has no ``call``, what to write."""
    has_call = type(model).call is not keras.Model.call
    unbuilt = [] if has_call else [each.name for each in (model, *model.layers) if not each.built]
    try:
        yield
    except RuntimeError as error:
        if unbuilt and not isinstance(error, ReplicaxError):
            error.add_note(
                f"Model {model.name!r} has no call(), with which Keras would build it before {method}(). Write self.built = True "
                "at the end of its __init__, and give each network in it a keras.Input, or call it once there. Not built yet: "
                f"{', '.join(unbuilt)}."
            )
        raise


def _is_of_keras(error: BaseException) -> bool:
    """True if Keras itself raised the error, not code that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("keras.")


def _check_not_in_a_function(model: Any, method: str) -> None:
    if current_capture() is None:
        if not jax_compat.is_evaluating():
            raise called_in_trace(f"{method}() of model {model.name!r}")
        return
    where = "a function that strategy.run runs" if context.in_replica_function() else "an rx.function"
    kind = CrossReplicaContextError if context.in_replica_function() else ContextError
    raise kind(
        f"{method}() of model {model.name!r} was called inside {where}: it loops over data and compiles its own "
        "programs. Call it outside; inside, call the model, a loss and an optimizer."
    )


def _strategy_of(model: Any, method: str) -> Any:
    """Returns the strategy in whose scope a model was made, or None for a model outside of all scopes.

    Raises:
      KerasScopeError: The model was made outside of the scope in which it is trained.
    """
    strategy = context.owner_of(model)
    if strategy is None and context.has_strategy() and method in ("compile", "fit", "train_on_batch"):
        raise KerasScopeError(
            f"Model {model.name!r} was made outside the scope of {context.get_strategy()!r}, and {method}() was called "
            "inside it, so it would be trained on one device. Make the model, its optimizer and its metrics inside:\n"
            f"    with strategy.scope():\n"
            f"        model = ...\n"
            f"        model.compile(...)"
        )
    return strategy


def _check_metrics(metrics: Any, strategy: Strategy, model: Any) -> None:
    for metric in keras.tree.flatten(metrics):
        if not isinstance(metric, keras.metrics.Metric):
            continue
        owners = [context.owner_of(variable) for variable in metric.variables]
        if all(owner is strategy for owner in owners):
            continue
        if any(owner is not None and owner is not strategy for owner in owners):
            raise MixedStrategiesError(
                f"Mixing different tf.distribute.Strategy objects: metric {metric.name!r} was made in the scope of "
                f"another strategy than model {model.name!r}, which belongs to {strategy!r}. Make the metric in that "
                "scope."
            )
        raise KerasScopeError(
            f"Metric {metric.name!r}, given to compile() of model {model.name!r}, was made outside the scope of "
            f"{strategy!r}, in which the model was made. Make it inside `with strategy.scope():`, or give its name."
        )


# --- running ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _placed_steps(call: FitCall, strategy: Strategy) -> Iterator[None]:
    """Gives Keras's loop a step function of replicax. On exit the variables have the state again."""
    function = _step_function(call.model, call.phase, strategy)
    with contextlib.ExitStack() as stack:
        stack.enter_context(function.in_call(call))
        if is_replica_style(call.model, call.phase):
            stack.enter_context(built_by_step(call))
        if is_planned():
            stack.enter_context(placed_and_left(function))
        try:
            yield
        except (StopIteration, UnboundLocalError, TypeError) as error:
            # Keras's loops raise one of these if they have no batch to build a model with, or no logs of a step.
            is_for_building = isinstance(error, StopIteration) and _is_of_keras(error)
            if call.is_loop and (is_for_building or function.has_met_no_batch):
                raise without_batch(call) from error
            raise
        if call.is_loop and function.has_met_no_batch:
            raise without_batch(call)


def _step_function(model: Any, phase: Phase, strategy: Strategy) -> StepFunction:
    maker = f"make_{phase.function_name}"
    if getattr(type(model), maker) is not getattr(keras.Model, maker):
        raise UnsupportedError(
            f"{type(model).__name__} overrides {maker}, which makes the function that replicax must replace. Override "
            f"{phase.step_name} instead."
        )
    if keras.distribution.distribution() is not None:
        raise UnsupportedError(
            f"keras.distribution is set ({type(keras.distribution.distribution()).__name__}), and model {model.name!r} was "
            f"made in the scope of {strategy!r}: both decide where it runs. Remove one of them; "
            "keras.distribution.set_distribution(None) removes Keras's."
        )
    function: Any = getattr(model, phase.function_name, None)
    kind = placement_of(strategy).steps_class(model, phase)
    if is_planned():  # for other devices than the strategy's
        return kind(model, phase, strategy)
    if not isinstance(function, kind) or function.strategy is not strategy:
        function = kind(model, phase, strategy)
        setattr(model, phase.function_name, function)  # compile() removes it
    return function


def _note_devices(error: ValueError, model: Any, arguments: Any) -> None:
    """Adds to an error of a model's call what to write if an argument lies on other devices than the variables."""
    strategy = context.owner_of(model)
    if strategy is None or current_capture() is not None or not model.weights:
        return
    devices, *of_arguments = map(_devices, [model.weights[0].value, *keras.tree.flatten(arguments)])
    others = next((each for each in of_arguments if each and each != devices), None)
    if devices and others:
        error.add_note(
            f"(The variables of model {model.name!r} lie on all devices of {strategy!r}, and an argument only on "
            f"{', '.join(map(str, others))}. Give it NumPy: {model.name}(np.asarray(x)); or call predict, which places its "
            "input.)"
        )


def _devices(value: Any) -> set[Any] | None:
    """Returns the devices on which an array was put on purpose; None for other values."""
    is_placed = isinstance(value, jax.Array) and not isinstance(value, jax_compat.Tracer) and value.committed
    return value.sharding.device_set if is_placed else None


# --- the class ------------------------------------------------------------------------------------------


def _placed_step(phase: Phase) -> Method:
    """Returns ``super().train_step(data)`` for a step in TensorFlow's style. If it also takes the state, it is Keras's
    own.
    """
    of_variables = keras_step(phase, forgets_masks=False)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rows_of_replica_step() is not None and len(args) + len(kwargs) == 1:
            return of_variables(self, *args, **kwargs)
        return getattr(super(PlacedModel, self), phase.step_name)(*args, **kwargs)

    step.__name__ = step.__qualname__ = phase.step_name
    return bounded(step)


class PlacedModel(_Keras):
    """A Keras model of the strategy in whose scope it is made.

    It comes before Keras's own classes among the bases of ``keras.Model``.
    """

    fit, train_on_batch = _placed("fit"), _placed("train_on_batch")
    evaluate, test_on_batch = _placed("evaluate"), _placed("test_on_batch")
    predict, predict_on_batch = _placed("predict"), _placed("predict_on_batch")
    train_step, test_step, predict_step = _placed_step(TRAIN), _placed_step(TEST), _placed_step(PREDICT)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__new__(cls, *args, **kwargs)
        context.remember_owner(model)
        return model

    @functools.wraps(keras.Model.__call__)
    @bounded
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValueError as error:
            _note_devices(error, self, (args, kwargs))
            raise

    @functools.wraps(keras.Model.compile)
    @bounded
    def compile(self, *args: Any, **kwargs: Any) -> Any:
        strategy = _strategy_of(self, "compile")
        if strategy is None:
            return super().compile(*args, **kwargs)
        with strategy.scope():  # new variables belong to this scope
            given = _SIGNATURE_OF_COMPILE.bind(self, *args, **kwargs).arguments
            for name in ("metrics", "weighted_metrics"):
                _check_metrics(given.get(name), strategy, self)
            adopt(given.get("optimizer"), placement_of(strategy))
            return super().compile(*args, **kwargs)

    @functools.wraps(keras.Model.compile_from_config)
    def compile_from_config(self, config: Any) -> None:
        if type(self).compile is not keras.Model.compile:
            super().compile_from_config(config)  # warns that a user's own compile is not called
            return
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    @functools.wraps(keras.Model.compute_loss)
    @bounded
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with in_compute_loss():
            return super().compute_loss(*args, **kwargs)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Returns what the model's own step returned if the step has not counted the loss, which Keras takes for 0."""
        for tracker in self.metrics[:1]:
            if (
                tracker.name == "loss"
                and isinstance(logs, dict)
                and "loss" in logs
                and not float(tracker.count)
            ):
                return logs
        return super()._get_metrics_result_or_logs(logs)

    def _get_jax_state(self, **groups: bool) -> Any:
        with shared_reads.shards():  # Keras's loops start with the stored shards
            return super()._get_jax_state(**groups)


_SIGNATURE_OF_COMPILE = inspect.signature(keras.Model.compile)
