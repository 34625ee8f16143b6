"""The placement of Keras's variables on the strategy's devices, where the replicas run the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

from replicax._src.keras import sharded_state
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.keras_placement import KerasPlacement
from replicax._src.keras.phases import Phase
from replicax._src.keras.replica_steps import ReplicaStepFunction, is_replica_style
from replicax._src.keras.step_functions import GlobalStepFunction, StepFunction


@final
class OnDevices:
    """Keeps variables as arrays, and lets programs on the replicas' devices take them; see ``KerasPlacement``."""

    saves_between_batches = True
    stores_arrays = True
    places_slots = False

    def make(
        self, own_init: Callable[..., None], variable: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        sharded_state.make(own_init, variable, args, kwargs)

    def make_value(self, variable: Any) -> bool:
        del variable
        return False

    def stand_in(self, variable: Any) -> Any:
        del variable
        return None

    def check_method(self, strategy: Any, method: str) -> None:
        """Raises nothing: each method runs on devices."""

    def steps_class(self, model: Any, phase: Phase) -> type[StepFunction]:
        return ReplicaStepFunction if is_replica_style(model, phase) else GlobalStepFunction

    def as_input(self, data: Any, call: FitCall, argument: str, strategy: Any) -> Any:
        del call, argument, strategy
        return data


ON_DEVICES: Final[KerasPlacement] = OnDevices()
