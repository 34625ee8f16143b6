"""tf.data datasets. This file uses only public TensorFlow. TensorFlow's own ``AutoShardDataset`` distributes files over
workers.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import jax
import numpy as np

from replicax._src.devices.autoshard import AutoShardPolicy
from replicax._src.input.arrays import UnsupportedElementError
from replicax._src.input.description import DatasetPart, Description
from replicax._src.input.element_specs import INFINITE, ArraySpec, Cardinality
from replicax._src.input.elements import Elements

_NOT_RESUMABLE: Final = (
    "The position of a tf.data.Dataset cannot be saved or restored here: its iterators can be saved in TensorFlow "
    "checkpoints only. Save the number of steps and pass dataset.skip(num_steps), if the dataset yields the same "
    "every time; or use rx.data.from_tfrecords(...), rx.data.from_arrays(...) or a grain dataset."
)
_TEXT: Final = "a tf.data.Dataset"
_MAX_FILES_COUNTED: Final = 1_000  # for a list of files that repeats without end or is filtered
_IGNORE: Final = 1  # tf.data's ExternalStatePolicy: no warning that a graph lacks random states


def describe_tensorflow(dataset: Any) -> Description | None:
    """Describes a ``tf.data.Dataset``; returns None for any other value.

    Its elements are not copied; they stay in TensorFlow's read-only memory. A generator or ``tf.numpy_function`` must
    not reuse an array that it has returned, because TensorFlow prefetches elements.
    ``options().experimental_distribute.auto_shard_policy`` decides how workers share it.

    Raises:
      UnsupportedElementError: A component of ``element_spec`` is not a dense tensor of numbers.
    """
    tf = sys.modules.get("tensorflow")
    if tf is None or not isinstance(dataset, tf.data.Dataset):
        return None
    _check_dense(dataset.element_spec)
    policy = AutoShardPolicy.parse(dataset.options().experimental_distribute.auto_shard_policy.name)
    # Only the policy HINT needs to know if there are hints, because the check creates an iterator, which uses up one
    # order of a shuffle. With other policies TensorFlow itself rejects a SHARD_HINT when the dataset is iterated.
    return Description(
        _TEXT,
        lambda: _elements(dataset, _cardinality(dataset)),
        lambda part: _part(dataset, policy, part),
        policy=policy,
        has_hint=policy is not AutoShardPolicy.HINT or _has_hint(dataset),
        count_files=lambda: _count_files(dataset),
    )


def _part(dataset: Any, own_policy: AutoShardPolicy, part: DatasetPart) -> Elements:
    if part.by is AutoShardPolicy.HINT and part.num_shards == 1 and own_policy is not AutoShardPolicy.HINT:
        return _elements(dataset, _cardinality(dataset))
    # A shard ignores the declared cardinality (assert_cardinality), which may be wrong for it.
    return _elements(_auto_shard(dataset, part.num_shards, part.index, part.by.name), None)


def _elements(dataset: Any, cardinality: Cardinality | None) -> Elements:
    return Elements(
        _TEXT,
        dataset.as_numpy_iterator,
        count=lambda: cardinality,
        is_count_promised=True,
        declared_spec=lambda: _specs(dataset.element_spec),
        not_resumable=_NOT_RESUMABLE,
        is_immutable=True,
    )


def _cardinality(dataset: Any) -> Cardinality | None:
    experimental = sys.modules["tensorflow"].data.experimental
    count = int(dataset.cardinality())
    if count == experimental.INFINITE_CARDINALITY:
        return INFINITE
    return None if count == experimental.UNKNOWN_CARDINALITY else count


# --- what elements look like --------------------------------------------------------------------------


def _check_dense(element_spec: Any) -> None:
    for path, spec in jax.tree_util.tree_leaves_with_path(element_spec):
        problem = _problem_of(spec)
        if problem:
            where = f"The component {jax.tree_util.keystr(path)}" if path else "The element"
            raise UnsupportedElementError(f"{where} of this tf.data.Dataset is {problem}")


def _problem_of(spec: Any) -> str | None:
    """Returns the problem of a component and its remedy; None if it is a dense tensor of numbers, or None."""
    tf = sys.modules["tensorflow"]
    if isinstance(spec, tf.RaggedTensorSpec):
        return (
            f"ragged ({spec}); batches are dense. Before batching use padded_batch(n) in place of ragged_batch(n), "
            "or after it dataset.map(lambda x: x.to_tensor())."
        )
    if isinstance(spec, tf.SparseTensorSpec):
        return f"sparse ({spec}); batches are dense. Use dataset.map(tf.sparse.to_dense)."
    if isinstance(spec, tf.TensorSpec):
        if spec.dtype == tf.string:
            return (
                f"text ({spec}), which no device can hold. Turn it into numbers in dataset.map (tf.strings.to_number, "
                "tf.io.decode_raw, a keras.layers.TextVectorization), or leave it out."
            )
        if spec.dtype in (tf.variant, tf.resource) or spec.dtype.is_quantized:
            return f"of a dtype that no device can hold ({spec}). Convert it in dataset.map, or leave it out."
        return None
    if isinstance(spec, type(tf.data.Dataset.from_tensors((0, None)).element_spec[1])):  # the spec of None
        return None
    return f"no tensor ({spec}); batches are dense tensors. Make it one in dataset.map, or leave it out."


def _specs(element_spec: Any) -> Any:
    """Returns the pytree of ArraySpecs; None if a component has an unknown number of dims."""
    tf = sys.modules["tensorflow"]
    leaves, structure = jax.tree.flatten(element_spec)
    is_tensor = [isinstance(spec, tf.TensorSpec) for spec in leaves]
    if any(tensor and spec.shape.rank is None for tensor, spec in zip(is_tensor, leaves)):
        return None
    return jax.tree.unflatten(
        structure,
        [
            ArraySpec(tuple(spec.shape), np.dtype(spec.dtype.as_numpy_dtype)) if tensor else None
            for tensor, spec in zip(is_tensor, leaves)
        ],
    )


# --- shards -------------------------------------------------------------------------------------------


def _auto_shard(dataset: Any, num_shards: int, index: int, policy: str) -> Any:
    """Returns the part that TensorFlow assigns to one worker.

    Source: tensorflow/python/data/experimental/ops/distribute.py, ``_AutoShardDataset``.
    """
    tf = sys.modules["tensorflow"]
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    wanted = dataset.with_options(options)  # the dataset's own policy would override the argument
    flat = tf.nest.flatten(dataset.element_spec, expand_composites=True)
    variant = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.data.experimental.to_variant(wanted),
        num_workers=num_shards,
        index=index,
        auto_shard_policy=options.experimental_distribute.auto_shard_policy.value,
        num_replicas=1,
        output_types=[spec.dtype for spec in flat],
        output_shapes=[spec.shape for spec in flat],
    )
    return tf.data.experimental.from_variant(variant, dataset.element_spec).with_options(dataset.options())


def _has_hint(dataset: Any) -> bool:
    """True if the dataset has a ``shard(SHARD_HINT, SHARD_HINT)``. TensorFlow refuses to iterate such a dataset."""
    try:
        iter(dataset)
    except sys.modules["tensorflow"].errors.FailedPreconditionError:
        return True
    return False


def _count_files(dataset: Any) -> int | None:
    """Returns the number of files that TensorFlow would distribute over workers; None if it would not shard by file.

    In the graph of a dataset sharded by file, each reader has a ShardDataset before it. The input of that node is the
    dataset of file names, so this cuts the graph there and counts the elements.
    """
    tf = sys.modules["tensorflow"]
    own_policy = dataset.options().experimental_distribute.auto_shard_policy
    if own_policy == tf.data.experimental.AutoShardPolicy.AUTO and _is_divided_by_rows(dataset):
        return None
    try:
        shard = _auto_shard(dataset, 2, 0, "FILE")
    except tf.errors.NotFoundError:
        return None
    graph = _graph(shard)
    shards = [node for node in graph.node if node.op == "ShardDataset" and node.attr["require_non_empty"].b]
    return min((_count_inputs(graph, node) for node in shards), default=None)


def _is_divided_by_rows(dataset: Any) -> bool:
    """True if the policy AUTO takes every second element because it found no reader. Asking for FILE would then log a
    page of text.
    """
    count = int(dataset.cardinality())
    if count < 2:
        return False
    return int(_auto_shard(dataset, 2, 0, "AUTO").cardinality()) == -(-count // 2)


def _graph(dataset: Any) -> Any:
    tf = sys.modules["tensorflow"]
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE,
        strip_device_assignment=True,
    )
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def _count_inputs(graph: Any, shard: Any) -> int:
    """Returns the number of elements that enter a ShardDataset of a graph. Counts distinct ones if the number is not
    declared.
    """
    tf = sys.modules["tensorflow"]
    cut = type(graph)()
    cut.CopyFrom(graph)
    for end in cut.node:
        if end.op == "_Retval":
            end.input[0] = shard.input[0]
    specs = tuple(
        tf.TensorSpec(tf.TensorShape(shape), tf.dtypes.as_dtype(dtype))
        for dtype, shape in zip(shard.attr["output_types"].list.type, shard.attr["output_shapes"].list.shape)
    )
    variant = tf.raw_ops.DatasetFromGraph(graph_def=cut.SerializeToString())
    names = tf.data.experimental.from_variant(variant, specs)
    count = _cardinality(names)
    if count is not None and count != INFINITE:
        return int(count)
    first_components = names.map(lambda *components: components[0]).take(_MAX_FILES_COUNTED)
    return len({np.asarray(name).tobytes() for name in first_components.as_numpy_iterator()})
