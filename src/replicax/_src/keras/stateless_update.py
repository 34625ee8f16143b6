"""A call of a Keras optimizer's ``apply`` as a program of arrays, also for variables of other shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import keras

from replicax._src.jax_internals import jax_compat
from replicax._src.keras import internals
from replicax._src.tracing.capture import replaced_capture

ShapeOf = Callable[[Any], tuple[int, ...]]
"""Returns the shape of a variable in a program, such as that of a shard."""


@final
class StatelessUpdate:
    """One call of ``Optimizer.apply``.

    Args:
      apply: Applies gradients to variables: ``apply(optimizer, gradients, variables)``.
      optimizer: The optimizer, which is built.
      gradients: The gradients, or None for a variable without one.
      variables: Their variables; None for all that the optimizer trains.

    Attributes:
      variables: The variables that have a gradient.
      gradients: Their gradients, in the dtypes and shapes of the variables.
      state: The variables of the optimizer.
    """

    def __init__(
        self, apply: Callable[..., Any], optimizer: Any, gradients: Sequence[Any], variables: Any = None
    ):
        given = internals.trained_by(optimizer) if variables is None else variables
        present = [(g, v) for g, v in zip(gradients, given, strict=False) if g is not None]
        self.variables = [v for _, v in present]
        self.gradients = [_gradient_of(v, g) for g, v in present]
        self.state = list(optimizer.variables)
        self._apply, self._optimizer = apply, optimizer

    def traced(self, shape_of: ShapeOf) -> tuple[Any, list[Any]]:
        """Traces the update for variables of these shapes.

        Returns:
          A jaxpr without constvars, and the values of its leading inputs. Its other inputs are the state, the gradients
          and the values of the variables. Its outputs are the new values and the new state.
        """
        every = [*self.state, *self.variables]
        num_state, num_known = len(self.state), len(every)

        def update(*args: Any) -> list[Any]:
            values = [*args[:num_state], *args[num_known:]]
            with replaced_capture(None), _of_shapes(every, shape_of):
                with keras.StatelessScope(state_mapping=list(zip(every, values, strict=True))) as scope:
                    self._apply(self._optimizer, list(args[num_state:num_known]), list(self.variables))
                return [scope.get_current_value(v) for v in [*self.variables, *self.state]]

        avals = [
            jax.ShapeDtypeStruct(shape_of(v), jnp.dtype(v.dtype))
            for v in [*self.state, *self.variables, *self.variables]
        ]
        return jax_compat.trace(update, avals)


def _gradient_of(variable: Any, gradient: Any) -> Any:
    gradient, dtype = jnp.asarray(gradient), jnp.dtype(variable.dtype)
    if gradient.dtype != dtype:
        gradient = gradient.astype(dtype)
    shape = tuple(variable.shape)
    return gradient if gradient.shape == shape else jnp.broadcast_to(gradient, shape)


@contextlib.contextmanager
def _of_shapes(variables: Sequence[Any], shape_of: ShapeOf) -> Iterator[None]:
    """Makes variables report other shapes inside the block, because optimizers read them."""
    shapes = [(variable, tuple(variable.shape)) for variable in variables]
    try:
        for variable, shape in shapes:
            if shape_of(variable) != shape:
                internals.set_shape(variable, shape_of(variable))
        yield
    finally:
        for variable, shape in shapes:
            if tuple(variable.shape) != shape:
                internals.set_shape(variable, shape)
