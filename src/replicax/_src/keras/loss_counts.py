"""The denominators of Keras's losses, which are the weights of micro-batches; see ``gradient_accumulation.py``."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import keras

from replicax._src.functions.nn import size_of_global_batch
from replicax._src.tracing.loss_counts import LossCount, loss_counts, note_loss
from replicax._src.vocabulary.errors import KerasLossError

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def count_of_step() -> Any:
    """Returns the denominator of the loss that is differentiated in this step; None if it is unknown.

    Raises:
      KerasLossError: Several losses have denominators that depend on masks or weights.
    """
    counts = loss_counts()
    if counts is None:
        return None
    counts.last, counts.new = counts.new or counts.last, []
    found = [(count.of(), count.is_local) for count in counts.last]
    if not found:
        return None
    if all(isinstance(number, int) for number, _ in found):
        # Losses of one batch keep their proportions, so their sum is as good a weight as each of them.
        local = [number for number, is_local in found if is_local]
        others = sum(number for number, is_local in found if not is_local)
        return others + (size_of_global_batch(sum(local)) if local else 0)
    if len(found) > 1:
        raise KerasLossError(
            f"gradient_accumulation_steps has no single weight for the micro-batches of this step: it computes "
            f"{len(found)} mean losses whose denominators depend on masks or weights. Use one such loss; or sums "
            'instead of means (reduction="sum"), which are averaged over micro-batches; or accumulate with '
            "rx.experimental.accumulate, whose function returns the count."
        )
    return found[0][0]


def note_keras_loss(
    loss: Any, y_true: Any, y_pred: Any, sample_weight: Any, mask: Any, *, is_local: bool
) -> None:
    """Records the denominator of a ``keras.losses.Loss``, if it is a mean.

    Args:
      mask: The mask of the predictions, or None.
      is_local: True if the mean over the replicas' rows is computed from this replica's rows.
    """
    if loss_counts() is None or loss.reduction not in _MEANS:
        return
    forms = keras.tree.map_structure(lambda x: jax.ShapeDtypeStruct(x.shape, loss.dtype), (y_true, y_pred))
    count = functools.partial(_denominator, loss, *forms, sample_weight, mask)
    note_loss(LossCount(count, is_local))


def _denominator(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any, mask: Any) -> Any:
    """Returns the number by which Keras divides the sum of the values (``keras.losses.reduce_weighted_values``)."""
    size = math.prod(jax.eval_shape(loss.call, y_true, y_pred).shape)
    if loss.reduction == "mean_with_sample_weight" and sample_weight is not None:
        weight = jnp.asarray(sample_weight, jnp.float32)
        if mask is not None:
            mask = jnp.asarray(mask, jnp.float32)
            weight = weight.reshape(weight.shape + (1,) * (mask.ndim - weight.ndim)) * mask
        return jnp.sum(weight)
    if mask is None:
        return size
    valid = jnp.sum(jnp.asarray(mask, jnp.float32))
    return valid if loss.reduction == "mean_with_sample_weight" else valid * (size / math.prod(mask.shape))
