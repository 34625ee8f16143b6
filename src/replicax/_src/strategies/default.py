"""The default strategy: current where no other is. One replica, on JAX's default device."""

from __future__ import annotations

from typing import final

from replicax._src import context
from replicax._src.devices.topology import Topology, local_devices
from replicax._src.drawing import html
from replicax._src.strategies.strategy import Strategy


@final
class DefaultStrategy(Strategy):
    """One replica, no distribution: variables are plain, and datasets are those of one device.

    Get it with ``rx.get_strategy()`` outside every scope; there is only one.

    Raises:
      ContextError: There is one already.
    """

    is_default = True

    def __init__(self) -> None:
        context.set_default_strategy(self)
        # Importing replicax must not start JAX's backend: the device is looked up when it is first needed.
        super().__init__(lambda: Topology.of(local_devices()[:1]))

    def __repr__(self) -> str:
        return "<the default strategy>"

    def _repr_html_(self) -> str:
        # The device is not looked up: that would start JAX's backend.
        return html.page(
            "The default strategy", html.facts({"replicas": 1, "device": "JAX's default device"})
        )


DefaultStrategy()
