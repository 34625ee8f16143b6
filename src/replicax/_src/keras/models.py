"""Keras models made in a strategy's scope. ``fit`` and its sister methods run their steps on the replicas.

``PlacedModel`` comes before Keras's own classes among the bases of ``keras.Model``; ``bridge.py`` puts it there. Models
made outside of every scope are left to Keras.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import keras
import numpy as np

from replicax._src import context, jax_compat
from replicax._src.errors import (
    ContextError,
    CrossReplicaContextError,
    KerasScopeError,
    MixedStrategiesError,
    ReplicaxError,
    UnsupportedError,
)
from replicax._src.input.arrays import check_numbers
from replicax._src.input.elements import EmptyDatasetError
from replicax._src.keras import internals, loop_callbacks, servers, shared_reads
from replicax._src.keras.capture import give_values
from replicax._src.keras.datasets import DistributedInput, as_keras_input, check_not_per_replica
from replicax._src.keras.fit_arguments import check_no_lists, check_one_hot, warn_of_labels
from replicax._src.keras.losses import in_compute_loss, rows_of_replica_step
from replicax._src.keras.planned_steps import placed_and_left
from replicax._src.keras.replica_steps import ReplicaStepFunction, is_replica_style, keras_step
from replicax._src.keras.server_steps import WorkerSteps
from replicax._src.keras.steps import PREDICT, TEST, TRAIN, GlobalStepFunction, Phase, StepFunction
from replicax._src.keras.worker_datasets import WorkerInput, as_worker_input
from replicax._src.keras.workers import start_together
from replicax._src.narrowing import narrowed
from replicax._src.tracebacks import bounded
from replicax._src.tracing.capture import current_capture, planning
from replicax._src.tracing.explanations import called_in_trace, explained
from replicax._src.variables.server_placement import ServerPlacement

if TYPE_CHECKING:
    from replicax._src.parameter_servers.strategy.parameter_server import ParameterServerStrategy
    from replicax._src.strategies.strategy import Strategy

Method = Callable[..., Any]
_Keras: Any = keras.Model if TYPE_CHECKING else object

PHASES = {
    "fit": TRAIN,
    "train_on_batch": TRAIN,
    "evaluate": TEST,
    "test_on_batch": TEST,
    "predict": PREDICT,
    "predict_on_batch": PREDICT,
}
"""The methods that run steps."""

_ARRAYS = frozenset({"x", "y", "sample_weight", "validation_data"})

STEPS_OF_DATA = {
    "fit": {"x": "steps_per_epoch", "validation_data": "validation_steps"},
    "evaluate": {"x": "steps"},
    "predict": {"x": "steps"},
}
"""The arguments that may be datasets, each with the argument for the number of its batches."""


def _placed(name: str) -> Method:
    """Returns a ``fit``, ``evaluate``, ... that enters the scope of the model's strategy and runs the strategy's
    steps.
    """
    original = getattr(keras.Model, name)
    signature = inspect.signature(original)

    is_loop = name in STEPS_OF_DATA

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_not_in_a_function(self, name)
        give_values(self)
        strategy = _strategy_of(self, name)
        if strategy is None and not context.has_strategy() and is_replica_style(self, PHASES[name]):
            strategy = context.get_strategy()  # Keras on JAX cannot run its step
        with contextlib.ExitStack() as stack:
            stack.enter_context(_explained_build(self, name))
            if strategy is not None:
                _check_has_steps(strategy, name)
                stack.enter_context(strategy.scope())
            stack.enter_context(explained("scope" if strategy is None else "fit"))
            try:
                call = signature.bind(self, *args, **kwargs)
            except TypeError:
                return original(self, *args, **kwargs)  # Keras raises the error
            given = call.arguments
            inputs = _take_datasets(name, given, context.get_strategy(), narrows=strategy is not None)
            for made in inputs:
                stack.enter_context(made.in_use())
            if strategy is None and inputs:
                strategy = context.get_strategy()  # Keras's own steps would miss the end of the data
            if strategy is not None:
                if is_loop:
                    _begin_loop(self, name, strategy, given)
                stack.enter_context(_placed_steps(self, name, strategy, given, is_loop=is_loop))
            if is_loop:
                stack.enter_context(internals.placing_batches(strategy is not None))
                stack.enter_context(loop_callbacks.in_loop(self, strategy, name, given))
            return original(*call.args, **call.kwargs)

    return functools.wraps(original)(bounded(method))


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


def _begin_loop(model: Any, method: str, strategy: Strategy, given: dict[str, Any]) -> None:
    """Checks that all processes give equal arguments. With ``verbose="auto"`` only the first process shows progress."""
    peers = strategy.topology.peers
    if peers is not None:
        if not peers.is_leader and given.get("verbose", "auto") == "auto":
            given["verbose"] = 0
        start_together(peers, method, model, given)
    _check_has_rows(model, method, given)
    check_no_lists(given)
    if method != "predict":
        check_one_hot(model, given)
        warn_of_labels(model, given)


def _is_of_keras(error: BaseException) -> bool:
    """True if Keras itself raised the error, not code that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("keras.")


def _check_has_rows(model: Any, method: str, given: Mapping[str, Any]) -> None:
    """Raises for arrays without rows. If Keras must still build the model, it runs no step on them and ends without an
    error.
    """
    for name in ("x", "validation_data"):
        leaves = keras.tree.flatten(given[name]) if name in given else []
        if any(isinstance(x, np.ndarray | jax.Array) and x.ndim and not x.shape[0] for x in leaves):
            raise _without_batch(model, method, name)


def _without_batch(model: Any, method: str, data: str = "x") -> EmptyDatasetError:
    what = "data" if data == "x" else data
    return EmptyDatasetError(
        f"{method}() of model {model.name!r} was given {what} without a single batch: arrays of no rows, or a dataset that is "
        "empty or used up."
    )


def _check_has_steps(strategy: Strategy, method: str) -> None:
    if strategy.worker_of_own is not None:
        raise UnsupportedError(
            f"{method}() is not supported where every worker runs its own copy of the program on shared parameter "
            "servers. Write the loop with strategy.run and rx.GradientTape, or let a chief coordinate the workers: "
            "rx.ParameterServerStrategy(is_coordinator=True) there, and `replicax server` in them."
        )


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
    strategy = context.owners.get(id(model))
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
        owners = [context.owners.get(id(variable)) for variable in metric.variables]
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
def _placed_steps(
    model: Any, method: str, strategy: Strategy, given: Mapping[str, Any], *, is_loop: bool
) -> Iterator[None]:
    """Gives Keras's loop a step function of replicax. On exit the variables have the state again."""
    phase = PHASES[method]
    function = _step_function(model, phase, strategy)
    with contextlib.ExitStack() as stack:
        stack.enter_context(function.in_call(given, is_loop=is_loop))
        if planning.get():
            stack.enter_context(placed_and_left(function))
        try:
            yield
        except (StopIteration, UnboundLocalError, TypeError) as error:
            # Keras's loops raise one of these if they have no batch to build a model with, or no logs of a step.
            is_for_building = isinstance(error, StopIteration) and _is_of_keras(error)
            if is_loop and (is_for_building or function.has_met_no_batch):
                raise _without_batch(model, method) from error
            raise
        if is_loop and function.has_met_no_batch:
            raise _without_batch(model, method)


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
    make: Callable[..., StepFunction] = GlobalStepFunction
    if _has_servers(strategy):
        make = functools.partial(ReplicaStepFunction, make_workers=WorkerSteps)
    elif is_replica_style(model, phase):
        make = ReplicaStepFunction
    if planning.get():  # for other devices than the strategy's
        return make(model, phase, strategy)
    is_ours = isinstance(function, StepFunction) and function.strategy is strategy
    if not is_ours or isinstance(function, GlobalStepFunction) is not (make is GlobalStepFunction):
        function = make(model, phase, strategy)
        setattr(model, phase.function_name, function)  # compile() removes it
    return function


def _has_servers(strategy: Strategy) -> TypeGuard[ParameterServerStrategy]:
    return isinstance(strategy.variable_placement, ServerPlacement)


def _take_datasets(
    method: str, given: dict[str, Any], strategy: Strategy, *, narrows: bool
) -> list[DistributedInput | WorkerInput]:
    """Replaces replicax's datasets among the arguments of a method by adapters for Keras.

    Args:
      narrows: True converts 64-bit arrays as JAX does, or raises an error. Keras also casts floats here, without a
        check.

    Returns:
      The adapters.
    """
    for argument in ("x", "y", "sample_weight"):
        check_not_per_replica(method, argument, given.get(argument))
    if narrows:
        for argument in sorted(_ARRAYS.intersection(given)):
            check_numbers(given[argument], argument)
            given[argument] = _narrowed(given[argument], argument)
    made = []
    for argument, steps in STEPS_OF_DATA.get(method, {}).items():
        data = given.get(argument)
        if _has_servers(strategy):
            data = as_worker_input(data, strategy, method, argument, given, steps)
        data = as_keras_input(data, strategy, argument, given, steps)
        if data is not given.get(argument):
            given[argument] = data
            made.append(data)
            if method == "predict" and all(layer.built for layer in internals.layers_of(given["self"])):
                data.on_epoch_end()  # predict takes no batch early, unlike fit and evaluate
    return made


def _narrowed(data: Any, argument: str) -> Any:
    """Returns the arguments for Keras. Arrays in memory are narrowed to JAX's dtypes.

    Memory-mapped files are read batch by batch.
    """
    leaves, tree = jax.tree.flatten(data, is_leaf=lambda value: not isinstance(value, (tuple, list, dict)))
    arrays = [None if isinstance(leaf, np.memmap) else leaf for leaf in leaves]
    new = {
        id(old): new
        for old, new in zip(arrays, narrowed(arrays, tree, argument), strict=True)
        if old is not new
    }
    return keras.tree.map_structure(lambda leaf: new.get(id(leaf), leaf), data) if new else data


def _note_devices(error: ValueError, model: Any, arguments: Any) -> None:
    """Adds to an error of a model's call what to write if an argument lies on other devices than the variables."""
    strategy = context.owners.get(id(model))
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
            if _has_servers(strategy):
                servers.adopt(given.get("optimizer"), strategy.variable_placement)
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

    def _get_jax_state(self, *, purge_model_variables: bool = False, **groups: bool) -> Any:
        with shared_reads.shards():  # Keras's loops start with the stored shards
            state = super()._get_jax_state(**groups)
        if purge_model_variables:
            phase = next(
                phase for phase in PHASES.values() if {g for g in groups if groups[g]} == set(phase.groups)
            )
            function = getattr(self, phase.function_name, None)
            if isinstance(function, GlobalStepFunction):
                state = function.hold(state)  # before the variables are empty, so that Ctrl-C loses nothing
            internals.purge(self, **groups)
        return state


_SIGNATURE_OF_COMPILE = inspect.signature(keras.Model.compile)
