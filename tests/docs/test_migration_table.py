"""docs/migrating_from_tensorflow.md has a row for every name of TensorFlow's pages, and its rows are true."""

import functools
import importlib
import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "migrating_from_tensorflow.md"

# Every tf.* name in TensorFlow's guide "Distributed training with TensorFlow" and on its API pages of tf.distribute,
# Strategy, ParameterServerStrategy and CentralStorageStrategy.
MENTIONED = """
tf.ConfigProto tf.GradientTape tf.Tensor tf.TypeSpec tf.Variable tf.add tf.add_n
tf.compat.v1.TensorInfo.CompositeTensor tf.compat.v1.colocate_with
tf.compat.v1.distribute.experimental.ParameterServerStrategy
tf.config.experimental_connect_to_cluster tf.config.list_physical_devices tf.constant tf.data.Dataset
tf.data.Dataset.from_tensors tf.device tf.distribute tf.distribute.CentralStorageStrategy
tf.distribute.CrossDeviceOps tf.distribute.DistributedDataset tf.distribute.DistributedDataset.element_spec
tf.distribute.DistributedValues tf.distribute.HierarchicalCopyAllReduce tf.distribute.InputContext
tf.distribute.InputIterator tf.distribute.InputOptions tf.distribute.InputReplicationMode
tf.distribute.MirroredStrategy tf.distribute.MultiWorkerMirroredStrategy tf.distribute.NcclAllReduce
tf.distribute.OneDeviceStrategy tf.distribute.ReduceOp tf.distribute.ReduceOp.MEAN tf.distribute.ReduceOp.SUM
tf.distribute.ReductionToOneDevice tf.distribute.ReplicaContext tf.distribute.RunOptions tf.distribute.Server
tf.distribute.Strategy tf.distribute.Strategy.distribute_datasets_from_function
tf.distribute.Strategy.experimental_distribute_dataset
tf.distribute.Strategy.experimental_distribute_datasets_from_function
tf.distribute.Strategy.experimental_local_results tf.distribute.Strategy.make_experimental_numpy_dataset
tf.distribute.Strategy.reduce tf.distribute.Strategy.run tf.distribute.StrategyExtended
tf.distribute.TPUStrategy tf.distribute.ValueContext tf.distribute.cluster_resolver
tf.distribute.cluster_resolver.ClusterResolver tf.distribute.cluster_resolver.TFConfigClusterResolver
tf.distribute.cluster_resolver.TPUClusterResolver tf.distribute.experimental
tf.distribute.experimental.CentralStorageStrategy
tf.distribute.experimental.CommunicationImplementation.NCCL tf.distribute.experimental.CommunicationOptions
tf.distribute.experimental.MultiWorkerMirroredStrategy tf.distribute.experimental.ParameterServerStrategy
tf.distribute.experimental.TPUStrategy tf.distribute.experimental.coordinator.ClusterCoordinator
tf.distribute.experimental_distribute_dataset tf.distribute.experimental_set_strategy
tf.distribute.get_replica_context tf.distribute.get_strategy tf.distribute.has_strategy
tf.distribute.in_cross_replica_context tf.estimator.Estimator tf.estimator.RunConfig tf.function tf.functions
tf.get_strategy tf.identity tf.keras tf.keras.Model tf.keras.Sequential tf.keras.layers.Dense
tf.keras.losses.BinaryCrossentropy tf.keras.losses.Reduction.NONE tf.keras.metrics tf.keras.optimizers
tf.keras.optimizers.SGD tf.keras.regularizers.L2 tf.nest tf.nn.compute_average_loss
tf.nn.scale_regularization_loss tf.shape tf.tpu.experimental.initialize_tpu_system tf.variable_creator_scope
"""

NAMES = MENTIONED.split()
MODULES = {"rx": "replicax", "keras": "keras", "jax": "jax", "jnp": "jax.numpy"}
ROW = re.compile(r"^\| `(tf\.[\w.]+)` \| (.+) \| (yes|planned|not needed) \|$")
ROWS = [match.groups() for match in map(ROW.match, PAGE.read_text().splitlines()) if match]


def names_in(text: str) -> list[str]:
    """The names of replicax, Keras and JAX that stand in code font."""
    quoted = " ".join(re.findall(r"`([^`]+)`", text))
    return re.findall(rf"\b(?:{'|'.join(MODULES)})(?:\.\w+)*", quoted)


def exists(name: str) -> bool:
    root, *attributes = name.split(".")
    try:
        functools.reduce(getattr, attributes, importlib.import_module(MODULES[root]))
    except AttributeError:
        return False
    return True


def test_every_line_of_the_tables_is_read():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `tf.")]
    with_status = [line for line in lines if line.endswith(("| yes |", "| planned |", "| not needed |"))]
    assert len(with_status) == len(ROWS)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensorflow_name_has_one_row(name):
    assert [row[0] for row in ROWS].count(name) == 1


def test_what_is_said_to_be_there_is_there():
    said = [name for _, here, today in ROWS if today == "yes" for name in names_in(here)]
    assert [name for name in said if not exists(name)] == []


def test_what_is_said_to_be_planned_is_not_there():
    """Who adds one of these names changes its row too."""
    said = [name for _, here, today in ROWS if today == "planned" for name in names_in(here)]
    assert [name for name in said if exists(name)] == []
