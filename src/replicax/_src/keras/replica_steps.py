"""Steps in TensorFlow's style, ``train_step(self, data)``: replica functions, run with ``strategy.run``.

A replica sees its own rows; ``losses.py`` says what its losses are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
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
from replicax._src.keras.capture import accessor
from replicax._src.keras.losses import in_replica_step, own_compute_loss_gathered, rows_of_replica_step
from replicax._src.keras.steps import Phase, State, StepFunction, joined
from replicax._src.lowering.batch import Batch
from replicax._src.options import RunOptions
from replicax._src.strategies.datasets import BatchPlacer
from replicax._src.tracing.tape import GradientTape
from replicax._src.values import PerReplica, is_value

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy


def is_replica_style(model: Any, phase: Phase) -> bool:
    """Whether the model's own step takes the data alone; Keras's on JAX takes the state too."""
    parameters = inspect.signature(getattr(model, phase.step_name)).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) == 1


@final
class ReplicaStepFunction(StepFunction):
    """Runs a step in TensorFlow's style. The state is where replica functions look for it: in the variables."""

    def __init__(self, model: Any, phase: Phase, strategy: Strategy):
        super().__init__(model, phase, strategy)
        self._placer = BatchPlacer(strategy.topology)
        self._weighted_mean = strategy.topology.compile(
            weighted_mean, f"{self._name}, mean over rows", out_shardings=strategy.topology.replicated
        )

        def step(data: Any) -> Any:
            rows = next((leaf.shape[0] for leaf in jax.tree_util.tree_leaves(data) if leaf.ndim), 0)
            with in_replica_step(rows):
                return getattr(model, phase.step_name)(data)

        step.__qualname__ = self._name
        # What another model's step is traced for is no reason to warn of this one.
        step.replicax_family = object()
        self._replica_step = step

    @property
    def replica_step(self) -> Callable[[Any], Any]:
        """The model's step as a replica function: what each replica does with its rows."""
        return self._replica_step

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        for group, variables in zip(state, self._phase.variables_of(self._model), strict=True):
            values = list(group)
            accessor.set(variables[: len(values)], values)
        outputs = [self._run(batch) for batch in self._take(iterator, is_kept=True)]
        if not outputs:
            raise StopIteration
        # No state: it is in the variables, and what Keras holds too would be copied in each step.
        return (joined(outputs) if self._phase.is_predict else outputs[-1]), tuple([] for _ in state)

    def _standardised(self, data: Any) -> Any:
        return without_nones(data)

    def finish(self) -> None:
        """Nothing is left to do: the variables have had their values all along."""

    def _run(self, batch: Batch) -> Any:
        rows = _rows_here(batch, self._strategy.topology)
        sizes = rows.all_sizes or rows.sizes
        value = self._placer.place(rows)
        options = None if self._is_compiled else RunOptions(eager=True)
        with own_compute_loss_gathered(self._model):
            result = self._strategy.run(self._replica_step, args=(value,), options=options)
        if result is None:
            raise InvalidArgumentError(
                f"{self._name} returned None. It must return {self._phase.described_result}."
            )
        if self._phase.is_predict:
            return result if len(sizes) == 1 else self._strategy.gather(result, axis=0)
        weights = self._strategy.topology.put_whole(np.asarray(sizes, np.float32))
        return of_all_rows(result, weights, self._weighted_mean)


def _rows_here(batch: Batch, topology: Topology) -> LocalRows:
    """The rows of a batch that the replicas of this process take."""
    if batch.worker_sizes is not None:
        here = topology.local_replicas
        return LocalRows(
            batch.leaves, batch.tree, batch.worker_sizes[here.start : here.stop], batch.worker_sizes
        )
    rows = rows_of_global_batch(batch.num_rows, topology.share)
    leaves = [leaf[rows.start : rows.stop] for leaf in batch.leaves]
    return LocalRows(leaves, batch.tree, rows.sizes, split_sizes(batch.num_rows, topology.num_replicas))


def without_nones(data: Any) -> Any:
    """``(x, y)`` for ``(x, y, None)``, which only some of Keras's methods give."""
    if isinstance(data, tuple):
        while len(data) > 1 and data[-1] is None:
            data = data[:-1]
    return data


def of_all_rows(logs: Any, weights: Any, mean: Callable[[Any, Any], Any]) -> Any:
    """Logs of one value each: the mean over the rows, where replicas return different ones.

    Args:
      weights: How many rows each replica has.
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
    """Keras's own step of a model, in terms of variables.

    Args:
      forgets_masks: As on JAX, where metrics see no mask in training.
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
    for tracker in model.metrics[:1]:
        if tracker.name == "loss":
            tracker.update_state(loss, sample_weight=rows_of_replica_step())
    return model.compute_metrics(x, y, y_pred, sample_weight)
