"""TensorFlow's ``tf.distribute.experimental`` names: ``rx.experimental``."""

from replicax._src.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ValueContext,
)
from replicax._src.strategies.central_storage import CentralStorageStrategy

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ValueContext",
]
