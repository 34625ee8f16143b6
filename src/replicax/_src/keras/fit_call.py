"""One call of ``fit``, ``evaluate``, ``predict`` or a sister of them, described once.

A description never changes. What prepares the call, or adds a callback, returns another description.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

import keras

from replicax._src.keras.phases import PREDICT, TEST, TRAIN, Phase
from replicax._src.vocabulary.errors import InvalidArgumentError

PHASES: Final = {
    "fit": TRAIN,
    "train_on_batch": TRAIN,
    "evaluate": TEST,
    "test_on_batch": TEST,
    "predict": PREDICT,
    "predict_on_batch": PREDICT,
}
"""The methods that run steps."""

_STEPS_OF_DATA: Final = {
    "fit": {"x": "steps_per_epoch", "validation_data": "validation_steps"},
    "evaluate": {"x": "steps"},
    "predict": {"x": "steps"},
}
"""The arguments that may be datasets, each with the argument for the number of its batches."""


@final
@dataclass(frozen=True, eq=False)
class FitCall:
    """A call of a method of a model that runs steps.

    Attributes:
      model: The model.
      method: The name of the method.
      arguments: The arguments that Keras will be given, by name. Those that the user left out are missing.
    """

    model: Any
    method: str
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, model: Any, method: str, args: Any, kwargs: Any) -> FitCall:
        """Returns the description of ``model.method(*args, **kwargs)``.

        Raises:
          TypeError: The method has other arguments.
        """
        given = _SIGNATURES[method].bind(model, *args, **kwargs).arguments
        return cls(model, method, MappingProxyType(given))

    def with_arguments(self, **arguments: Any) -> FitCall:
        """Returns the call with other values of some arguments."""
        return dataclasses.replace(self, arguments=MappingProxyType({**self.arguments, **arguments}))

    def run(self, original: Callable[..., Any]) -> Any:
        """Calls Keras's own method."""
        bound = inspect.BoundArguments(_SIGNATURES[self.method], OrderedDict(self.arguments))
        return original(*bound.args, **bound.kwargs)

    @property
    def phase(self) -> Phase:
        """The phase of its steps."""
        return PHASES[self.method]

    @property
    def is_loop(self) -> bool:
        """True if it loops over data; False for the methods that take one batch."""
        return self.method in _STEPS_OF_DATA

    @property
    def datasets(self) -> tuple[str, ...]:
        """The names of the arguments that may be datasets."""
        return tuple(_STEPS_OF_DATA.get(self.method, ()))

    def steps_name(self, argument: str) -> str:
        """Returns the name of the argument that gives the number of batches of a dataset."""
        return _STEPS_OF_DATA[self.method][argument]

    def check_alone(self, name: str) -> None:
        """Checks that no other data are given beside ``x``, a dataset whose elements contain everything.

        Args:
          name: The kind of dataset, for messages.

        Raises:
          InvalidArgumentError: There are other data.
        """
        for other in ("y", "sample_weight"):
            if self.arguments.get(other) is not None:
                raise InvalidArgumentError(
                    f"`{other}` was given beside a {name}, whose elements must contain everything: (x,), (x, y) or "
                    f"(x, y, sample_weight). Leave `{other}` out."
                )
        if self.has_split:
            raise InvalidArgumentError(
                f"`validation_split` was given beside a {name}; Keras can split arrays only. Make two datasets (take and "
                "skip), and give the second as `validation_data`."
            )

    def num_steps(self, argument: str) -> int | None:
        """Returns the number of batches to take of a dataset, if the user gave it."""
        return self.arguments.get(self.steps_name(argument))

    @property
    def x(self) -> Any:
        return self.arguments.get("x")

    @property
    def y(self) -> Any:
        return self.arguments.get("y")

    @property
    def sample_weight(self) -> Any:
        return self.arguments.get("sample_weight")

    @property
    def class_weight(self) -> Any:
        return self.arguments.get("class_weight")

    @property
    def callbacks(self) -> Any:
        return self.arguments.get("callbacks")

    @property
    def verbose(self) -> Any:
        return self.arguments.get("verbose", "auto")

    @property
    def is_validated(self) -> bool:
        """True if some epochs end with an evaluation."""
        return self.arguments.get("validation_data") is not None or self.has_split

    @property
    def has_split(self) -> bool:
        """True if Keras takes some rows of ``x`` for validation."""
        return bool(self.arguments.get("validation_split"))

    @property
    def validation_freq(self) -> Any:
        return self.arguments.get("validation_freq", 1)


_SIGNATURES: Final = {method: inspect.signature(getattr(keras.Model, method)) for method in PHASES}
