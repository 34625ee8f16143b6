"""TensorFlow's ``tf.distribute.experimental`` names: ``rx.experimental``."""

from replicax import coordinator
from replicax._src.functions.accumulation import accumulate
from replicax._src.preemption.handler import PreemptionCheckpointHandler
from replicax._src.preemption.termination import TerminationConfig
from replicax._src.preemption.watcher import PreemptionWatcher
from replicax._src.strategies import multi_worker_mirrored, tpu
from replicax._src.strategies.central_storage import CentralStorageStrategy
from replicax._src.user.public_names import publish_all
from replicax._src.variables.caching import cache_variable_reads
from replicax._src.variables.embedding_lookup import lookup
from replicax._src.variables.layout_map import LayoutMap
from replicax._src.variables.sharded import ShardedVariable
from replicax._src.vocabulary.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ValueContext,
    collective_hints,
)
from replicax.experimental import layouts, partitioners, rpc

CollectiveCommunication = CommunicationImplementation
CollectiveHints = collective_hints
MultiWorkerMirroredStrategy = multi_worker_mirrored.from_older_signature
TPUStrategy = tpu.from_older_signature

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "LayoutMap",
    "MultiWorkerMirroredStrategy",
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
    "lookup",
    "partitioners",
    "rpc",
]

__dir__ = publish_all(globals())
