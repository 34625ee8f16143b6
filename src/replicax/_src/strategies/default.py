"""The default strategy: current where no other is. One replica, on JAX's default device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from replicax._src import context
from replicax._src.input.split import InputContext
from replicax._src.strategies.strategy import Strategy
from replicax._src.topology import Topology, local_devices


@final
class DefaultStrategy(Strategy):
    """One replica, no distribution: datasets are returned as they are, variables are plain.

    Get it with ``rx.get_strategy()`` outside every scope; there is only one.
    """

    is_default = True

    def __init__(self) -> None:
        # Importing replicax must not start JAX's backend: the device is looked up when it is first needed.
        super().__init__(lambda: Topology.of(local_devices()[:1]))

    def experimental_distribute_dataset(
        self, dataset: Any, options: Any = None, *, distribute_options: Any = None
    ) -> Any:
        """Returns ``dataset`` itself."""
        del options, distribute_options
        return dataset

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Any:
        """Returns ``dataset_fn(InputContext())`` itself."""
        del options
        return dataset_fn(InputContext())

    def __repr__(self) -> str:
        return "<the default strategy>"


context.set_default_strategy(DefaultStrategy())
