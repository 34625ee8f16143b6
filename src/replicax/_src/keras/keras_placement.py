"""``KerasPlacement``: what Keras's files ask of the placement of variables. ``on_devices.py`` has that of devices.

``Placement.for_framework("keras")`` returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from replicax._src.hooks import hook
from replicax._src.keras.fit_call import FitCall
from replicax._src.scope import context
from replicax._src.scope.any_strategy import AnyStrategy


class KerasPlacement(Protocol):
    """Keeps Keras's variables on one placement, and runs the steps of models there.

    Attributes:
      saves_between_batches: True if a training can be saved between two batches.
      stores_arrays: True if variables store arrays on the strategy's devices, and assigned values belong there.
      places_slots: True if a slot of an optimizer belongs to the strategy of its variable, in which scope it is made.
    """

    saves_between_batches: bool
    stores_arrays: bool
    places_slots: bool

    # --- variables ----------------------------------------------------------------------------------------

    def make(
        self, own_init: Callable[..., None], variable: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Initialises a new variable. ``own_init(variable, *args, **kwargs)`` is Keras's ``Variable.__init__``.

        Outside of traces a call of ``make_value`` follows.
        """
        ...

    def make_value(self, variable: Any) -> bool:
        """Gives the first value to a variable that was made without it. Returns False if Keras is to do it."""
        ...

    def stand_in(self, variable: Any) -> Any:
        """Returns an array in place of a value that is not on devices, while Keras only asks for shapes."""
        ...

    # --- steps --------------------------------------------------------------------------------------------

    def check_method(self, strategy: Any, method: str) -> None:
        """Raises UnsupportedError if the strategy cannot run ``fit`` or a method like it."""
        ...

    def steps_class(self, model: Any, phase: Any) -> type[Any]:
        """Returns the ``StepFunction`` that runs the model's steps; make it with (model, phase, strategy)."""
        ...

    def as_input(self, data: Any, call: FitCall, argument: str, strategy: Any) -> Any:
        """Returns the adapter for data that only workers can read; returns any other data unchanged.

        Args:
          data: The value of ``argument``.
          call: The call of Keras's method.
          argument: ``"x"`` or ``"validation_data"``.
        """
        ...


def placement_of(strategy: AnyStrategy | None) -> KerasPlacement:
    """Returns the placement of the Keras variables of a strategy; for None, that of variables outside of all scopes."""
    if strategy is None:
        return hook("keras").ON_DEVICES
    return strategy.variable_placement.for_framework("keras")


def placement_of_scope() -> KerasPlacement:
    """Returns the placement of variables that are made now."""
    return placement_of(context.strategy_for_new_variable() if context.has_strategy() else None)
