import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.devices.split import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    split_offsets,
    split_sizes,
)
from replicax._src.vocabulary.errors import InvalidArgumentError

rows = st.integers(0, 2000)
replicas = st.integers(1, 64)


@pytest.mark.parametrize(
    ("num_rows", "num_replicas", "sizes"),
    [
        (9, 4, (3, 2, 2, 2)),
        (1, 2, (1, 0)),
        (0, 3, (0, 0, 0)),
        (8, 3, (3, 3, 2)),
        (4, 3, (2, 1, 1)),
        (6, 4, (2, 2, 1, 1)),
        (7, 1, (7,)),
    ],
)
def test_sizes(num_rows, num_replicas, sizes):
    assert split_sizes(num_rows, num_replicas) == sizes


@given(rows, replicas)
def test_sizes_are_exact_and_as_even_as_can_be(num_rows, num_replicas):
    sizes = split_sizes(num_rows, num_replicas)
    assert len(sizes) == num_replicas
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == list(sizes)


@given(rows, replicas)
def test_offsets_are_where_the_slices_meet(num_rows, num_replicas):
    offsets = split_offsets(num_rows, num_replicas)
    assert (offsets[0], offsets[-1]) == (0, num_rows)
    assert tuple(np.diff(offsets)) == split_sizes(num_rows, num_replicas)


@pytest.mark.parametrize(("num_rows", "num_replicas"), [(-1, 2), (4, 0), (4, -1)])
def test_impossible_splits(num_rows, num_replicas):
    with pytest.raises(InvalidArgumentError):
        split_sizes(num_rows, num_replicas)


def test_input_context():
    context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(
        ValueError, match="The `global_batch_size` 13 is not divisible by `num_replicas_in_sync` 6 "
    ):
        context.get_per_replica_batch_size(13)
    assert str(InputContext(3, 1, 42)) == "tf.distribute.InputContext(input pipeline id 1, total: 3)"
    assert InputContext() == InputContext(1, 0, 1)


@pytest.mark.parametrize(("num_pipelines", "index"), [(2, 2), (2, -1), (0, 0)])
def test_pipelines_that_do_not_exist(num_pipelines, index):
    text = f"less than num_input_pipelines={num_pipelines}, got {index}"
    with pytest.raises(InvalidArgumentError, match=text):
        InputContext(num_pipelines, index)


def test_input_options():
    assert InputOptions().experimental_fetch_to_device
    assert InputOptions().experimental_replication_mode is InputReplicationMode.PER_WORKER
    assert InputOptions().experimental_per_replica_buffer_size == 1
    named = InputOptions(experimental_replication_mode="per_replica")
    assert named.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode="PER_REPLICA",
        experimental_place_dataset_on_device=True,
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"experimental_replication_mode": "PER_HOST"}, "PER_WORKER, PER_REPLICA"),
        ({"experimental_per_replica_buffer_size": 0}, "at least 1, got 0"),
        ({"experimental_place_dataset_on_device": True}, "you must also specify `PER_REPLICA`"),
        (
            {"experimental_place_dataset_on_device": True, "experimental_replication_mode": "PER_REPLICA"},
            "can not be set to True when experimental_fetch_to_device is True",
        ),
    ],
)
def test_impossible_input_options(options, text):
    with pytest.raises(InvalidArgumentError, match=text):
        InputOptions(**options)
