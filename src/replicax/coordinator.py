"""TensorFlow's ``tf.distribute.coordinator`` names: ``rx.coordinator``."""

from replicax._src.coordinator.cluster_coordinator import ClusterCoordinator
from replicax._src.coordinator.per_worker import PerWorkerDataset, PerWorkerIterator, PerWorkerValues
from replicax._src.coordinator.remote_value import RemoteValue
from replicax._src.ps.resources import experimental_get_current_worker_index

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
