"""TensorFlow's ``tf.distribute.coordinator`` names: ``rx.coordinator``."""

from replicax._src.parameter_servers.coordinator.cluster_coordinator import ClusterCoordinator
from replicax._src.parameter_servers.coordinator.per_worker import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    experimental_get_current_worker_index,
)
from replicax._src.parameter_servers.coordinator.remote_value import RemoteValue
from replicax._src.public_names import publish_all

PerWorkerValue = PerWorkerValues

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

__dir__ = publish_all(globals())
