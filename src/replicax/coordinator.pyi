# Written by tools/public_stubs.py from the module and src/replicax/_src/parts.py. Do not edit.

from replicax._ps.coordinator.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
from replicax._ps.coordinator.per_worker import PerWorkerDataset as PerWorkerDataset
from replicax._ps.coordinator.per_worker import PerWorkerIterator as PerWorkerIterator
from replicax._ps.coordinator.per_worker import PerWorkerValue as PerWorkerValue
from replicax._ps.coordinator.per_worker import PerWorkerValues as PerWorkerValues
from replicax._ps.coordinator.per_worker import experimental_get_current_worker_index as experimental_get_current_worker_index
from replicax._ps.coordinator.remote_value import RemoteValue as RemoteValue

__all__ = [
    'ClusterCoordinator',
    'PerWorkerDataset',
    'PerWorkerIterator',
    'PerWorkerValue',
    'PerWorkerValues',
    'RemoteValue',
    'experimental_get_current_worker_index',
]
