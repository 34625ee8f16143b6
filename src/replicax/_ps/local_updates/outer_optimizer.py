"""``OuterSgd``: the update that servers apply to the outer parameters when a round closes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final, final

from replicax._src.program_kit.errors import InvalidArgumentError

_ALLOWED: Final = (
    "Allowed are keras.optimizers.SGD(learning_rate, momentum, nesterov) with numbers, and None for SGD(1.0, momentum=0.5, "
    "nesterov=True)."
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


def outer_sgd_of(optimizer: Any) -> OuterSgd:
    """Reads the outer optimizer of a user.

    Raises:
      InvalidArgumentError: Servers cannot apply it.
    """
    if optimizer is None or isinstance(optimizer, OuterSgd):
        return optimizer or OuterSgd()
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
