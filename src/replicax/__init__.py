"""replicax: TensorFlow's ``tf.distribute`` programming model for JAX and Keras 3.

One training program, and one object, the strategy, that says where it runs. Importing this starts no backend.
"""

from replicax import config, data, nn
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
from replicax._src.function import function
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
from replicax._src.program.tape import GradientTape
from replicax._src.strategies import default as _default
from replicax._src.strategies.central_storage import CentralStorageStrategy
from replicax._src.strategies.extended import StrategyExtended
from replicax._src.strategies.mirrored import MirroredStrategy
from replicax._src.strategies.one_device import OneDeviceStrategy
from replicax._src.strategies.strategy import Strategy
from replicax._src.values import DistributedValues, Mirrored, PerReplica
from replicax._src.variables.variable import Variable
