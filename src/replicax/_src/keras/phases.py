"""The three phases of a Keras model, each with its step and the state that the step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Phase:
    """One of the three phases of a Keras model.

    Attributes:
      name: "train", "test" or "predict": the model has ``<name>_step`` and ``<name>_function``.
      groups: The lists of variables that make up the state, in order.
    """

    name: str
    groups: tuple[str, ...]

    def variables_of(self, model: Any) -> list[Sequence[Any]]:
        """Returns the model's variables, list by list."""
        return [
            model.optimizer.variables if group == "optimizer_variables" else getattr(model, group)
            for group in self.groups
        ]

    @property
    def function_name(self) -> str:
        return f"{self.name}_function"

    @property
    def step_name(self) -> str:
        return f"{self.name}_step"

    @property
    def is_predict(self) -> bool:
        return self.name == "predict"


_LAYERS = ("trainable_variables", "non_trainable_variables")
TRAIN = Phase("train", (*_LAYERS, "optimizer_variables", "metrics_variables"))
TEST = Phase("test", (*_LAYERS, "metrics_variables"))
PREDICT = Phase("predict", _LAYERS)
