"""Keras optimizers in replica functions. Gradients are summed over replicas before they are applied."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from replicax._src.keras import gradient_accumulation, internals, sharded_state
from replicax._src.keras.keras_placement import KerasPlacement, placement_of
from replicax._src.scope import context
from replicax._src.tracing.capture import Capture, current_capture
from replicax._src.user.user_code import user_line
from replicax._src.values.distributed import PerReplica
from replicax._src.variables.sharded import ShardedVariable
from replicax._src.variables.variable import Variable
from replicax._src.vocabulary.errors import PerReplicaUseError, VariableError

log = logging.getLogger("replicax")

Apply = Callable[..., Any]
_Keras: Any = keras.optimizers.Optimizer if TYPE_CHECKING else object


class PlacedOptimizer(_Keras):
    """A Keras optimizer that keeps its variables beside the variables that it updates, and sums gradients over
    replicas.

    It comes before Keras's own classes among the bases of ``keras.optimizers.Optimizer``.

    Attributes:
      accumulated_count: The sum of the denominators of the micro-batches so far; None if gradients are not accumulated.
      is_inner: True if a ``LossScaleOptimizer`` gives it gradients, which are summed over replicas already.
    """

    accumulated_count: Any = None
    is_inner = False

    @functools.wraps(keras.optimizers.Optimizer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An instance of the base class itself does not train. Keras makes it to list its attributes when a model is
        # saved. One worker may save alone, so the other workers do not take part in making its variables.
        with sharded_state.made_alone(type(self) is keras.optimizers.Optimizer):
            super().__init__(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "lr" and type(self).__module__.startswith("keras."):
            _warn_of_lr(user_line())

    def build(self, variables: Any) -> None:
        """Makes the optimizer's variables, and the count of micro-batches where it accumulates gradients."""
        super().build(variables)
        gradient_accumulation.add_count(self, variables)

    @functools.wraps(keras.optimizers.Optimizer.add_variable)
    def add_variable(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, keras.optimizers.LossScaleOptimizer):  # it builds the inner one after this
            self.inner_optimizer.is_inner = True
        with sharded_state.mark_optimizer_variables():
            return super().add_variable(*args, **kwargs)

    @functools.wraps(keras.optimizers.Optimizer.add_variable_from_reference)
    def add_variable_from_reference(self, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        is_accumulator = kwargs.get("name") == gradient_accumulation.NAME
        has_parts = is_accumulator and gradient_accumulation.can_have_parts(self, reference_variable)
        mark_optimizer_variables = sharded_state.mark_optimizer_variables(
            reference_variable, has_parts=has_parts
        )
        with mark_optimizer_variables, _scope_for_slot(reference_variable):
            return super().add_variable_from_reference(reference_variable, *args, **kwargs)

    @functools.wraps(keras.optimizers.Optimizer.apply)
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        _check(self, grads, trainable_variables)
        capture = current_capture()
        if self.gradient_accumulation_steps and trainable_variables and not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
        if capture is not None and capture.is_replica:
            variables = internals.trained_by(self) if trainable_variables is None else trainable_variables
            if gradient_accumulation.has_parts(self):
                if capture.on_aggregate is not None:
                    aggregated(capture, grads, variables)  # only to observe them
                grads = _with_replacements_summed(capture, grads, variables)
            else:
                grads = aggregated(capture, grads, variables)
        if capture is not None and capture.observer is not None:
            return capture.observer.applied(_own_apply, self, grads, trainable_variables)
        return super().apply(grads, trainable_variables)

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Any) -> None:
        gradient_accumulation.apply(self, super()._backend_apply_gradients, grads, trainable_variables)

    @functools.wraps(keras.optimizers.Optimizer.stateless_apply)
    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        _check_trained(self, trainable_variables)
        own = super().stateless_apply
        return sharded_state.apply_to_shards(own, optimizer_variables, grads, trainable_variables)


def _scope_for_slot(variable: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope in which a slot of a variable is made, also if ``build()`` is called outside of it."""
    owner = context.owner_of(variable)
    if owner is None or context.has_strategy() or not placement_of(owner).places_slots:
        return contextlib.nullcontext()
    return context.Scope(owner)


def adopt(optimizer: Any, placement: KerasPlacement) -> None:
    """Gives the variables of a new optimizer that was made outside of every scope to the current strategy, if variables
    outside of scopes are of no use to it. An optimizer already in use belongs to another model.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer) or optimizer.built:
        return
    for variable in optimizer.variables:
        if context.owner_of(variable) is None and placement.make_value(variable):
            context.remember_owner(variable)


@functools.cache
def _warn_of_lr(line: str) -> None:
    log.warning(
        "%s: `lr` is a name of Keras 2, which Keras 3 does not read: the learning rate stays as it is. Write "
        "optimizer.learning_rate = value.",
        line,
    )


def _check_trained(optimizer: Any, values: Sequence[Any]) -> None:
    """Raises if a model trains other variables than when its optimizer was built.

    Raises:
      VariableError: Their numbers differ.
    """
    num_trained = len(internals.trained_by(optimizer)) if optimizer.built else len(values)
    if num_trained != len(values):
        raise VariableError(
            f"Optimizer {optimizer.name!r} was built for {num_trained} variables, and now gets {len(values)}: `trainable` of a "
            "layer has changed since. Call model.compile(...) with a new optimizer after you change it."
        )


def _with_replacements_summed(
    capture: Capture, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Returns the gradients. Those that replace their variable, and are not accumulated, are summed over replicas."""
    gradients = list(gradients)
    for i, variable in enumerate(variables):
        if getattr(variable, "overwrite_with_gradient", False):
            gradients[i : i + 1] = aggregated(capture, gradients[i : i + 1], [variable])
    return gradients


def _own_apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Any) -> Any:
    return super(PlacedOptimizer, optimizer).apply(grads, trainable_variables)


def wrapped_loss_scale_apply(original: Apply) -> Apply:
    """Wraps ``LossScaleOptimizer.apply``. JAX cannot trace it, because it assigns in the branches of a condition."""

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        _check(self, grads, trainable_variables)
        capture = current_capture()
        if capture is None:
            return original(self, grads, trainable_variables)
        if not self.built:
            self.build(trainable_variables)
        variables = list(trainable_variables or internals.trained_by(self))
        if capture.is_replica:
            # The sum comes before the finite check, so that all replicas take the same decision.
            grads = aggregated(capture, grads, variables)
        if capture.observer is not None:
            return capture.observer.applied(_apply_as_values, self, grads, variables)
        return _apply_as_values(self, grads, variables)

    return apply


def _check(optimizer: Any, gradients: Any, variables: Any) -> None:
    for gradient in gradients if isinstance(gradients, list | tuple) else ():
        if isinstance(gradient, PerReplica) and not gradient.is_equal:
            raise PerReplicaUseError(
                f"{optimizer.name}, an optimizer of Keras, was given {gradient.description} for a gradient at "
                f"{user_line()}, outside of strategy.run. A per-replica value has one gradient for each replica. Call "
                "the optimizer in the step function that strategy.run runs, where it sums the gradients over the "
                "replicas:\n"
                f"    def step(batch):\n"
                f"        ...\n"
                f"        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))\n"
                f"    strategy.run(step, args=(batch,))"
            )
    for variable in variables if isinstance(variables, list | tuple) else ():
        if isinstance(variable, Variable | ShardedVariable):
            raise VariableError(
                f"{optimizer.name}, an optimizer of Keras, was given variable {variable.name!r}, which is an "
                "rx.Variable, but it needs a Keras variable. Make the variable in strategy.scope() with "
                "keras.Variable(initial_value), which works wherever an rx.Variable does; or update it yourself with "
                "v.assign_sub(rate * gradient)."
            )


def _apply_as_values(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    state = list(optimizer.variables)
    new_values, new_state = optimizer.stateless_apply(
        [v.value for v in state], list(gradients), [v.value for v in variables]
    )[:2]
    for variable, value in zip([*variables, *state], [*new_values, *new_state], strict=True):
        variable.assign(value)


def aggregated(capture: Capture, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients, in the order of ``variables``. Those that are not None are summed over replicas."""
    gradients = list(gradients)
    names = [v.path for v in variables]
    present = [i for i, g in enumerate(gradients) if g is not None]
    given = [gradients[i] for i in present]
    # The original raises if the numbers of variables and gradients differ.
    known = [names[i] if i < len(names) else f"gradient {i}" for i in present]
    for i, total in zip(present, capture.aggregate(given, known), strict=True):
        gradients[i] = total
    return gradients
