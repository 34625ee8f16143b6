"""The page on migrating shows the full table, which has a row for every name on TensorFlow's pages, and its rows are
true."""

import functools
import importlib
import pathlib
import re

import pytest

from replicax._migrate import table

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
ROWS = table.rows()


def exists(name: str) -> bool:
    root, *attributes = name.split(".")
    try:
        functools.reduce(getattr, attributes, importlib.import_module(MODULES[root]))
    except AttributeError:
        return False
    return True


def names_in(text: str) -> set[str]:
    """The names of replicax, Keras and JAX in a text."""
    return set(re.findall(rf"(?<![\w./])(?:{'|'.join(MODULES)})(?:\.[a-z]\w*|\.[A-Z]\w*)+", text))


def test_the_page_shows_every_section_once():
    shown = re.findall(r"^<!-- make pages: migration (.+) -->$", PAGE.read_text(), re.MULTILINE)
    assert shown == [section.title for section in table.sections()]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensorflow_name_has_a_row(name):
    assert [row for row in ROWS if name in row.names]


def test_rows_of_one_name_differ():
    rows = [(name, row.parameters, *row.when.items(), row.with_keras) for row in ROWS for name in row.names]
    assert len(set(rows)) == len(rows)


def test_names_in_remarks_and_marks_exist():
    texts = [text for row in ROWS for text in (row.note, row.write)]
    assert [name for text in texts for name in sorted(names_in(text)) if not exists(name)] == []


def test_names_on_the_page_exist():
    assert [name for name in sorted(names_in(PAGE.read_text())) if not exists(name)] == []


def test_links_of_remarks_lead_somewhere():
    links = [link for row in ROWS for link in re.findall(r"\]\(([^)#]+)", row.note)]
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
