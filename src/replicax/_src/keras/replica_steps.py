"""Replica functions for steps: those in TensorFlow's style, ``train_step(self, data)``, and Keras's own in terms of
variables.

A replica sees its own rows; ``losses.py`` defines its losses. Steps run with ``strategy.run``.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._src.devices.autoshard import rows_of_global_batch
from replicax._src.devices.split import split_sizes
from replicax._src.devices.topology import Topology
from replicax._src.input.sources import LocalRows
from replicax._src.keras import internals, metric_results
from replicax._src.keras.compiled_loss import count_loss
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.losses import in_replica_step, own_compute_loss_gathered
from replicax._src.keras.overriding import overridden
from replicax._src.keras.phases import Phase
from replicax._src.keras.step_functions import State, StepFunction, joined
from replicax._src.keras.variable_capture import accessor
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.strategies.data_placement import BatchPlacer
from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing.tape import GradientTape
from replicax._src.values.distributed import PerReplica, is_value
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import RunOptions


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

        self.function = self.named(step)

    def named(self, function: Any) -> Any:
        """Gives a function the display name of the step, and returns it."""
        function.__name__ = function.__qualname__ = self.name
        # Retraces of another model's step must not count towards a warning about this step.
        function.replicax_family = object()
        return function

    def run(
        self, data: Any, sizes: Any, mean: Callable[[Any, Any], Any] | None = None, options: Any = None
    ) -> Any:
        """Runs the step on all replicas.

        Args:
          data: The part of the batch of each replica.
          sizes: [R] the number of rows of each replica.
          mean: A compiled ``weighted_mean``; None for itself.
          options: The options of ``strategy.run``.

        Returns:
          The logs, or the predictions for all rows.
        """
        strategy = self._strategy
        with own_compute_loss_gathered(self.model):
            result = strategy.run(self.function, args=(data,), options=options)
        if self.phase.is_predict:
            return result if strategy.num_replicas_in_sync == 1 else strategy.gather(result, axis=0)
        return of_all_rows(result, sizes, mean or weighted_mean)


@contextlib.contextmanager
def state_elsewhere(model: Any, sync: Callable[[], None]) -> Iterator[None]:
    """Makes Keras's loops find an empty state of a model, because it is kept elsewhere.

    Args:
      model: The model.
      sync: Called when Keras asks for the state that the loop has reached.
    """
    with overridden(model, **{internals.GET_STATE: _empty_state, internals.SYNC: sync}):
        yield


def _empty_state(purge_model_variables: bool = False, **groups: bool) -> tuple[list[Any], ...]:
    del purge_model_variables
    return tuple([] for is_wanted in groups.values() if is_wanted)


class ReplicaStyleFunction(StepFunction):
    """Runs a step as a replica function. Replica functions find the state in the variables."""

    def __init__(self, model: Any, phase: Phase, strategy: Strategy):
        super().__init__(model, phase, strategy)
        self._step = ReplicaStep(model, phase, strategy, self.name)

    @property
    def replica_step(self) -> Callable[[Any], Any]:
        """The model's step as a replica function, which runs on the rows of each replica."""
        return self._step.function

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        for group, variables in zip(state, self.phase.variables_of(self.model), strict=True):
            values = list(group)
            accessor.set(variables[: len(values)], values)
        outputs = [self._run(batch) for batch in self._take(iterator, is_kept=True)]
        if not outputs:
            raise StopIteration
        # The returned state is empty. The variables hold the state; if Keras held it too, each step would copy it.
        empty = tuple([] for _ in state)
        self._note_logs(outputs[-1], len(outputs))
        return self._joined(outputs) if self.phase.is_predict else outputs[-1], empty

    @abc.abstractmethod
    def _run(self, batch: DatasetBatch) -> Any:
        """Runs the step on a batch. Returns the logs or the predictions."""

    @abc.abstractmethod
    def _joined(self, outputs: Sequence[Any]) -> Any:
        """Returns the predictions of several batches as those for one."""

    def _standardised(self, data: Any) -> Any:
        return without_nones(data)


@final
class ReplicaStepFunction(ReplicaStyleFunction):
    """Runs the steps with ``strategy.run`` in this process."""

    def __init__(self, model: Any, phase: Phase, strategy: Strategy):
        super().__init__(model, phase, strategy)
        self._placer = BatchPlacer(strategy.topology)
        self._weighted_mean = strategy.topology.compile(
            weighted_mean, f"{self.name}, mean over rows", out_shardings=strategy.topology.replicated
        )

    def _joined(self, outputs: Sequence[Any]) -> Any:
        return joined(outputs)

    def _around(self, call: FitCall) -> contextlib.AbstractContextManager[None]:
        del call
        return contextlib.nullcontext()  # the variables keep their values during the loop

    def _run(self, batch: DatasetBatch) -> Any:
        topology = self.strategy.topology
        rows = _rows_here(batch, topology)
        sizes = topology.put_whole(np.asarray(rows.all_sizes or rows.sizes, np.float32))
        options = None if self._is_compiled else RunOptions(eager=True)
        return self._step.run(self._placer.place(rows), sizes, self._weighted_mean, options)


def _rows_here(batch: DatasetBatch, topology: Topology) -> LocalRows:
    """Returns the rows of a batch for the replicas of this process."""
    if batch.worker_sizes is not None:
        here = topology.local_replicas
        sizes = tuple(batch.worker_sizes[replica] for replica in here)
        return LocalRows(batch.leaves, batch.tree, sizes, batch.worker_sizes)
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
