"""TensorFlow's ``tf.distribute.experimental`` names: ``rx.experimental``."""

from replicax import coordinator
from replicax._src.accumulation import accumulate
from replicax._src.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ValueContext,
    collective_hints,
)
from replicax._src.parameter_servers.coordinator.per_worker_variable import PerWorkerVariable
from replicax._src.parameter_servers.strategy.parameter_server import ParameterServerStrategy
from replicax._src.preemption.handler import PreemptionCheckpointHandler
from replicax._src.preemption.termination import TerminationConfig
from replicax._src.preemption.watcher import PreemptionWatcher
from replicax._src.public_names import publish_all
from replicax._src.strategies import multi_worker_mirrored, tpu
from replicax._src.strategies.central_storage import CentralStorageStrategy
from replicax._src.strategies.table_files import load_table, save_table
from replicax._src.variables.caching import cache_variable_reads
from replicax._src.variables.layout_map import LayoutMap
from replicax._src.variables.lookup import lookup
from replicax._src.variables.sharded import ShardedVariable
from replicax.experimental import layouts, partitioners, rpc

CollectiveCommunication = CommunicationImplementation
CollectiveHints = collective_hints
MultiWorkerMirroredStrategy = multi_worker_mirrored.of_older_signature
TPUStrategy = tpu.of_older_signature

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "LayoutMap",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PerWorkerVariable",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "ShardedVariable",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "accumulate",
    "cache_variable_reads",
    "coordinator",
    "layouts",
    "load_table",
    "lookup",
    "partitioners",
    "rpc",
    "save_table",
]

__dir__ = publish_all(globals())
