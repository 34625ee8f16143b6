"""``gradient_accumulation_steps`` of Keras optimizers, so that n micro-batches equal one large batch.

Keras averages the gradients of the micro-batches. Each is the gradient of a mean, and the number that it was divided by
(rows, tokens, the sum of a mask) differs between them. So gradients are changed before Keras adds them up: with g_t the
gradient and c_t the denominator of micro-batch t, and M_t the mean of g_1 to g_t weighed by c, Keras is given
M_{t-1} + t * c_t / (c_1 + ... + c_t) * (g_t - M_{t-1}). Its sum after t micro-batches is then t * M_t.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from replicax._src import context
from replicax._src.errors import KerasLossError
from replicax._src.nn import size_of_global_batch
from replicax._src.tracing.loss_counts import LossCount, loss_counts, note_loss

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def add_count(optimizer: Any, variables: Sequence[Any]) -> None:
    """Gives an optimizer that accumulates gradients a variable for the sum of the denominators.

    Args:
      variables: The variables that it trains. They may be a strategy's although ``build`` is called outside its scope.
    """
    is_ours = context.has_strategy() or any(id(variable) in context.owners for variable in variables)
    if optimizer.gradient_accumulation_steps and is_ours:
        optimizer.accumulated_count = optimizer.add_variable(
            (), dtype="float32", aggregation="only_first_replica", name="accumulated_count"
        )


def weighed(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a micro-batch, summed over replicas, in the form that Keras is to add up."""
    count = _count()
    if optimizer.accumulated_count is None or count is None:
        return list(gradients)
    count = jnp.asarray(count, jnp.float32)
    number = (optimizer._iterations.value % optimizer.gradient_accumulation_steps + 1).astype(jnp.float32)
    before = jnp.where(number == 1, 0, optimizer.accumulated_count.value)
    total = before + count
    optimizer.accumulated_count.assign(total)
    weight = jnp.where(total > 0, number * count / jnp.where(total > 0, total, 1), 1)
    # Keras divides gradients by this fixed factor later.
    factor = (optimizer.loss_scale_factor or 1) / jnp.maximum(number - 1, 1)

    def changed(gradient: Any, variable: Any) -> Any:
        if gradient is None or getattr(variable, "overwrite_with_gradient", False):
            return gradient
        accumulated = optimizer._accumulated_gradients[optimizer._get_variable_index(variable)].value
        mean = accumulated * factor.astype(accumulated.dtype)
        return mean + weight.astype(gradient.dtype) * (gradient - mean)

    return [changed(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]


def _count() -> Any:
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
