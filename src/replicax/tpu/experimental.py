"""TensorFlow's ``tf.tpu.experimental`` names: ``rx.tpu.experimental``."""

from replicax._src.devices.tpu.device_assignment import DeviceAssignment, DeviceOrderMode
from replicax._src.devices.tpu.positions import Topology, TPUSystemMetadata
from replicax._src.strategies.tpu_system import initialize_tpu_system, shutdown_tpu_system
from replicax._src.user.public_names import publish_all

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]

__dir__ = publish_all(globals())
