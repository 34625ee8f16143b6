"""replicax: TensorFlow's ``tf.distribute`` programming model for JAX and Keras 3.

One training program, and one object, the strategy, that says where it runs. Importing this starts no backend, and loads
nothing: each name is loaded when it is first asked for. JAX takes a second, which launchers and parameter servers are
not to wait.
"""

import importlib
from typing import TYPE_CHECKING, Any

from replicax._src.home import install_command
from replicax._src.keras_import import explain_failing_import
from replicax._src.public_names import missing_name, publish, publish_all, publish_loaded
from replicax._src.version import __version__ as __version__

if TYPE_CHECKING:
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
        planning,
        ray,
        summary,
        testing,
        tpu,
    )
    from replicax._src.checkpoint.checkpoint import Checkpoint
    from replicax._src.checkpoint.manager import CheckpointManager
    from replicax._src.checkpoint.module import Module
    from replicax._src.cluster.chief import is_chief
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
    from replicax._src.devices.listing import device
    from replicax._src.devices.split import InputContext, InputOptions, InputReplicationMode
    from replicax._src.function import function
    from replicax._src.gradients import value_and_grad
    from replicax._src.input.dataset import DistributedDataset, DistributedIterator
    from replicax._src.options import (
        CommunicationImplementation,
        CommunicationOptions,
        ReduceOp,
        RunOptions,
        UnconnectedGradients,
        ValueContext,
        VariableAggregation,
        VariableSynchronization,
        get_loss_reduction,
    )
    from replicax._src.parameter_servers.strategy.parameter_server import ParameterServerStrategy
    from replicax._src.parameter_servers.task.server_def import ServerDef, ServerOptions
    from replicax._src.parameter_servers.task.task import Server
    from replicax._src.pictures.visualize import visualize
    from replicax._src.precision import Precision
    from replicax._src.profiling.profile import Profile, profile
    from replicax._src.strategies.central_storage import CentralStorageStrategy
    from replicax._src.strategies.extended import StrategyExtended
    from replicax._src.strategies.mirrored import MirroredStrategy
    from replicax._src.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from replicax._src.strategies.one_device import OneDeviceStrategy
    from replicax._src.strategies.strategy import Strategy
    from replicax._src.strategies.tpu import TPUStrategy
    from replicax._src.summaries.writer import SummaryWriter
    from replicax._src.tracing.tape import GradientTape
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
    "Module",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "Precision",
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
    "device",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_chief",
    "keras",
    "nn",
    "optax",
    "planning",
    "profile",
    "ray",
    "summary",
    "testing",
    "tpu",
    "value_and_grad",
    "visualize",
]

# Where each name is: as above, which only type checkers read. tests/test_layering.py compares them.
_MODULES = (
    "checkpoint",
    "cluster_resolver",
    "config",
    "coordinator",
    "data",
    "errors",
    "experimental",
    "keras",
    "nn",
    "optax",
    "planning",
    "ray",
    "summary",
    "testing",
    "tpu",
)
_PLACES = {
    "Checkpoint": "checkpoint.checkpoint",
    "CheckpointManager": "checkpoint.manager",
    "is_chief": "cluster.chief",
    "CrossDeviceOps": "collectives.cross_device",
    "HierarchicalCopyAllReduce": "collectives.cross_device",
    "NcclAllReduce": "collectives.cross_device",
    "ReductionToOneDevice": "collectives.cross_device",
    "IndexedSlices": "collectives.in_replica",
    "ReplicaContext": "context",
    "experimental_set_strategy": "context",
    "get_replica_context": "context",
    "get_strategy": "context",
    "has_strategy": "context",
    "in_cross_replica_context": "context",
    "assert_same": "control",
    "cond": "control",
    "function": "function",
    "value_and_grad": "gradients",
    "DistributedDataset": "input.dataset",
    "DistributedIterator": "input.dataset",
    "device": "devices.listing",
    "InputContext": "devices.split",
    "InputOptions": "devices.split",
    "InputReplicationMode": "devices.split",
    "CommunicationImplementation": "options",
    "CommunicationOptions": "options",
    "ReduceOp": "options",
    "RunOptions": "options",
    "UnconnectedGradients": "options",
    "get_loss_reduction": "options",
    "ValueContext": "options",
    "VariableAggregation": "options",
    "VariableSynchronization": "options",
    "Profile": "profiling.profile",
    "profile": "profiling.profile",
    "GradientTape": "tracing.tape",
    "Precision": "precision",
    "ServerDef": "parameter_servers.task.server_def",
    "ServerOptions": "parameter_servers.task.server_def",
    "Server": "parameter_servers.task.task",
    "CentralStorageStrategy": "strategies.central_storage",
    "StrategyExtended": "strategies.extended",
    "MirroredStrategy": "strategies.mirrored",
    "Module": "checkpoint.module",
    "MultiWorkerMirroredStrategy": "strategies.multi_worker_mirrored",
    "OneDeviceStrategy": "strategies.one_device",
    "ParameterServerStrategy": "parameter_servers.strategy.parameter_server",
    "Strategy": "strategies.strategy",
    "TPUStrategy": "strategies.tpu",
    "SummaryWriter": "summaries.writer",
    "DistributedValues": "values",
    "Mirrored": "values",
    "PerReplica": "values",
    "Variable": "variables.variable",
    "visualize": "pictures.visualize",
}


if not TYPE_CHECKING:  # which would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return _imported(f"replicax.{name}")
        if name in _PLACES:
            value = getattr(_imported(f"replicax._src.{_PLACES[name]}"), name)
            value = globals()[name] = publish(__name__, name, value)  # not asked for again
            publish_loaded(__name__, _PLACES)
            return value
        raise missing_name(__name__, name)


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name in ("jax", "jaxlib", "numpy"):
            error.add_note(
                f"replicax needs {error.name}, which is not installed. Run: {install_command('jax')} (for NVIDIA GPUs: "
                f"{install_command('jax[cuda13]')}; for TPUs: {install_command('jax[tpu]')})."
            )
        raise


__dir__ = publish_all(globals())
explain_failing_import()
