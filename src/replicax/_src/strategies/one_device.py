"""``OneDeviceStrategy``: everything on one named device."""

from __future__ import annotations

from typing import final

from replicax._src.devices.named_devices import resolve_device
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.strategies.strategy import Strategy


@final
class OneDeviceStrategy(Strategy):
    """Places variables, computation and data on one device. One replica.

    Args:
      device: ``"cpu:0"``, ``"/gpu:0"``, … or a ``jax.Device``.

    Raises:
      DeviceError: There is no such device.

    Source: tf.distribute.OneDeviceStrategy.
    """

    def __init__(self, device: str | Device):
        topology = Topology.of([resolve_device(device)])
        super().__init__(lambda: topology)
