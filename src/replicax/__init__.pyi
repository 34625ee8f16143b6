# Written by tools/public_stubs.py from the module and src/replicax/_src/parts.py. Do not edit.

from replicax import checkpoint as checkpoint
from replicax import cluster_resolver as cluster_resolver
from replicax import config as config
from replicax import coordinator as coordinator
from replicax import data as data
from replicax import errors as errors
from replicax import experimental as experimental
from replicax import keras as keras
from replicax import nn as nn
from replicax import optax as optax
from replicax import planning as planning
from replicax import ray as ray
from replicax import summary as summary
from replicax import testing as testing
from replicax import tpu as tpu
from replicax._plan.pictures.visualize import visualize as visualize
from replicax._ps.strategy.parameter_server import ParameterServerStrategy as ParameterServerStrategy
from replicax._ps.task.server_def import ServerDef as ServerDef
from replicax._ps.task.server_def import ServerOptions as ServerOptions
from replicax._ps.task.task import Server as Server
from replicax._src.checkpoint.checkpoint import Checkpoint as Checkpoint
from replicax._src.checkpoint.manager import CheckpointManager as CheckpointManager
from replicax._src.checkpoint.module import Module as Module
from replicax._src.cluster.chief import is_chief as is_chief
from replicax._src.collectives.cross_device import CrossDeviceOps as CrossDeviceOps
from replicax._src.collectives.cross_device import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from replicax._src.collectives.cross_device import NcclAllReduce as NcclAllReduce
from replicax._src.collectives.cross_device import ReductionToOneDevice as ReductionToOneDevice
from replicax._src.collectives.in_replica import IndexedSlices as IndexedSlices
from replicax._src.devices.listing import device as device
from replicax._src.devices.split import InputContext as InputContext
from replicax._src.devices.split import InputOptions as InputOptions
from replicax._src.devices.split import InputReplicationMode as InputReplicationMode
from replicax._src.functions.control import assert_same as assert_same
from replicax._src.functions.control import cond as cond
from replicax._src.functions.function import function as function
from replicax._src.functions.gradients import value_and_grad as value_and_grad
from replicax._src.input.dataset import DistributedDataset as DistributedDataset
from replicax._src.input.dataset import DistributedIterator as DistributedIterator
from replicax._src.packaging.version import __version__ as __version__
from replicax._src.profiling.profile import Profile as Profile
from replicax._src.profiling.profile import profile as profile
from replicax._src.scope.context import ReplicaContext as ReplicaContext
from replicax._src.scope.context import experimental_set_strategy as experimental_set_strategy
from replicax._src.scope.context import get_replica_context as get_replica_context
from replicax._src.scope.context import get_strategy as get_strategy
from replicax._src.scope.context import has_strategy as has_strategy
from replicax._src.scope.context import in_cross_replica_context as in_cross_replica_context
from replicax._src.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from replicax._src.strategies.extended import StrategyExtended as StrategyExtended
from replicax._src.strategies.mirrored import MirroredStrategy as MirroredStrategy
from replicax._src.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from replicax._src.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from replicax._src.strategies.strategy import Strategy as Strategy
from replicax._src.strategies.tpu import TPUStrategy as TPUStrategy
from replicax._src.summaries.writer import SummaryWriter as SummaryWriter
from replicax._src.tracing.tape import GradientTape as GradientTape
from replicax._src.values.distributed import DistributedValues as DistributedValues
from replicax._src.values.distributed import Mirrored as Mirrored
from replicax._src.values.distributed import PerReplica as PerReplica
from replicax._src.values.precision import Precision as Precision
from replicax._src.variables.variable import Variable as Variable
from replicax._src.vocabulary.options import CommunicationImplementation as CommunicationImplementation
from replicax._src.vocabulary.options import CommunicationOptions as CommunicationOptions
from replicax._src.vocabulary.options import FaultToleranceOptions as FaultToleranceOptions
from replicax._src.vocabulary.options import ReduceOp as ReduceOp
from replicax._src.vocabulary.options import RunOptions as RunOptions
from replicax._src.vocabulary.options import UnconnectedGradients as UnconnectedGradients
from replicax._src.vocabulary.options import ValueContext as ValueContext
from replicax._src.vocabulary.options import VariableAggregation as VariableAggregation
from replicax._src.vocabulary.options import VariableSynchronization as VariableSynchronization
from replicax._src.vocabulary.options import get_loss_reduction as get_loss_reduction

__all__ = [
    'CentralStorageStrategy',
    'Checkpoint',
    'CheckpointManager',
    'CommunicationImplementation',
    'CommunicationOptions',
    'CrossDeviceOps',
    'DistributedDataset',
    'DistributedIterator',
    'DistributedValues',
    'FaultToleranceOptions',
    'GradientTape',
    'HierarchicalCopyAllReduce',
    'IndexedSlices',
    'InputContext',
    'InputOptions',
    'InputReplicationMode',
    'Mirrored',
    'MirroredStrategy',
    'Module',
    'MultiWorkerMirroredStrategy',
    'NcclAllReduce',
    'OneDeviceStrategy',
    'ParameterServerStrategy',
    'PerReplica',
    'Precision',
    'Profile',
    'ReduceOp',
    'ReductionToOneDevice',
    'ReplicaContext',
    'RunOptions',
    'Server',
    'ServerDef',
    'ServerOptions',
    'Strategy',
    'StrategyExtended',
    'SummaryWriter',
    'TPUStrategy',
    'UnconnectedGradients',
    'ValueContext',
    'Variable',
    'VariableAggregation',
    'VariableSynchronization',
    'assert_same',
    'checkpoint',
    'cluster_resolver',
    'cond',
    'config',
    'coordinator',
    'data',
    'device',
    'errors',
    'experimental',
    'experimental_set_strategy',
    'function',
    'get_loss_reduction',
    'get_replica_context',
    'get_strategy',
    'has_strategy',
    'in_cross_replica_context',
    'is_chief',
    'keras',
    'nn',
    'optax',
    'planning',
    'profile',
    'ray',
    'summary',
    'testing',
    'tpu',
    'value_and_grad',
    'visualize',
]
