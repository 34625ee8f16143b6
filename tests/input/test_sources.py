import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.input.arrays import InconsistentRowsError, UnsupportedElementError
from replicax._src.input.element_specs import INFINITE, PerReplicaSpec
from replicax._src.input.pipeline import from_arrays
from replicax._src.input.sources import PerReplicaPulls, UnbatchedDatasetError, open_source

REPLICAS = range(1, 9)


def parts_of(pulls):
    return [[part.tolist() for part in parts] for parts in pulls.iterate()]


@pytest.mark.parametrize("num_replicas", REPLICAS)
def test_global_batches(num_replicas):
    source = open_source(grain.MapDataset.range(9).batch(4), num_replicas=num_replicas)
    assert [step.tree.unflatten(step.arrays).tolist() for step in source.iterate()] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8],
    ]
    assert source.cardinality == 3
    assert source.num_replicas == num_replicas
    assert source.element_spec() == PerReplicaSpec((None,), np.int32, num_replicas)


def test_specs_of_global_batches():
    rows = {"x": np.zeros((8, 3)), "y": np.arange(8)}
    static = open_source(from_arrays(rows).batch(4, drop_remainder=True), num_replicas=2)
    assert static.element_spec() == {
        "x": PerReplicaSpec((2, 3), np.float32, 2),
        "y": PerReplicaSpec((2,), np.int32, 2),
    }
    uneven = open_source(from_arrays(rows).batch(4, drop_remainder=True), num_replicas=3)
    assert uneven.element_spec()["x"].shape == (None, 3)


@pytest.mark.parametrize("dataset", [[1, 2], [[1, 2], [3]], [(np.arange(2), 1)], grain.MapDataset.range(3)])
def test_elements_that_are_not_batches(dataset):
    source = open_source(dataset, num_replicas=5)
    text = "Call the `batch` method on the input Dataset .* to split your input across 5 replicas"
    with pytest.raises(UnbatchedDatasetError, match=text):
        next(source.iterate())
    with pytest.raises(UnbatchedDatasetError):
        source.element_spec()


def test_unbatched_arrays_raise_at_once():
    with pytest.raises(UnbatchedDatasetError):
        open_source(from_arrays(np.zeros((4, 2))))


def test_arrays_of_a_batch_with_different_numbers_of_rows():
    with pytest.raises(InconsistentRowsError, match=r"\[0\]: \(2,\), \[1\]: \(3, 1\)"):
        next(open_source([(np.zeros(2), np.zeros((3, 1)))]).iterate())


def test_an_element_without_arrays():
    with pytest.raises(UnsupportedElementError, match="no array"):
        next(open_source([(None, {})]).iterate())


def test_pulls_give_each_replica_an_element():
    pulls = PerReplicaPulls.from_one(grain.MapDataset.range(8).batch(2), 2)
    assert parts_of(pulls) == parts_of(pulls) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert pulls.cardinality == 2
    assert pulls.num_replicas == 2


@pytest.mark.parametrize("make", [grain.MapDataset.range, lambda n: from_arrays(np.arange(n))])
def test_pulls_fill_up_the_last_step(make):
    pulls = PerReplicaPulls.from_one(make(9).batch(2), 2)
    assert parts_of(pulls) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]
    assert pulls.cardinality == 3
    assert pulls.element_spec() == PerReplicaSpec((None,), np.int32, 2)


@pytest.mark.parametrize("make", [grain.MapDataset.range, lambda n: from_arrays(np.arange(n))])
def test_pulls_of_one_fixed_shape_leave_out_an_incomplete_step(make):
    pulls = PerReplicaPulls.from_one(make(11).batch(2, drop_remainder=True), 2)
    assert parts_of(pulls) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert pulls.cardinality == 2
    assert pulls.element_spec() == PerReplicaSpec((2,), np.int32, 2)


@pytest.mark.parametrize(
    "make", [grain.MapDataset.range, lambda n: from_arrays(np.arange(n)), lambda n: list(range(n))]
)
def test_pulls_of_single_rows_leave_out_an_incomplete_step(make):
    pulls = PerReplicaPulls.from_one(make(3), 2)
    assert parts_of(pulls) == [[0, 1]]
    assert pulls.cardinality == 1
    assert pulls.element_spec().shape == ()


def test_pulls_from_a_generator():
    pulls = PerReplicaPulls.from_one((np.arange(index + 1) for index in range(3)), 2)
    assert pulls.cardinality is None
    assert parts_of(pulls) == [[[0], [0, 1]], [[0, 1, 2], []]]


def test_empty_parts_keep_the_other_dims_and_dtypes():
    element = {"x": np.zeros((2, 3), np.float16), "weight": 1.5}
    (step,) = PerReplicaPulls.from_one([element], 3).iterate()
    assert step[0]["weight"] == 1.5
    for empty in step[1:]:
        assert (empty["x"].shape, empty["x"].dtype) == ((0, 3), np.float16)
        assert empty["weight"] == 0.0


def test_pulls_without_end_and_without_elements():
    assert PerReplicaPulls.from_one(from_arrays(np.arange(3)).batch(2).repeat(), 4).cardinality == INFINITE
    empty = PerReplicaPulls.from_one([], 2)
    assert parts_of(empty) == []
    assert empty.cardinality == 0


@given(st.integers(0, 40), st.integers(1, 7), st.integers(1, 8))
def test_pulls_contain_every_row_once(num_rows, batch_size, num_replicas):
    pulls = PerReplicaPulls.from_one(from_arrays(np.arange(num_rows)).batch(batch_size), num_replicas)
    steps = parts_of(pulls)
    assert len(steps) == pulls.cardinality
    assert all(len(step) == num_replicas for step in steps)
    assert [row for step in steps for part in step for row in part] == list(range(num_rows))


def test_one_dataset_for_each_replica():
    pulls = PerReplicaPulls.from_each([from_arrays(np.arange(n)).batch(2) for n in (2, 5)])
    assert parts_of(pulls) == [[[0, 1], [0, 1]], [[], [2, 3]], [[], [4]]]
    assert pulls.cardinality == 3
    assert pulls.num_replicas == 2


def test_one_dataset_of_a_fixed_shape_for_each_replica():
    pulls = PerReplicaPulls.from_each(
        [from_arrays(np.arange(n)).batch(2, drop_remainder=True) for n in (2, 5)]
    )
    assert parts_of(pulls) == [[[0, 1], [0, 1]]]
    assert pulls.cardinality == 1


def test_an_empty_dataset_among_those_of_the_replicas():
    pulls = PerReplicaPulls.from_each([[], [np.arange(2)]])
    assert pulls.element_spec().shape == (None,)
    assert parts_of(pulls) == [[[], [0, 1]]]
    assert pulls.cardinality == 1
