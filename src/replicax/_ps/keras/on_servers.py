"""The placement of Keras's variables on parameter servers, where any free worker runs a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from replicax._ps.keras import server_variables
from replicax._ps.keras.server_steps import WorkerStepFunction
from replicax._ps.keras.worker_datasets import as_worker_input
from replicax._ps.placement.server_placement import ServerPlacement
from replicax._src.program_kit.errors import UnsupportedError
from replicax._src.program_kit.keras_variables import FitCall

if TYPE_CHECKING:
    from replicax._ps.strategy.parameter_server import ParameterServerStrategy


apply = server_variables.apply


@final
class OnServers:
    """Keeps variables as ``ServerArray``; see ``KerasPlacement``.

    Args:
      placement: The placement of the strategy.
    """

    saves_between_batches = False
    stores_arrays = False
    places_slots = True

    def __init__(self, placement: ServerPlacement):
        self._placement = placement

    def make(
        self, own_init: Callable[..., None], variable: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        server_variables.make(own_init, variable, self._placement, args, kwargs)

    def make_value(self, variable: Any) -> bool:
        server_variables.keep(variable, self._placement)
        return True

    def stand_in(self, variable: Any) -> Any:
        return server_variables.stand_in(variable)

    def check_method(self, strategy: ParameterServerStrategy, method: str) -> None:
        """Raises UnsupportedError where every worker runs the program."""
        strategy.form.check_coordinates(
            lambda: UnsupportedError(
                f"{method}() is not supported where every worker runs its own copy of the program on shared parameter "
                "servers. Write the loop with strategy.run and rx.GradientTape, or let a chief coordinate the workers: "
                "rx.ParameterServerStrategy(is_coordinator=True) there, and `replicax server` in them."
            )
        )

    def steps_class(self, model: Any, phase: Any) -> type[WorkerStepFunction]:
        del model, phase
        return WorkerStepFunction

    def as_input(self, data: Any, call: FitCall, argument: str, strategy: ParameterServerStrategy) -> Any:
        return as_worker_input(data, call, argument, strategy)
