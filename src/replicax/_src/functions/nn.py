"""Losses scaled for the global batch: ``rx.nn``."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final

import jax
import jax.numpy as jnp

from replicax._src.scope import context
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.loss_counts import LossCount, note_loss
from replicax._src.user.user_code import user_line
from replicax._src.values.distributed import ArrayLike
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaContextError

log = logging.getLogger("replicax")
_warned: set[str] = set()

AVERAGE_LOSS: Final = "compute_average_loss"
"""The name scope of operations that compute a replica's share of the mean over the global batch."""


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> jax.Array:
    """A replica's share of the mean loss over the global batch: Σ (loss · weight) / B.

    The shares of all replicas add up to the mean, and so do the gradients, which an optimizer's ``apply`` sums. Call
    it in replica context (with ``global_batch_size`` anywhere). Without ``global_batch_size``, B is the true number of
    examples over all replicas, even if their numbers differ. It communicates only in this case.

    Args:
      per_example_loss: [batch, ...], of this replica.
      sample_weight: Broadcastable to the loss from the left ([batch] weighs examples), or None.
      global_batch_size: B, an int of at least 0; default: the sum of the replicas' batch sizes. A warning says if there
        are more losses.

    Returns:
      A scalar; 0 if B is 0.

    Raises:
      InvalidArgumentError: The loss is a scalar, or ``global_batch_size`` is not a scalar int of at least 0.
      ReplicaContextError: There is no ``global_batch_size``, outside replica context.

    Source: tf.nn.compute_average_loss, whose default B is R times the local size.
    """
    loss = jnp.asarray(per_example_loss)
    dtype = loss.dtype if jnp.issubdtype(loss.dtype, jnp.inexact) else jnp.result_type(float)
    loss = loss.astype(dtype)
    if sample_weight is not None:
        weight = jnp.asarray(sample_weight).astype(dtype)
        if weight.ndim < loss.ndim:
            weight = weight.reshape(weight.shape + (1,) * (loss.ndim - weight.ndim))
        loss = loss * weight
    if global_batch_size is None:
        if loss.ndim == 0:
            raise InvalidArgumentError(
                "Please provide at least one dim: compute_average_loss needs one loss per example [batch, ...], got a "
                "scalar. Make the loss with reduction=None, or give global_batch_size."
            )
        size = size_of_global_batch(loss.shape[0])
    else:
        size = _checked_size(global_batch_size)
        _warn_of_small_size(size, loss.shape)
    note_loss(LossCount(lambda: size))
    # The name says that the denominator is the global batch size.
    with contextlib.nullcontext() if global_batch_size is not None else jax.named_scope(AVERAGE_LOSS):
        total = jnp.sum(loss)
        size = jnp.asarray(size).astype(jnp.promote_types(dtype, jnp.float32))  # half precision cannot count
        share = total / jnp.where(size == 0, 1, size)
        return jnp.where(size == 0, 0, share).astype(dtype)


def size_of_global_batch(local_size: int) -> Any:
    """Returns the sum of the replicas' batch sizes, from this replica's. Communicates if they may differ.

    Raises:
      ReplicaContextError: Outside replica context.
    """
    replica = context.get_replica_context()
    if replica is None:
        raise ReplicaContextError(
            "You are calling `compute_average_loss` in cross replica context, while it was expected to be called in "
            "replica context (inside strategy.run): outside of it the local batch size is not known. Give "
            "global_batch_size."
        )
    communicator = replica.communicator
    if communicator is None:
        return local_size
    capture = current_capture()
    if capture is not None and capture.uneven is None:
        return local_size * communicator.num_replicas
    return communicator.sum([jnp.full((), local_size, jnp.float32)])[0]


def _checked_size(size: Any) -> Any:
    if isinstance(size, str):
        raise InvalidArgumentError(
            f"global_batch_size must be an int, got {size!r}, which is text: write int(...)."
        )
    array = jnp.asarray(size)
    if array.ndim != 0:
        raise InvalidArgumentError(f"global_batch_size must be a scalar, got shape {array.shape}.")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise InvalidArgumentError(f"global_batch_size must be an int, got {size!r} of dtype {array.dtype}.")
    if isinstance(size, int) and size < 0:
        raise InvalidArgumentError(f"global_batch_size must be non-negative, got {size}.")
    return size


def _warn_of_small_size(size: Any, shape: tuple[int, ...]) -> None:
    """Warns, once for each line, if the replicas have more losses than ``global_batch_size`` says."""
    replica = context.get_replica_context()
    if replica is None or not isinstance(size, int) or not shape:
        return
    capture = current_capture()
    is_even = capture is None or capture.uneven is None
    num_replicas = 1 if replica.communicator is None else replica.communicator.num_replicas
    rows = shape[0] * num_replicas if is_even else shape[0]  # at least
    line = user_line()
    if not 0 < size < rows or line in _warned:
        return
    _warned.add(line)
    log.warning(
        "%s: global_batch_size is %d, but there are %d losses on %d replica%s, so the result and its gradients are %.3g times the "
        "mean. Give the number of rows of the global batch, or leave global_batch_size out. If each example has several "
        "losses, keep their shape [batch, ...].",
        line,
        size,
        rows,
        num_replicas,
        "s" * (num_replicas != 1),
        rows / size,
    )


class SharedLoss(ArrayLike):
    """A loss of a Keras model's own step whose gradient already is this replica's share: see ``keras/losses.py``.

    A sum of such losses is one too; any other computation gives an array.
    """

    __slots__ = ("_share",)

    def __init__(self, share: Any):
        self._share = share

    def as_array(self) -> Any:
        return self._share

    def __add__(self, other: Any) -> Any:
        if isinstance(other, SharedLoss):
            return SharedLoss(self._share + other.as_array())
        return self if isinstance(other, int) and other == 0 else self._share + other  # sum() begins with 0

    __radd__ = __add__

    def __repr__(self) -> str:
        return repr(self._share)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """A replica's share of a regularisation loss that is the same on all replicas: Σ loss / R.

    Call it in replica context.

    Args:
      regularization_loss: [...] or a list of such, which is summed.

    Raises:
      ReplicaContextError: Outside replica context.

    Source: tf.nn.scale_regularization_loss.
    """
    if context.in_cross_replica_context():
        raise ReplicaContextError(
            "You are calling `scale_regularization_loss` in cross replica context, while it was expected to be called "
            "in replica context (inside strategy.run)."
        )
    given = (
        list(regularization_loss) if isinstance(regularization_loss, (list, tuple)) else [regularization_loss]
    )
    if given and all(isinstance(loss, SharedLoss) for loss in given):
        return sum(given, SharedLoss(0.0)).as_array()
    loss = jnp.sum(jnp.asarray(regularization_loss))
    return loss / jnp.asarray(context.get_strategy().num_replicas_in_sync, loss.dtype)
