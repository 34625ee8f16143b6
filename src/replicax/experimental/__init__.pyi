# Written by tools/public_stubs.py from the module and src/replicax/_src/parts.py. Do not edit.

from replicax import coordinator as coordinator
from replicax._ps.coordinator.per_worker_variable import PerWorkerVariable as PerWorkerVariable
from replicax._ps.local_updates.training_group import LocalUpdates as LocalUpdates
from replicax._ps.placement.table_files import load_table as load_table
from replicax._ps.placement.table_files import save_table as save_table
from replicax._ps.strategy.parameter_server import ParameterServerStrategy as ParameterServerStrategy
from replicax._src.functions.accumulation import accumulate as accumulate
from replicax._src.preemption.handler import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from replicax._src.preemption.termination import TerminationConfig as TerminationConfig
from replicax._src.preemption.watcher import PreemptionWatcher as PreemptionWatcher
from replicax._src.strategies import multi_worker_mirrored as multi_worker_mirrored
from replicax._src.strategies import tpu as tpu
from replicax._src.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from replicax._src.variables.caching import cache_variable_reads as cache_variable_reads
from replicax._src.variables.embedding_lookup import lookup as lookup
from replicax._src.variables.layout_map import LayoutMap as LayoutMap
from replicax._src.variables.sharded import ShardedVariable as ShardedVariable
from replicax._src.vocabulary.options import CommunicationImplementation as CommunicationImplementation
from replicax._src.vocabulary.options import CommunicationOptions as CommunicationOptions
from replicax._src.vocabulary.options import ValueContext as ValueContext
from replicax._src.vocabulary.options import collective_hints as collective_hints
from replicax.experimental import layouts as layouts
from replicax.experimental import partitioners as partitioners
from replicax.experimental import rpc as rpc

CollectiveCommunication = CommunicationImplementation
CollectiveHints = collective_hints
MultiWorkerMirroredStrategy = multi_worker_mirrored.from_older_signature
TPUStrategy = tpu.from_older_signature
__all__ = [
    'CentralStorageStrategy',
    'CollectiveCommunication',
    'CollectiveHints',
    'CommunicationImplementation',
    'CommunicationOptions',
    'LayoutMap',
    'LocalUpdates',
    'MultiWorkerMirroredStrategy',
    'ParameterServerStrategy',
    'PerWorkerVariable',
    'PreemptionCheckpointHandler',
    'PreemptionWatcher',
    'ShardedVariable',
    'TPUStrategy',
    'TerminationConfig',
    'ValueContext',
    'accumulate',
    'cache_variable_reads',
    'coordinator',
    'layouts',
    'load_table',
    'lookup',
    'partitioners',
    'rpc',
    'save_table',
]
