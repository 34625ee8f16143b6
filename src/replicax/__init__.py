"""replicax: TensorFlow's ``tf.distribute`` programming model for JAX and Keras 3.

One training program, and one object, the strategy, that says where it runs. Importing this starts no backend.
"""

from replicax import (
    checkpoint,
    cluster_resolver,
    config,
    coordinator,
    data,
    errors,
    experimental,
    keras,
    nn,
    optax,
    summary,
    testing,
    tpu,
)
from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.manager import CheckpointManager
from replicax._src.collectives.cross_device import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from replicax._src.collectives.in_replica import IndexedSlices
from replicax._src.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax._src.control import assert_same, cond
from replicax._src.function import function
from replicax._src.gradients import value_and_grad
from replicax._src.input.dataset import DistributedDataset, DistributedIterator
from replicax._src.input.split import InputContext, InputOptions, InputReplicationMode
from replicax._src.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
    RunOptions,
    UnconnectedGradients,
    ValueContext,
    VariableAggregation,
    VariableSynchronization,
)
from replicax._src.profiling.profile import Profile, profile
from replicax._src.program.tape import GradientTape
from replicax._src.ps.server_def import ServerDef, ServerOptions
from replicax._src.ps.task import Server
from replicax._src.strategies import default  # noqa: F401  (makes the default strategy)
from replicax._src.strategies.central_storage import CentralStorageStrategy
from replicax._src.strategies.extended import StrategyExtended
from replicax._src.strategies.mirrored import MirroredStrategy
from replicax._src.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from replicax._src.strategies.one_device import OneDeviceStrategy
from replicax._src.strategies.parameter_server import ParameterServerStrategy
from replicax._src.strategies.strategy import Strategy
from replicax._src.strategies.tpu import TPUStrategy
from replicax._src.summaries.writer import SummaryWriter
from replicax._src.values import DistributedValues, Mirrored, PerReplica
from replicax._src.variables.variable import Variable

__all__ = [
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "GradientTape",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "Profile",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "ServerDef",
    "ServerOptions",
    "Strategy",
    "StrategyExtended",
    "SummaryWriter",
    "TPUStrategy",
    "UnconnectedGradients",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "assert_same",
    "checkpoint",
    "cluster_resolver",
    "cond",
    "config",
    "coordinator",
    "data",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "keras",
    "nn",
    "optax",
    "profile",
    "summary",
    "testing",
    "tpu",
    "value_and_grad",
]
