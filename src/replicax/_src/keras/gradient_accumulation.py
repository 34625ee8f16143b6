"""``gradient_accumulation_steps`` of Keras optimizers, so that n micro-batches equal one large batch.

Keras averages the gradients of the micro-batches. Each is the gradient of a mean, and the number that it was divided by
(rows, tokens, the sum of a mask) differs between them. So gradients are changed before Keras adds them up: with g_t the
gradient and c_t the denominator of micro-batch t, and M_t the mean of g_1 to g_t weighed by c, Keras is given
M_{t-1} + t * c_t / (c_1 + ... + c_t) * (g_t - M_{t-1}). Its sum after t micro-batches is then t * M_t.

This is linear in g and M, so it also holds for the parts of a gradient that replicas compute from their rows. Each
replica therefore adds up its own, and the replicas exchange them once, in the step that updates the variables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import keras

from replicax._src.collectives.in_replica import Packing, packed_sum
from replicax._src.keras import internals
from replicax._src.keras.internals import accessor
from replicax._src.keras.loss_counts import count_of_step
from replicax._src.scope import context
from replicax._src.tracing.capture import TracedCapture, current_capture
from replicax._src.tracing.loss_counts import loss_counts
from replicax._src.tracing.markers import accumulate_p, accumulated

NAME: Final = "gradient_accumulator"
"""The name that Keras gives to the variables in which an optimizer accumulates gradients."""


def add_count(optimizer: Any, variables: Sequence[Any]) -> None:
    """Gives an optimizer that accumulates gradients a variable for the sum of the denominators.

    Args:
      variables: The variables that it trains. They may be a strategy's although ``build`` is called outside its scope.
    """
    is_ours = context.has_strategy() or any(context.owner_of(variable) is not None for variable in variables)
    if optimizer.gradient_accumulation_steps and is_ours:
        optimizer.accumulated_count = optimizer.add_variable(
            (), dtype="float32", aggregation="only_first_replica", name="accumulated_count"
        )


def can_have_parts(optimizer: Any, variable: Any) -> bool:
    """Returns True if the replicas of the current strategy can keep parts of the gradients of a variable.

    With sharded state, whole parts would take the memory that it saves. A part would die with its process. Of gradients
    that replace their variable, Keras keeps the maximum.
    """
    if not context.has_strategy() or optimizer.is_inner:
        return False
    if getattr(variable, "overwrite_with_gradient", False):
        return False
    placement = context.strategy_for_new_variable().variable_placement
    is_sharded = placement.layouts is not None and placement.layouts.shards is not None
    topology = placement.topology
    is_plain = placement.parameter_device is None and topology.num_logical_devices == 1
    is_plain = is_plain and topology.survivors is None
    return placement.num_replicas > 1 and is_plain and not is_sharded


def has_parts(optimizer: Any) -> bool:
    """Returns True if each replica keeps its own part of the gradients that the optimizer accumulates."""
    return any(each.has_parts for each in internals.accumulators_of(optimizer))


def add_up(model: Any) -> None:
    """Stores sums in place of the replicas' parts, in all optimizers of a model. All processes must call it.

    Afterwards each process can read them alone.
    """
    attributes = keras.tree.flatten(list(vars(model).values()))
    optimizers = {id(one): one for one in attributes if isinstance(one, keras.optimizers.Optimizer)}
    for variable in itertools.chain.from_iterable(one.variables for one in optimizers.values()):
        if variable.has_parts:
            accessor.set([variable], [variable.value])


def apply(
    optimizer: Any, own: Callable[..., None], gradients: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Accumulates gradients, and updates the variables if this small batch is the last one.

    Args:
      own: Keras's method for it.
      gradients: The gradients, unscaled; of a replica's own rows if it keeps parts.
    """
    capture = current_capture()
    is_update = capture is not None and capture.observer is not None  # of a place that has the sums
    if not optimizer.gradient_accumulation_steps or is_update:
        return own(gradients, variables)
    accumulators = [internals.accumulator_of(optimizer, v) for v in variables]
    sums = [accumulator.value for accumulator in accumulators]
    factors = _factors(optimizer)
    if not has_parts(optimizer):
        return own(list(gradients) if factors is None else _weighed(factors, sums, gradients), variables)
    steps = optimizer.gradient_accumulation_steps
    is_last = internals.num_small_batches(optimizer) % steps == steps - 1
    operands = [is_last, *(factors or (jnp.float32(1), jnp.float32(1))), *sums, *map(jnp.asarray, gradients)]
    is_in_fit = capture is None and loss_counts() is not None
    if is_in_fit or (isinstance(capture, TracedCapture) and capture.is_replica):
        packing = Packing.on(context.owner_of(accumulators[0]).topology)
        results = accumulate_p.bind(*operands, total=functools.partial(packed_sum, packing=packing))
    else:
        results = accumulated(*operands, total=list)
    kept, totals = results[: len(sums)], results[len(sums) :]
    # Keras adds nothing to the totals.
    for accumulator, total in zip(accumulators, totals, strict=True):
        accumulator.assign(jnp.zeros_like(total))
    own(totals, variables)
    for accumulator, value in zip(accumulators, kept, strict=True):
        accumulator.assign(value)


def _weighed(factors: tuple[Any, Any], sums: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a small batch in the form that Keras is to add to the sums."""
    of_sums, of_gradients = factors
    return [
        (of_sums - 1).astype(s.dtype) * s + of_gradients.astype(s.dtype) * g
        for s, g in zip(sums, gradients, strict=True)
    ]


def _factors(optimizer: Any) -> tuple[Any, Any] | None:
    """Returns the factors of the sum so far and of the gradient in the next sum; None if both are 1."""
    count = count_of_step()
    if optimizer.accumulated_count is None or count is None:
        return None
    count = jnp.asarray(count, jnp.float32)
    number = (internals.num_small_batches(optimizer) % optimizer.gradient_accumulation_steps + 1).astype(
        jnp.float32
    )
    before = jnp.where(number == 1, 0, optimizer.accumulated_count.value)
    total = before + count
    optimizer.accumulated_count.assign(total)
    weight = jnp.where(total > 0, number * count / jnp.where(total > 0, total, 1), 1)
    return 1 + (1 - weight) / jnp.maximum(number - 1, 1), weight
