import dataclasses
import subprocess
import sys
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from replicax._src.input.arrays import UnsupportedElementError
from replicax._src.input.element_specs import INFINITE, ArraySpec
from replicax._src.input.elements import (
    DatasetLengthError,
    EmptyDatasetError,
    OneShotSourceError,
    element_spec,
)
from replicax._src.input.opening import UnsupportedSourceError, open_elements
from replicax._src.input.pipeline import from_arrays


def lists(elements):
    return [element.tolist() for element in elements.iterate()]


class Batches:
    """A user's dataset of batches of 2 rows, which can be iterated any number of times."""

    def __init__(self, num_batches):
        self._num_batches = num_batches

    def __iter__(self):
        return (np.arange(2) + 2 * index for index in range(self._num_batches))


class SizedBatches(Batches):
    def __init__(self, num_batches, length):
        super().__init__(num_batches)
        self._length = length

    def __len__(self):
        if self._length is None:
            raise TypeError("not known")
        return self._length


def test_array_dataset():
    elements = open_elements(from_arrays(np.arange(5)).batch(2))
    assert lists(elements) == lists(elements) == [[0, 1], [2, 3], [4]]
    assert elements.cardinality == 3
    assert element_spec(elements) == ArraySpec((None,), np.int64)


def test_inspecting_an_array_dataset_consumes_no_shuffle():
    dataset, same = (from_arrays(np.arange(50)).shuffle(seed=1).batch(50) for _ in range(2))
    elements = open_elements(dataset)
    element_spec(elements)
    elements.first()
    assert lists(elements) == lists(open_elements(same))


def test_grain_map_dataset():
    elements = open_elements(grain.MapDataset.range(5).batch(2))
    assert lists(elements) == lists(elements) == [[0, 1], [2, 3], [4]]
    assert elements.cardinality == 3
    assert open_elements(grain.MapDataset.range(5).batch(2).repeat()).cardinality == INFINITE


def test_grain_iter_dataset():
    elements = open_elements(grain.MapDataset.range(5).to_iter_dataset().batch(2))
    assert lists(elements) == lists(elements) == [[0, 1], [2, 3], [4]]
    assert elements.cardinality is None


def test_grain_declares_shapes():
    rows = grain.MapDataset.range(5)
    for dataset in (rows, rows.to_iter_dataset()):
        assert element_spec(open_elements(dataset)) == ArraySpec((), np.int64)
        assert element_spec(open_elements(dataset.batch(2))) == ArraySpec((None,), np.int64)
        assert element_spec(open_elements(dataset.batch(2, drop_remainder=True))) == ArraySpec((2,), np.int64)


def test_grain_maps_without_a_spec_are_inspected():
    dataset = grain.MapDataset.range(5).map(lambda x: x / 2).batch(2)
    assert element_spec(open_elements(dataset)) == ArraySpec((None,), np.float64)


def test_grain_filters_make_the_length_wrong_and_raise():
    dataset = grain.MapDataset.range(6).batch(2).filter(lambda batch: batch[0] != 2)
    with pytest.raises(DatasetLengthError, match="to_iter_dataset"):
        lists(open_elements(dataset))
    assert lists(open_elements(dataset.to_iter_dataset())) == [[0, 1], [4, 5]]


def test_lists_and_objects():
    elements = open_elements([np.array([1, 2]), jnp.array([3])])
    assert lists(elements) == lists(elements) == [[1, 2], [3]]
    assert elements.cardinality == 2
    elements = open_elements(Batches(2))
    assert lists(elements) == lists(elements) == [[0, 1], [2, 3]]
    assert elements.cardinality is None


def test_lengths_of_objects():
    assert open_elements(SizedBatches(3, 3)).cardinality == 3
    assert lists(open_elements(SizedBatches(1, 1))) == [[0, 1]]
    assert open_elements(SizedBatches(3, None)).cardinality is None


@pytest.mark.parametrize("length", [2, 4])
def test_a_wrong_length_is_an_error(length):
    with pytest.raises(DatasetLengthError, match=f"says {length} elements"):
        lists(open_elements(SizedBatches(3, length)))


def test_jax_arrays_stay_where_they_are():
    array = jnp.arange(3)
    assert next(open_elements([array]).iterate()) is array


def test_generators_are_iterated_once():
    elements = open_elements(iter(Batches(2)))
    assert elements.cardinality is None
    assert lists(elements) == [[0, 1], [2, 3]]
    with pytest.raises(OneShotSourceError, match="cannot start again"):
        elements.iterate()
    with pytest.raises(OneShotSourceError, match="first element is gone"):
        elements.first()


def test_inspecting_a_generator_loses_nothing():
    elements = open_elements(iter(Batches(2)))
    assert element_spec(elements) == element_spec(elements) == ArraySpec((None,), np.int64)
    assert lists(elements) == [[0, 1], [2, 3]]


def test_no_element_to_inspect():
    for dataset in ([], iter([]), Batches(0)):
        with pytest.raises(EmptyDatasetError):
            element_spec(open_elements(dataset))


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (np.arange(3), r"Arrays need a batch size; use rx.data.from_arrays\(x\).batch\(n\)"),
        (jnp.arange(3), "Arrays need a batch size"),
        ((np.arange(3), np.arange(3)), "Arrays need a batch size"),
        ({"x": np.arange(3)}, "Arrays need a batch size"),
        ("data.csv", "'data.csv'"),
        (b"data", "bytes"),
        (3, "int"),
        (None, "NoneType"),
        ({1, 2}, "set"),
        (lambda: iter([]), "Call it and pass its result"),
        (object(), "grain datasets"),
    ],
)
def test_invalid_datasets(dataset, text):
    with pytest.raises(UnsupportedSourceError, match=text):
        open_elements(dataset)


@pytest.mark.parametrize(
    "element", ["text", scipy.sparse.eye(3).tocsr(), object(), np.array([[1], [1, 2]], dtype=object)]
)
def test_invalid_elements(element):
    with pytest.raises(UnsupportedElementError):
        next(open_elements([element]).iterate())


def test_grain_is_not_imported_for_the_user():
    code = (
        "import sys; from replicax._src.input.opening import open_elements; open_elements([1]); "
        "assert 'grain' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@dataclasses.dataclass
class Example:
    features: object
    label: object


def test_dataclasses_are_pytrees():
    (element,) = open_elements([Example(np.ones((2, 3)), {"y": [np.arange(2)]})]).iterate()
    assert isinstance(element, Example)
    assert [leaf.shape for leaf in jax.tree.leaves(element)] == [(2, 3), (2,)]
    (again,) = open_elements([Example(np.ones(1), np.ones(1))]).iterate()
    assert len(jax.tree.leaves(again)) == 2


class Pair(NamedTuple):
    left: object
    right: object


def test_named_tuples_dicts_and_none_are_pytrees():
    (element,) = open_elements([Pair({"x": np.ones((2, 3))}, (np.arange(2), None))]).iterate()
    assert isinstance(element, Pair)
    assert element.left["x"].shape == (2, 3)
    assert element.right[0].tolist() == [0, 1]
    assert element.right[1] is None
