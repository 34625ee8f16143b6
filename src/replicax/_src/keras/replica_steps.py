"""Replica functions for steps: those in TensorFlow's style, ``train_step(self, data)``, and Keras's own in terms of
variables.

A replica sees its own rows; ``losses.py`` defines its losses. Steps run with ``strategy.run`` in this process, or on
the workers of parameter servers (``server_steps.py``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._src.devices.autoshard import rows_of_global_batch
from replicax._src.devices.split import split_sizes
from replicax._src.devices.topology import Topology
from replicax._src.errors import InvalidArgumentError
from replicax._src.input.sources import LocalRows
from replicax._src.keras import metric_results
from replicax._src.keras.capture import accessor
from replicax._src.keras.compiled_loss import count_loss
from replicax._src.keras.losses import in_replica_step, own_compute_loss_gathered
from replicax._src.keras.steps import Phase, State, StepFunction, joined
from replicax._src.lowering.batch import Batch
from replicax._src.options import RunOptions
from replicax._src.strategies.datasets import BatchPlacer
from replicax._src.tracing.tape import GradientTape
from replicax._src.values import PerReplica, is_value

if TYPE_CHECKING:
    from replicax._src.keras.server_steps import WorkerSteps
    from replicax._src.strategies.strategy import Strategy


def is_replica_style(model: Any, phase: Phase) -> bool:
    """True if the model's own step takes only the data. Keras's step on JAX also takes the state."""
    parameters = inspect.signature(getattr(model, phase.step_name)).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) == 1


@final
class ReplicaStep:
    """A model's step as a replica function: the user's in TensorFlow's style, or Keras's in terms of variables.

    Attributes:
      model: The model.
      phase: The phase of the step: training, testing or predicting.
      name: The display name, such as ``"Classifier.train_step"``.
      is_own: True if it is in TensorFlow's style.
      metrics: The metric of each log that is the result of a metric, for the step that was traced last.
    """

    def __init__(self, model: Any, phase: Phase, strategy: Strategy, name: str):
        self.model, self.phase, self.name, self._strategy = model, phase, name, strategy
        self.is_own = is_replica_style(model, phase)
        self.metrics: dict[str, Any] = {}
        of_keras = keras_step(phase)

        def step(data: Any) -> Any:
            data = without_nones(data)
            rows = next((leaf.shape[0] for leaf in jax.tree_util.tree_leaves(data) if leaf.ndim), 0)
            with in_replica_step(rows), metric_results.noting() as results:
                result = getattr(model, phase.step_name)(data) if self.is_own else of_keras(model, data)
            if phase.is_predict:
                return result
            if not isinstance(result, dict):
                raise InvalidArgumentError(
                    f"{name} returned {type(result).__name__}. It must return a dict of logs, for example "
                    "self.get_metrics_result()."
                )
            self.metrics = metric_results.metrics_of(result, results)
            return result

        self.function = named(step, name)

    def run(self, data: Any, sizes: Any, mean: Callable[[Any, Any], Any], options: Any = None) -> Any:
        """Runs the step on all replicas.

        Args:
          data: The part of the batch of each replica.
          sizes: [R] the number of rows of each replica.
          mean: ``weighted_mean``.
          options: The options of ``strategy.run``.

        Returns:
          The logs, or the predictions for all rows.
        """
        strategy = self._strategy
        with own_compute_loss_gathered(self.model):
            result = strategy.run(self.function, args=(data,), options=options)
        if self.phase.is_predict:
            return result if strategy.num_replicas_in_sync == 1 else strategy.gather(result, axis=0)
        return of_all_rows(result, sizes, mean)


def named(function: Any, name: str) -> Any:
    """Gives the function a display name and returns it."""
    function.__name__ = function.__qualname__ = name
    # Retraces of another model's step must not count towards a warning about this step.
    function.replicax_family = object()
    return function


@final
class ReplicaStepFunction(StepFunction):
    """Runs a step as a replica function. Replica functions find the state in the variables.

    Args:
      make_workers: Makes the runner of steps on the workers of parameter servers. With None they run in this process.
    """

    def __init__(
        self,
        model: Any,
        phase: Phase,
        strategy: Strategy,
        make_workers: Callable[[ReplicaStep, Any], WorkerSteps] | None = None,
    ):
        super().__init__(model, phase, strategy)
        self._step = ReplicaStep(model, phase, strategy, self.name)
        self._workers = None if make_workers is None else make_workers(self._step, strategy)
        self._placer = BatchPlacer(strategy.topology)
        self._weighted_mean = strategy.topology.compile(
            weighted_mean, f"{self.name}, mean over rows", out_shardings=strategy.topology.replicated
        )

    @property
    def replica_step(self) -> Callable[[Any], Any]:
        """The model's step as a replica function, which runs on the rows of each replica."""
        return self._step.function

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        for group, variables in zip(state, self.phase.variables_of(self.model), strict=True):
            values = list(group)
            accessor.set(variables[: len(values)], values)
        workers = self._workers
        run = self._run if workers is None else workers.run
        outputs = [run(batch) for batch in self._take(iterator, is_kept=True)]
        if not outputs:
            raise StopIteration
        # The returned state is empty. The variables hold the state; if Keras held it too, each step would copy it.
        empty = tuple([] for _ in state)
        self._note_logs(outputs[-1], len(outputs))
        if not self.phase.is_predict:
            return outputs[-1], empty
        return (joined(outputs) if workers is None else workers.joined(outputs)), empty

    def _standardised(self, data: Any) -> Any:
        return without_nones(data)

    def _around(self, given: Mapping[str, Any], *, is_loop: bool) -> contextlib.AbstractContextManager[None]:
        if self._workers is None:  # the variables keep their values during the loop
            return contextlib.nullcontext()
        return self._workers.in_call(given, is_loop=is_loop)

    def _run(self, batch: Batch) -> Any:
        topology = self.strategy.topology
        rows = _rows_here(batch, topology)
        sizes = topology.put_whole(np.asarray(rows.all_sizes or rows.sizes, np.float32))
        options = None if self._is_compiled else RunOptions(eager=True)
        return self._step.run(self._placer.place(rows), sizes, self._weighted_mean, options)


def _rows_here(batch: Batch, topology: Topology) -> LocalRows:
    """Returns the rows of a batch for the replicas of this process."""
    if batch.worker_sizes is not None:
        here = topology.local_replicas
        return LocalRows(
            batch.leaves, batch.tree, batch.worker_sizes[here.start : here.stop], batch.worker_sizes
        )
    rows = rows_of_global_batch(batch.num_rows, topology.share)
    leaves = [leaf[rows.start : rows.stop] for leaf in batch.leaves]
    return LocalRows(leaves, batch.tree, rows.sizes, split_sizes(batch.num_rows, topology.num_replicas))


def without_nones(data: Any) -> Any:
    """Returns ``(x, y)`` for ``(x, y, None)``, which only some of Keras's methods give."""
    if isinstance(data, tuple):
        while len(data) > 1 and data[-1] is None:
            data = data[:-1]
    return data


def of_all_rows(logs: Any, weights: Any, mean: Callable[[Any, Any], Any]) -> Any:
    """Returns one value per log: the mean over the rows, where replicas return different values.

    Args:
      weights: The number of rows of each replica.
    """

    def of_leaf(value: Any) -> Any:
        if not isinstance(value, PerReplica):
            return value
        return value.values[0] if value.is_equal else mean(value.array, weights)

    return jax.tree_util.tree_map(of_leaf, logs, is_leaf=is_value)


def weighted_mean(rows: jax.Array, weights: jax.Array) -> jax.Array:
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        rows = rows.astype(jnp.float32)
    weights = weights.reshape(-1, *[1] * (rows.ndim - 1))
    total = jnp.sum(jnp.where(weights > 0, rows * weights, 0), axis=0)  # never 0 * nan
    return (total / jnp.maximum(jnp.sum(weights), 1)).astype(rows.dtype)


# --- the steps that Keras's other backends have -------------------------------------------------------


def keras_step(phase: Phase, *, forgets_masks: bool = True) -> Callable[[Any, Any], Any]:
    """Returns Keras's own step of a model in terms of variables.

    Args:
      forgets_masks: True hides masks from metrics in training, as Keras on JAX does.
    """
    return {
        "train": functools.partial(_train_step, forgets_masks=forgets_masks),
        "test": _test_step,
        "predict": _predict_step,
    }[phase.name]


def _train_step(model: Any, data: Any, forgets_masks: bool = False) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with GradientTape() as tape:
        y_pred = _call(model, x, training=True)
        loss = _loss(model, x, y, y_pred, sample_weight, training=True)
        scaled = model.optimizer.scale_loss(loss)
    variables = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
    if forgets_masks:
        y_pred = keras.tree.map_structure(jnp.array, y_pred)
    return _logs(model, loss, x, y, y_pred, sample_weight)


def _test_step(model: Any, data: Any) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = _call(model, x, training=False)
    loss = _loss(model, x, y, y_pred, sample_weight, training=False)
    return _logs(model, loss, x, y, y_pred, sample_weight)


def _predict_step(model: Any, data: Any) -> Any:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return _call(model, x, training=False)


def _call(model: Any, x: Any, training: bool) -> Any:
    takes_training = "training" in inspect.signature(model.call).parameters
    return model(x, training=training) if takes_training else model(x)


def _loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    further = {"training": training} if takes_training else {}
    return model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **further)


def _logs(model: Any, loss: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    count_loss(model, loss)
    return model.compute_metrics(x, y, y_pred, sample_weight)
