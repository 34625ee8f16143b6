"""Steps in TensorFlow's style, ``train_step(self, data)``: replica functions, run with ``strategy.run``.

A replica sees its own rows. What the model's ``compute_loss`` and ``losses`` give there is, on every replica, the loss of
the whole batch as one device computes it; its gradient is the replica's share, and the optimizer sums the shares.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._src import context
from replicax._src.input import memory
from replicax._src.input.sources import LocalRows
from replicax._src.input.split import split_sizes
from replicax._src.keras.capture import accessor
from replicax._src.keras.steps import Phase, State, StepFunction, joined
from replicax._src.nn import global_batch_size
from replicax._src.options import RunOptions
from replicax._src.placement.global_view import Batch
from replicax._src.program.capture import current_capture
from replicax._src.strategies.datasets import BatchPlacer
from replicax._src.values import PerReplica, is_value


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

    def __init__(self, model: Any, phase: Phase, strategy: Any):
        super().__init__(model, phase, strategy)
        self._placer = BatchPlacer(strategy.topology)

        def step(data: Any) -> Any:
            rows = next((leaf.shape[0] for leaf in jax.tree_util.tree_leaves(data) if leaf.ndim), 0)
            with _in_replica_step(rows):
                return getattr(model, phase.step_name)(data)

        self._replica_step = step

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        for group, variables in zip(state, self._phase.variables_of(self._model), strict=True):
            if group:
                accessor.set(variables, group)
                group.clear()  # Keras has no use for them, and what is held twice would be copied in each step
        outputs = [self._run(Batch(_without_nones(data))) for data in self._take(iterator)]
        if not outputs:
            raise StopIteration
        return (joined(outputs) if self._phase.is_predict else outputs[-1]), state

    def finish(self) -> None:
        """Nothing is left to do: the variables have had their values all along."""

    def _run(self, batch: Batch) -> Any:
        sizes = split_sizes(batch.num_rows, self._strategy.num_replicas_in_sync)
        arrays = [memory.copy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in batch.leaves]
        value = self._placer.place(LocalRows(arrays, batch.tree, sizes))
        options = None if self._is_compiled else RunOptions(eager=True)
        result = self._strategy.run(self._replica_step, args=(value,), options=options)
        if self._phase.is_predict:
            return result if len(sizes) == 1 else self._strategy.gather(result, axis=0)
        return jax.tree_util.tree_map(lambda leaf: _of_all_rows(leaf, sizes), result, is_leaf=is_value)


def _without_nones(data: Any) -> Any:
    """``(x, y)`` for ``(x, y, None)``, which only some of Keras's methods give."""
    if isinstance(data, tuple):
        while len(data) > 1 and data[-1] is None:
            data = data[:-1]
    return data


def _of_all_rows(value: Any, sizes: Sequence[int]) -> Any:
    """One value for the logs: the mean over the rows, where replicas return different ones."""
    if not isinstance(value, PerReplica):
        return value
    if value.is_equal or not jnp.issubdtype(value.dtype, jnp.inexact):
        return value.values[0]
    return _weighted_mean(value.array, np.asarray(sizes, np.float32))


@jax.jit
def _weighted_mean(rows: jax.Array, weights: Any) -> jax.Array:
    weights = weights.reshape(-1, *[1] * (rows.ndim - 1))
    total = jnp.sum(jnp.where(weights > 0, rows * weights, 0), axis=0)  # never 0 * nan
    return (total / jnp.maximum(jnp.sum(weights), 1)).astype(rows.dtype)


# --- losses -------------------------------------------------------------------------------------------


class _Local(threading.local):
    rows: int | None = None  # of this replica, in a step
    is_in_compute_loss = False


_local = _Local()


@contextlib.contextmanager
def _in_replica_step(rows: int) -> Iterator[None]:
    before, _local.rows = _local.rows, rows
    try:
        yield
    finally:
        _local.rows = before


def _is_shared() -> bool:
    """Whether the caller is in a step that several replicas run."""
    capture = current_capture()
    return _local.rows is not None and capture is not None and (capture.num_replicas or 1) > 1


def wrapped_compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Model.compute_loss``, whose losses are those of the whole batch."""

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _local.is_in_compute_loss = _local.is_in_compute_loss, True
        try:
            return original(self, *args, **kwargs)
        finally:
            _local.is_in_compute_loss = before

    return compute_loss


def wrapped_losses(original: property) -> property:
    """``Layer.losses``, of which each is that of the whole batch: a mean over rows, or the same on all replicas."""

    def losses(self: Any) -> list[Any]:
        own = original.__get__(self)
        if not _is_shared():
            return own
        weight = _weight(_local.rows or 0)
        return [_shared_value(jnp.asarray(loss), weight) for loss in own]

    return property(losses, doc=original.__doc__)


def is_loss_shared() -> bool:
    """Whether a Keras loss that is called now is one that ``compute_loss`` adds up."""
    return _local.is_in_compute_loss and _is_shared()


_ROW_BY_ROW = ("sum", "mean", "sum_over_batch_size")


def loss_of_whole_batch(loss: Any, call: Callable[..., Any], y_true: Any, y_pred: Any, weights: Any) -> Any:
    """A ``keras.losses.Loss`` of the rows of all replicas.

    Where it is a mean or sum over rows each replica computes its share; any other (one of a masked prediction, one that
    is not defined row by row) is computed from the predictions of all, which then travel.
    """
    rows = keras.tree.flatten(y_pred)[0].shape[0]
    if loss.reduction in (None, "none"):
        return call(loss, y_true, y_pred, weights)
    if (
        not _is_masked(y_pred)
        and _is_row_by_row(loss, y_true, y_pred, rows)
        and loss.reduction in _ROW_BY_ROW
    ):
        local = call(loss, y_true, y_pred, weights) if rows else _nothing(y_pred)
        return _shared_value(local, jnp.float32(1) if loss.reduction == "sum" else _weight(rows))
    gather = _Gather(rows)
    y_true, weights = (keras.tree.map_structure(gather.fixed, nest) for nest in (y_true, weights))
    value = call(loss, y_true, keras.tree.map_structure(gather.differentiable, y_pred), weights)
    return value if rows else value + _nothing(y_pred).astype(value.dtype)


def _nothing(y_pred: Any) -> jax.Array:
    """0, for a replica without rows: its gradients are zero, and it has as many of them as the others."""
    return sum(jnp.sum(leaf) for leaf in keras.tree.flatten(y_pred))


def _is_masked(y_pred: Any) -> bool:
    return any(getattr(leaf, "_keras_mask", None) is not None for leaf in keras.tree.flatten(y_pred))


def _is_row_by_row(loss: Any, y_true: Any, y_pred: Any, rows: int) -> bool:
    values = jax.eval_shape(loss.call, y_true, y_pred)
    return len(getattr(values, "shape", ())) > 0 and values.shape[0] == rows


def _weight(rows: int) -> jax.Array:
    """The replica's part of all rows."""
    return jnp.float32(rows) / jnp.maximum(jnp.asarray(global_batch_size(rows), jnp.float32), 1)


def _shared_value(local: jax.Array, weight: jax.Array) -> jax.Array:
    """The sum over replicas of ``weight * local``, whose gradient is that of this replica's term."""
    local = jnp.where(weight > 0, local, 0)  # of no rows the mean is nan
    share = local * weight.astype(local.dtype)
    fixed = jax.lax.stop_gradient(share)
    total = _replica().all_reduce("SUM", fixed)
    return total + (share - fixed)


@final
class _Gather:
    """Gathers the rows of all replicas, this one's differentiably."""

    def __init__(self, rows: int):
        self._rows = rows
        sizes = _replica().all_gather(jnp.full((1,), rows, jnp.int32), axis=0)
        self._start = jnp.cumsum(sizes)[_replica().replica_id_in_sync_group] - rows

    def fixed(self, value: Any) -> Any:
        """The rows of all replicas."""
        return (
            value
            if value is None
            else _replica().all_gather(jax.lax.stop_gradient(jnp.asarray(value)), axis=0)
        )

    def differentiable(self, value: Any) -> Any:
        """The same, and differentiable with respect to those of this replica."""
        everything = self.fixed(value)
        if self._rows:
            everything = jax.lax.dynamic_update_slice_in_dim(everything, value, self._start, 0)
        mask = getattr(value, "_keras_mask", None)
        if mask is not None:
            everything._keras_mask = self.fixed(mask)
        return everything


def _replica() -> Any:
    return context.get_replica_context()
