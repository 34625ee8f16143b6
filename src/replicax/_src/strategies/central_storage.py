"""``CentralStorageStrategy``: variables on one device, computation on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from replicax._src.devices.named_devices import resolve_device, resolve_devices
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.strategies.strategy import Strategy


@final
class CentralStorageStrategy(Strategy):
    """Synchronous training with one copy of every variable between steps.

    A step copies the variables to the compute devices, one replica each, and copies their new values back. With one
    compute device, that device also stores the variables.

    Args:
      compute_devices: A list of names or ``jax.Device``, or the number of this process's first devices to use; default:
        all devices of JAX's default backend.
      parameter_device: The device that stores variables; default: the first CPU, or the only compute device.

    Raises:
      DeviceError: A device does not exist or is repeated, or there are too few devices.

    Source: tf.distribute.experimental.CentralStorageStrategy.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | int | None = None,
        parameter_device: str | Device | None = None,
    ):
        topology = Topology.of(resolve_devices(compute_devices))
        if parameter_device is not None:
            home = resolve_device(parameter_device)
        else:
            home = topology.devices[0] if topology.num_replicas == 1 else resolve_device("cpu:0")
        super().__init__(lambda: topology, parameter_device=home)
