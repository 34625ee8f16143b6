import threading
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest

from replicax._src.devices.split import split_sizes
from replicax._src.input.dataset import DistributedDataset, EmptyOptionalError, OutOfRangeError
from replicax._src.input.element_specs import PerReplicaSpec
from replicax._src.input.elements import EmptyDatasetError, OneShotSourceError
from replicax._src.input.pipeline import from_arrays
from replicax._src.input.sources import PerReplicaPulls, open_source
from replicax._src.scope import context
from replicax._src.vocabulary import errors


class Lists:
    """Places rows as lists: the slices of each replica."""

    topology = SimpleNamespace(peers=None)

    def place(self, step):
        def slices(array):
            ends = np.cumsum(step.sizes)
            return [array[end - size : end].tolist() for size, end in zip(step.sizes, ends, strict=True)]

        return jax.tree.map(slices, step.tree.unflatten(step.arrays))

    def stack(self, steps, capacity):
        return [self.place(step) for step in steps], capacity

    def signature(self, step):
        return step.sizes


class PartLists(Lists):
    def place(self, step):
        return [part.tolist() for part in step]


def distribute(dataset, num_replicas=2, **options):
    """A distributed dataset whose elements are lists."""
    return DistributedDataset(open_source(dataset, num_replicas=num_replicas), Lists(), **options)


def test_batches_are_split_in_order():
    distributed = distribute(grain.MapDataset.range(100).batch(10))
    steps = list(distributed)
    assert len(steps) == len(distributed) == 10
    assert steps[3] == [[30, 31, 32, 33, 34], [35, 36, 37, 38, 39]]


@pytest.mark.parametrize("num_replicas", range(1, 9))
def test_every_row_appears_once(num_replicas):
    steps = list(distribute(grain.MapDataset.range(21).batch(9), num_replicas))
    assert [[len(part) for part in step] for step in steps] == [
        list(split_sizes(num_rows, num_replicas)) for num_rows in (9, 9, 3)
    ]
    assert [row for step in steps for part in step for row in part] == list(range(21))


def test_one_rule_for_every_source():
    rows = np.arange(10)
    for dataset in (
        grain.MapDataset.range(10).batch(4),
        from_arrays(rows).batch(4),
        [rows[:4], rows[4:8], rows[8:]],
        (rows[start : start + 4] for start in (0, 4, 8)),
    ):
        assert list(distribute(dataset))[-1] == [[8], [9]]


def test_dataset_restarts():
    distributed = distribute(from_arrays(np.arange(8)).shuffle(seed=1).batch(4))
    first, second = list(distributed), list(distributed)
    assert first != second
    assert list(distribute(from_arrays(np.arange(3)).batch(3))) == [[[0, 1], [2]]]


def test_generators_are_iterated_once():
    distributed = distribute(iter([np.arange(2)]))
    assert distributed.element_spec == PerReplicaSpec((None,), np.int32, 2)
    assert list(distributed) == [[[0], [1]]]
    with pytest.raises(OneShotSourceError):
        iter(distributed)


def test_element_spec():
    rows = grain.MapDataset.range(8)
    assert distribute(rows.batch(4)).element_spec == PerReplicaSpec((None,), np.int32, 2)
    static = distribute(rows.batch(4, drop_remainder=True))
    assert static.element_spec == iter(static).element_spec == PerReplicaSpec((2,), np.int32, 2)
    with pytest.raises(EmptyDatasetError):
        distribute([]).element_spec


def test_lengths():
    assert len(distribute([np.arange(2)] * 3)) == 3
    unknown = distribute(iter([]))
    assert unknown
    assert unknown.cardinality is None
    with pytest.raises(TypeError, match="is unknown"):
        len(unknown)
    with pytest.raises(TypeError, match="is infinite"):
        len(distribute(grain.MapDataset.range(3).batch(2).repeat()))


def test_reduce():
    distributed = distribute(from_arrays(np.arange(10)).batch(4))
    total = distributed.reduce(0, lambda state, parts: state + sum(map(sum, parts)))
    assert total == 45
    assert distribute([]).reduce("nothing", None) == "nothing"


def test_iterator():
    iterator = iter(distribute(from_arrays(np.arange(3)).batch(2)))
    assert next(iterator) == [[0], [1]]
    assert iterator.get_next() == [[2], []]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(OutOfRangeError, match="get_next_as_optional"):
            iterator.get_next()
    iterator.initialize()
    assert next(iterator) == [[0], [1]]


def test_optionals():
    iterator = iter(distribute(from_arrays(np.arange(3)).batch(2)))
    first, second, third = (iterator.get_next_as_optional() for _ in range(3))
    assert [optional.has_value() for optional in (first, second, third)] == [True, True, False]
    assert second.get_value() == [[2], []]
    assert "[[2], []]" in repr(second)
    with pytest.raises(EmptyOptionalError):
        third.get_value()
    with pytest.raises(StopIteration):
        next(iterator)


def test_iterators_are_independent():
    distributed = distribute(from_arrays(np.arange(4)).batch(2))
    one, other = iter(distributed), iter(distributed)
    assert next(one) == next(other) == [[0], [1]]


def test_pulled_parts():
    pulls = PerReplicaPulls.from_one(grain.MapDataset.range(9).batch(2), 2)
    distributed = DistributedDataset(pulls, PartLists())
    assert list(distributed) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]
    assert distributed.num_replicas == 2


def test_iteration_can_be_forbidden_to_a_thread():
    distributed = distribute(from_arrays(np.arange(8)).batch(2))
    iterator = iter(distributed)

    with context.no_iteration("not here"):
        for call in (
            lambda: iter(distributed),
            lambda: next(iterator),
            iterator.get_next,
            iterator.get_next_as_optional,
            iterator.initialize,
        ):
            with pytest.raises(errors.InvalidArgumentError, match="not here"):
                call()
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.extend(distributed))
        thread.start()
        thread.join(60)
        assert len(elsewhere) == 4
    assert next(iterator) == [[0], [1]]
