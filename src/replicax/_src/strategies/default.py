"""The default strategy, which is current outside of every scope. It has one replica, on JAX's default device."""

from __future__ import annotations

from typing import final

from replicax._src.devices.jax_backend import local_devices
from replicax._src.devices.topology import Topology
from replicax._src.drawing import html
from replicax._src.scope import context
from replicax._src.strategies.strategy import Strategy


@final
class DefaultStrategy(Strategy):
    """One replica without distribution: variables are plain, and datasets are for one device.

    Get it with ``rx.get_strategy()`` outside every scope. There is only one.

    Raises:
      ContextError: There is a default strategy already.
    """

    is_default = True

    def __init__(self) -> None:
        context.set_default_strategy(self)
        # Importing replicax must not start JAX's backend, so the device is looked up at its first use.
        super().__init__(lambda: Topology.of(local_devices()[:1]))

    def __repr__(self) -> str:
        return "<the default strategy>"

    def _repr_html_(self) -> str:
        # Do not look the device up here, because that would start JAX's backend.
        return html.page(
            "The default strategy", html.facts({"replicas": 1, "device": "JAX's default device"})
        )


DefaultStrategy()
