"""replicax: TensorFlow's ``tf.distribute`` programming model for JAX and Keras 3.

One training program, and one object, the strategy, that says where it runs. Importing it starts no backend and does
not import JAX, which takes a second: each name is loaded at its first use, so launchers and parameter servers start at
once. It adds one finder, which explains a failing ``import keras``.
"""

from replicax._src.keras.import_errors import explain_failing_import
from replicax._src.packaging.version import __version__ as __version__
from replicax._src.user.public_names import publish_all

# Where each name is, without those of parts, which the registry has (``_src/parts.py``). Type checkers read
# ``__init__.pyi``, which ``make pages`` writes.
_PLACES = {
    "CentralStorageStrategy": "replicax._src.strategies.central_storage",
    "Checkpoint": "replicax._src.checkpoint.checkpoint",
    "CheckpointManager": "replicax._src.checkpoint.manager",
    "CommunicationImplementation": "replicax._src.vocabulary.options",
    "CommunicationOptions": "replicax._src.vocabulary.options",
    "CrossDeviceOps": "replicax._src.collectives.cross_device",
    "DistributedDataset": "replicax._src.input.dataset",
    "DistributedIterator": "replicax._src.input.dataset",
    "DistributedValues": "replicax._src.values.distributed",
    "GradientTape": "replicax._src.tracing.tape",
    "HierarchicalCopyAllReduce": "replicax._src.collectives.cross_device",
    "IndexedSlices": "replicax._src.collectives.in_replica",
    "InputContext": "replicax._src.devices.split",
    "FaultToleranceOptions": "replicax._src.vocabulary.options",
    "InputOptions": "replicax._src.devices.split",
    "InputReplicationMode": "replicax._src.devices.split",
    "Mirrored": "replicax._src.values.distributed",
    "MirroredStrategy": "replicax._src.strategies.mirrored",
    "Module": "replicax._src.checkpoint.module",
    "MultiWorkerMirroredStrategy": "replicax._src.strategies.multi_worker_mirrored",
    "NcclAllReduce": "replicax._src.collectives.cross_device",
    "OneDeviceStrategy": "replicax._src.strategies.one_device",
    "PerReplica": "replicax._src.values.distributed",
    "Precision": "replicax._src.values.precision",
    "Profile": "replicax._src.profiling.profile",
    "ReduceOp": "replicax._src.vocabulary.options",
    "ReductionToOneDevice": "replicax._src.collectives.cross_device",
    "ReplicaContext": "replicax._src.scope.context",
    "RunOptions": "replicax._src.vocabulary.options",
    "Strategy": "replicax._src.strategies.strategy",
    "StrategyExtended": "replicax._src.strategies.extended",
    "SummaryWriter": "replicax._src.summaries.writer",
    "TPUStrategy": "replicax._src.strategies.tpu",
    "UnconnectedGradients": "replicax._src.vocabulary.options",
    "ValueContext": "replicax._src.vocabulary.options",
    "Variable": "replicax._src.variables.variable",
    "VariableAggregation": "replicax._src.vocabulary.options",
    "VariableSynchronization": "replicax._src.vocabulary.options",
    "assert_same": "replicax._src.functions.control",
    "checkpoint": "replicax.checkpoint",
    "cluster_resolver": "replicax.cluster_resolver",
    "cond": "replicax._src.functions.control",
    "config": "replicax.config",
    "coordinator": "replicax.coordinator",
    "data": "replicax.data",
    "device": "replicax._src.devices.listing",
    "errors": "replicax.errors",
    "experimental": "replicax.experimental",
    "experimental_set_strategy": "replicax._src.scope.context",
    "function": "replicax._src.functions.function",
    "get_loss_reduction": "replicax._src.vocabulary.options",
    "get_replica_context": "replicax._src.scope.context",
    "get_strategy": "replicax._src.scope.context",
    "has_strategy": "replicax._src.scope.context",
    "in_cross_replica_context": "replicax._src.scope.context",
    "is_chief": "replicax._src.cluster.chief",
    "keras": "replicax.keras",
    "nn": "replicax.nn",
    "optax": "replicax.optax",
    "planning": "replicax.planning",
    "profile": "replicax._src.profiling.profile",
    "ray": "replicax.ray",
    "summary": "replicax.summary",
    "testing": "replicax.testing",
    "tpu": "replicax.tpu",
    "value_and_grad": "replicax._src.functions.gradients",
}

__dir__ = publish_all(globals(), _PLACES)
explain_failing_import()
