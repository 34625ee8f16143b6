"""Keras losses in replica functions.

A mean loss that would give wrong gradients raises an error. In a model's own step, losses are those of the global
batch. In a step in TensorFlow's style, ``compute_loss`` and ``losses`` of the model give, on every replica, the loss of
the global batch as one device computes it. Its gradient is the replica's share, and the optimizer sums the shares.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import keras

from replicax._src.functions.nn import SharedLoss, size_of_global_batch
from replicax._src.keras import internals
from replicax._src.keras.loss_counts import note_keras_loss
from replicax._src.keras.overriding import overridden
from replicax._src.scope import context
from replicax._src.tracing.capture import current_capture, user_line
from replicax._src.tracing.labels import note_labels
from replicax._src.vocabulary.errors import KerasLossError

_MEANS: Final = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_ROW_BY_ROW: Final = ("sum_over_batch_size", "mean", "sum")


def wrapped_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Raises if a mean loss is differentiated on several replicas: under a tape at once, otherwise at its
    differentiation.
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        capture = current_capture()
        if _local.is_gathered or not (_local.is_in_compute_loss and _is_shared()):
            _note(self, *args, **kwargs)
        if _local.is_gathered:
            return original(self, *args, **kwargs)
        if _local.is_in_compute_loss and _is_shared():
            return _of_whole_batch(self, original, *args, **kwargs)
        if capture is None or (capture.num_replicas or 1) == 1 or self.reduction not in _MEANS:
            return original(self, *args, **kwargs)
        error = _mean_loss_error(self, capture.num_replicas or 1)
        if capture.tapes:
            raise error
        return _not_differentiable(original(self, *args, **kwargs), error)

    return __call__


def _note(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None, *, is_local: bool = False) -> None:
    mask = _mask_of(y_pred) if _is_masked(y_pred) else None
    note_keras_loss(loss, y_true, y_pred, sample_weight, mask, is_local=is_local)


def _mean_loss_error(loss: Any, num_replicas: int) -> KerasLossError:
    name = type(loss).__name__
    return KerasLossError(
        f"keras.losses.{name}(reduction={loss.reduction!r}) was called at {user_line()}, in a replica function of "
        f"{num_replicas} replicas, and its value is differentiated. It is the mean over one replica's rows, and "
        f"gradients are summed over replicas: they would be {num_replicas} times too large. Write instead:\n"
        f"    loss_object = keras.losses.{name}(..., reduction=None)\n"
        f"    loss = rx.nn.compute_average_loss(loss_object(labels, predictions))\n"
        f'or use reduction="sum" and divide by the global batch size.'
    )


def _not_differentiable(value: Any, error: Exception) -> Any:
    """Returns ``value`` with a derivative that raises ``error``, also when scans or jits inside of jax.grad contain
    it.
    """

    @jax.custom_jvp
    def unchanged(value: Any) -> Any:
        return value

    @unchanged.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise error

    return unchanged(value)


def wrapped_sparse_categorical(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes labels outside the range in programs that are checked."""

    def sparse_categorical_crossentropy(
        target: Any, output: Any, from_logits: bool = False, axis: int = -1
    ) -> Any:
        note_labels(target, jnp.shape(output)[axis])
        return original(target, output, from_logits=from_logits, axis=axis)

    return sparse_categorical_crossentropy


# --- in a model's own step ------------------------------------------------------------------------------


class _Local(threading.local):
    """The state of this thread in a model's step.

    Attributes:
      rows: The number of rows of this replica; None outside of such a step.
      is_in_compute_loss: True while ``Model.compute_loss`` runs.
      is_gathered: True if ``compute_loss`` was given the rows of all replicas.
      summed: The losses that are sums over the rows of this replica, not means.
    """

    rows: int | None = None
    is_in_compute_loss = False
    is_gathered = False
    summed: tuple[Any, ...] = ()


_local = _Local()


def in_replica_step(rows: int) -> contextlib.AbstractContextManager[None]:
    """Marks the block as a model's own step on a replica that has ``rows`` rows."""
    return overridden(_local, rows=rows, summed=())


def rows_of_replica_step() -> int | None:
    """Returns the number of rows of this replica in a model's own step, or None elsewhere."""
    return _local.rows


def _is_shared() -> bool:
    """True if the caller is in a step that several replicas run."""
    capture = current_capture()
    return _local.rows is not None and capture is not None and (capture.num_replicas or 1) > 1


def in_compute_loss() -> contextlib.AbstractContextManager[None]:
    """Marks the block as a run of ``Model.compute_loss``, whose losses are those of the global batch."""
    return overridden(_local, is_in_compute_loss=True)


@contextlib.contextmanager
def own_compute_loss_gathered(model: Any) -> Iterator[None]:
    """Gives a user's own ``compute_loss`` the rows of all replicas, because its formula is unknown."""
    own = type(model).compute_loss
    if own is keras.Model.compute_loss:
        yield
        return
    signature = inspect.signature(own)

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(model, *args, **kwargs)
        given = bound.arguments
        if not _is_shared() or _local.is_gathered or given.get("y_pred") is None:
            return own(model, *args, **kwargs)
        y_pred = given["y_pred"]
        with overridden(_local, is_in_compute_loss=True):
            gather = _Gather(_num_rows(y_pred))
            for name in ("x", "y", "sample_weight"):
                given[name] = keras.tree.map_structure(gather.fixed, given.get(name))
            given["y_pred"] = keras.tree.map_structure(gather.differentiable, y_pred)
            with overridden(_local, is_gathered=True):
                value = own(*bound.args, **bound.kwargs)
        return value if gather.num_rows else value + _nothing(y_pred)

    with overridden(model, compute_loss=compute_loss):
        yield


def note_added(loss: Any, caller: Any) -> None:
    """Records a loss that Keras itself adds for an activity regulariser.

    Args:
      caller: The frame of ``Layer.add_loss``.
    """
    called_by = caller.f_back.f_code
    is_of_keras = called_by.co_name == "__call__" and called_by.co_filename == internals.SOURCE_OF_LAYER
    if is_of_keras and _local.rows is not None and internals.adds_sums():
        _local.summed = (*_local.summed, loss)


def wrapped_losses(original: property) -> property:
    """Makes ``Layer.losses`` give losses of the global batch: means over all rows, or values that all replicas
    share.
    """

    def losses(self: Any) -> list[Any]:
        if not _is_shared():
            return original.__get__(self)
        own = original.__get__(self)
        weight = _weight(_local.rows or 0)
        shared = [
            _shared_value(jnp.asarray(loss), jnp.float32(1) if _is_summed(loss) else weight) for loss in own
        ]
        return shared if _local.is_in_compute_loss else [SharedLoss(loss) for loss in shared]

    return property(losses, doc=original.__doc__)


def _is_summed(loss: Any) -> bool:
    return any(loss is noted for noted in _local.summed)


def _of_whole_batch(
    loss: Any, call: Callable[..., Any], y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Computes a ``keras.losses.Loss`` over the rows of all replicas.

    For a mean or sum over rows each replica computes its share. Any other loss (of a masked prediction, or not defined
    row by row) is computed from the gathered predictions of all replicas.
    """
    rows = _num_rows(y_pred)
    if loss.reduction in (None, "none"):
        return call(loss, y_true, y_pred, sample_weight)
    if (
        not _is_masked(y_pred)
        and _is_row_by_row(loss, y_true, y_pred, rows)
        and loss.reduction in _ROW_BY_ROW
    ):
        _note(loss, y_true, y_pred, sample_weight, is_local=True)
        local = call(loss, y_true, y_pred, sample_weight) if rows else _nothing(y_pred)
        return _shared_value(local, jnp.float32(1) if loss.reduction == "sum" else _weight(rows))
    gather = _Gather(rows)
    y_true, sample_weight = (
        keras.tree.map_structure(gather.fixed, pytree) for pytree in (y_true, sample_weight)
    )
    gathered = keras.tree.map_structure(gather.differentiable, y_pred)
    _note(loss, y_true, gathered, sample_weight)
    value = call(loss, y_true, gathered, sample_weight)
    return value if rows else value + _nothing(y_pred).astype(value.dtype)


def _num_rows(y_pred: Any) -> int:
    return keras.tree.flatten(y_pred)[0].shape[0]


def _nothing(y_pred: Any) -> jax.Array:
    """Returns 0 for a replica without rows. Its gradients are zero, with the same structure as on the other
    replicas.
    """
    return jnp.stack([jnp.sum(leaf) for leaf in keras.tree.flatten(y_pred)]).sum()


def _is_masked(y_pred: Any) -> bool:
    return any(_mask_of(leaf) is not None for leaf in keras.tree.flatten(y_pred))


def _is_row_by_row(loss: Any, y_true: Any, y_pred: Any, rows: int) -> bool:
    values = jax.eval_shape(loss.call, y_true, y_pred)
    return len(getattr(values, "shape", ())) > 0 and values.shape[0] == rows


def _weight(rows: int) -> jax.Array:
    """Returns this replica's fraction of all rows."""
    return jnp.float32(rows) / jnp.maximum(jnp.asarray(size_of_global_batch(rows), jnp.float32), 1)


def _shared_value(local: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the sum over replicas of ``weight * local``. Its gradient is that of this replica's term."""
    local = jnp.where(weight > 0, local, 0)  # the mean of no rows is nan
    share = local * weight.astype(local.dtype)
    fixed = jax.lax.stop_gradient(share)
    total = _replica().all_reduce("SUM", fixed)
    return total + (share - fixed)


@final
class _Gather:
    """Gathers the rows of all replicas. The rows of this replica stay differentiable.

    Attributes:
      num_rows: The number of rows of this replica.
    """

    def __init__(self, rows: int):
        self.num_rows = rows
        sizes = _replica().all_gather(jnp.full((1,), rows, jnp.int32), axis=0)
        self._start = jnp.cumsum(sizes)[_replica().replica_id_in_sync_group] - rows

    def fixed(self, value: Any) -> Any:
        """Returns the rows of all replicas."""
        return (
            value
            if value is None
            else _replica().all_gather(jax.lax.stop_gradient(jnp.asarray(value)), axis=0)
        )

    def differentiable(self, value: Any) -> Any:
        """Returns the same rows, differentiable with respect to those of this replica."""
        everything = self.fixed(value)
        if self.num_rows:
            everything = jax.lax.dynamic_update_slice_in_dim(everything, value, self._start, 0)
        mask = _mask_of(value)
        return everything if mask is None else _Masked(self.fixed(mask))(everything)


class _Masked(keras.Layer):
    """A layer that carries a mask, because Keras passes masks of tensors only between layers."""

    def __init__(self, mask: Any = None):
        super().__init__(autocast=False, name="mask")
        self.supports_masking = True
        self.mask = mask

    def call(self, inputs: Any, mask: Any = None) -> Any:
        if mask is not None:
            self.mask = mask
        return inputs

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        return self.mask


def _mask_of(tensor: Any) -> Any:
    reader = _Masked()
    reader(tensor)
    return reader.mask


def _replica() -> Any:
    return context.get_replica_context()
