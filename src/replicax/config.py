"""Settings of this process: ``rx.config``."""

from replicax._src.devices.device_names import LogicalDevice, PhysicalDevice
from replicax._src.devices.jax_backend import set_local_devices
from replicax._src.devices.listing import list_logical_devices, list_physical_devices
from replicax._src.strategies.tpu_system import connect_to_cluster as experimental_connect_to_cluster
from replicax._src.user.public_names import publish_all

__all__ = [
    "LogicalDevice",
    "PhysicalDevice",
    "experimental_connect_to_cluster",
    "list_logical_devices",
    "list_physical_devices",
    "set_local_devices",
]

__dir__ = publish_all(globals())
