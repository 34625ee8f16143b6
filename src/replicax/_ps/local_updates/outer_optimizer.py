"""The update that servers apply to the outer parameters when a round closes: ``OuterSgd``, or a transformation of
optax.

Each fragment is one vector to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.program_kit.errors import InvalidArgumentError

_ALLOWED: Final = (
    "Allowed are keras.optimizers.SGD(learning_rate, momentum, nesterov) with numbers, a transformation of optax, and None "
    "for SGD(1.0, momentum=0.5, nesterov=True)."
)


@final
@dataclass(frozen=True)
class OuterSgd:
    """Stochastic gradient descent with momentum.

    Attributes:
      rate: The learning rate.
      decay: The momentum: 0 for none.
      is_nesterov: True if it looks ahead.
    """

    rate: float = 1.0
    decay: float = 0.5
    is_nesterov: bool = True

    def __str__(self) -> str:
        return f"SGD({self.rate:g}, momentum={self.decay:g}, nesterov={self.is_nesterov})"


@final
@dataclass(frozen=True)
class OuterTransformation:
    """A transformation of optax. Its state begins with values that depend on the shapes of parameters alone.

    Attributes:
      transformation: The transformation.
    """

    transformation: Any

    def first_state(self, size: int) -> list[jax.Array]:
        """Returns the leaves of its first state for a float32 [size]."""
        return jax.tree_util.tree_leaves(self.transformation.init(jnp.zeros(size)))

    def applied(
        self, theta: jax.Array, leaves: Sequence[jax.Array], mean: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the parameters, and the leaves of the state, after an update."""
        shapes = jax.eval_shape(self.transformation.init, theta)
        state = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), leaves)
        update, state = self.transformation.update(mean, state, theta)
        return theta + update.astype(theta.dtype), jax.tree_util.tree_leaves(state)


OuterOptimizer = OuterSgd | OuterTransformation


def outer_optimizer_of(optimizer: Any) -> OuterOptimizer:
    """Reads the outer optimizer of a user.

    Raises:
      InvalidArgumentError: Servers cannot apply it.
    """
    if optimizer is None or isinstance(optimizer, OuterSgd):
        return optimizer or OuterSgd()
    optax = sys.modules.get("optax")
    if optax is not None and isinstance(optimizer, optax.GradientTransformation):
        return _of_optax(optimizer)
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(optimizer, keras.optimizers.SGD):
        raise InvalidArgumentError(f"outer_optimizer is {type(optimizer).__name__}. {_ALLOWED}")
    rate = optimizer.learning_rate
    if not isinstance(rate, keras.Variable):
        raise InvalidArgumentError(f"outer_optimizer has a schedule as its learning rate. {_ALLOWED}")
    for name in ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema"):
        value = getattr(optimizer, name, None)
        if value:
            raise InvalidArgumentError(f"outer_optimizer has {name}={value!r}. {_ALLOWED}")
    return OuterSgd(float(rate.value), float(optimizer.momentum), bool(optimizer.nesterov))


def _of_optax(transformation: Any) -> OuterTransformation:
    zeros, ones = (jax.tree_util.tree_leaves(transformation.init(make(2))) for make in (jnp.zeros, jnp.ones))
    if not all(np.array_equal(one, other) for one, other in zip(zeros, ones, strict=True)):
        raise InvalidArgumentError(
            f"outer_optimizer has a state that begins with the parameters, which the servers do not have then. {_ALLOWED}"
        )
    return OuterTransformation(transformation)
