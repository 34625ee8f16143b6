"""``MirroredStrategy``: several devices of one machine, variables mirrored on all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import final

from replicax._src.collectives.cross_device import CrossDeviceOps
from replicax._src.jax_compat import Device
from replicax._src.strategies.strategy import Strategy
from replicax._src.topology import Topology, device_name, resolve_devices

log = logging.getLogger("replicax")


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine: one replica per device.

    Every device holds every variable; gradients are summed over replicas before they are applied, so that all
    copies stay the same, which is proven when a function is traced.

    Args:
      devices: Names (``"gpu:0"``, ``"/gpu:0"``, ``"cpu:1"``, …) or ``jax.Device``; default: all of JAX's default
        backend. ``rx.config.set_local_devices(n)`` makes n virtual CPU devices.
      cross_device_ops: How to reduce; default: XLA's all-reduce.

    Raises:
      DeviceError: A device does not exist, or repeats.

    Source: tf.distribute.MirroredStrategy.
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ):
        topology = Topology.of(resolve_devices(devices))
        super().__init__(lambda: topology, cross_device_ops=cross_device_ops)
        log.info("Using MirroredStrategy with devices (%s)", ", ".join(map(device_name, topology.devices)))
