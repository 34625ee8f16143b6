"""Scheduled functions at the end of a worker's dataset: next with a default, optionals, StopIteration."""

import itertools

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from in_memory_servers import in_memory_strategy
from replicax.coordinator import ClusterCoordinator
from replicax.errors import EmptyOptionalError, NarrowingError, OutOfRangeError, TraceError, UnsupportedError

WAIT_S = 60

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def strategy():
    with in_memory_strategy(workers=1, ps=2) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def coordinator(strategy):
    with ClusterCoordinator(strategy) as coordinator:
        yield coordinator


@pytest.fixture
def iterator_of(coordinator):
    """Makes an iterator over some elements."""
    return lambda elements: iter(coordinator.create_per_worker_dataset(lambda: elements))


@pytest.fixture
def run(coordinator):
    """Schedules a function, and waits for its result."""

    def run(fn, *args):
        value = coordinator.schedule(fn, args)
        coordinator.join(WAIT_S)
        return value.fetch(0)

    return run


def numbers(count, start=1):
    return [np.float32(start + n) for n in range(count)]


@pytest.mark.parametrize("default", [-1, None, "the end", (0, {"x": 1.5})], ids=repr)
def test_next_returns_the_default_at_the_end(run, iterator_of, default):
    iterator = iterator_of(numbers(3))
    assert [run(lambda i: next(i, default), iterator) for _ in range(5)] == [1, 2, 3, default, default]


def test_the_default_may_be_an_argument(run, iterator_of):
    iterator = iterator_of(numbers(1))
    for default, expected in ((10, 1), (20, 20), (30, 30)):
        assert run(lambda i, x: next(i, x), iterator, np.float32(default)) == expected


def test_an_evaluation_ends_with_its_dataset(run, iterator_of):
    """The last batch is smaller, and the last function has fewer of them."""
    rows = np.arange(23, dtype=np.float32)

    def evaluate(iterator):
        total, count = jnp.float32(0), 0
        for _ in range(4):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            batch = optional.get_value()
            total, count = total + jnp.sum(batch), count + batch.shape[0]
        return total, jnp.int32(count)

    for _ in range(2):
        iterator = iterator_of(rx.data.from_arrays(rows).batch(4))
        results = [run(evaluate, iterator) for _ in range(3)]
        assert [(float(total), int(count)) for total, count in results] == [
            (rows[:16].sum(), 16),
            (rows[16:].sum(), 7),
            (0, 0),
        ]


def test_an_optional_without_a_value_has_none_to_give(run, iterator_of):
    iterator = iterator_of(numbers(1))
    run(lambda i: next(i), iterator)
    with pytest.raises(EmptyOptionalError):
        run(lambda i: i.get_next_as_optional().get_value(), iterator)


def test_optionals_are_results_too(run, iterator_of):
    iterator = iterator_of(numbers(1))
    first, second = (run(lambda i: {"next": i.get_next_as_optional()}, iterator)["next"] for _ in range(2))
    assert first.get_value() == 1
    assert not second.has_value()


def test_an_error_at_the_end_only_says_its_line(coordinator, run, iterator_of):
    def unpacked(iterator):
        x, y = next(iterator, 0)
        return x + y

    iterator = iterator_of([(np.float32(1), np.float32(2))])
    assert run(unpacked, iterator) == 3
    with pytest.raises(TypeError) as raised:
        run(unpacked, iterator)
    assert any(__file__ in note for note in raised.value.__notes__)


def test_a_number_that_does_not_fit_is_found_also_if_only_the_end_needs_it(run, iterator_of):
    def step_with(default):
        return lambda i: next(i, default)

    default = np.array([2**32 + 1])
    step = step_with(default)
    iterator = iterator_of([np.ones(1, np.int32)])
    assert run(step, iterator) == 1
    for _ in range(2):
        with pytest.raises(NarrowingError, match=r"default.* has 4294967297"):
            run(step, iterator)
    default[:] = 3
    assert run(step_with(default), iterator) == 3


def test_a_function_may_catch_the_end(run, iterator_of):
    def pair(iterator):
        try:
            return next(iterator), next(iterator)
        except StopIteration:
            return "end"

    iterator = iterator_of(numbers(3))
    assert [run(pair, iterator) for _ in range(3)] == [(1, 2), "end", "end"]

    def get(iterator):
        try:
            return iterator.get_next()
        except OutOfRangeError:
            return "end"

    iterator = iterator_of(numbers(1))
    assert [run(get, iterator) for _ in range(2)] == [1, "end"]


WAYS = {
    "next": lambda i: next(i) + next(i),
    "get_next": lambda i: i.get_next() + i.get_next(),
    "a generator": lambda i: sum(next(i) for _ in range(2)),
    "rx.function": rx.function(lambda i: next(i) + next(i)),
}


@pytest.mark.parametrize("way", WAYS)
def test_uncaught_end_is_out_of_range(coordinator, run, iterator_of, way):
    for _ in range(2):
        iterator = iterator_of(numbers(3))
        assert run(WAYS[way], iterator) == 3
        for _ in range(2):
            value = coordinator.schedule(WAYS[way], (iterator,))
            with pytest.raises(OutOfRangeError, match="it had 3"):
                coordinator.join(WAIT_S)
            with pytest.raises(OutOfRangeError, match=__file__):
                value.fetch(0)
    assert run(WAYS[way], iterator_of(numbers(2))) == 3


def test_a_function_is_traced_once_for_each_end(run, iterator_of):
    traces = []

    def step(iterator):
        traces.append(next(iterator, None) is None)

    def plain(iterator):
        traces.append(None)
        return next(iterator)

    for _ in range(3):
        iterator = iterator_of(numbers(2))
        for _ in range(4):
            run(step, iterator)
    assert traces == [False, True]
    traces.clear()
    for _ in range(3):
        iterator = iterator_of(numbers(1))
        run(plain, iterator)
        with pytest.raises(OutOfRangeError):
            run(plain, iterator)
    assert len(traces) == 2


def test_nothing_is_assigned_by_a_function_that_fails_at_the_end(strategy, run, iterator_of):
    with strategy.scope():
        total = rx.Variable(0.0)

    def add(iterator):
        total.assign_add(next(iterator))
        total.assign_add(next(iterator))

    iterator = iterator_of(numbers(3))
    run(add, iterator)
    with pytest.raises(OutOfRangeError):
        run(add, iterator)
    assert total == 3


def test_iterators_of_several_lengths(run, iterator_of):
    a, b = numbers(2), numbers(4, start=10)
    iterators = iterator_of(a), iterator_of(b)
    got = [run(lambda a, b: (next(a, -1), next(b, -2)), *iterators) for _ in range(5)]
    assert got == [*itertools.zip_longest(a, b, fillvalue=-1), (-1, -2)]


def test_unused_iterator_keeps_its_element_at_the_end_of_another(run, iterator_of):
    def scaled(a, b, c):
        x = next(a, None)
        scale = next(b) if x is not None else 100
        return scale * next(c)

    a, b, c = iterator_of(numbers(1, 0)), iterator_of(numbers(3, 20)), iterator_of(numbers(3, 1))
    assert [run(scaled, a, b, c) for _ in range(2)] == [20, 200]
    assert run(lambda b, c: (next(b), next(c)), b, c) == (21, 3)


@pytest.mark.parametrize("other", ["another iterator", "the worker's index", "the same iterator again"])
def test_element_taken_only_at_the_end_raises(run, iterator_of, other):
    def step(a, b):
        x = next(a, None)
        if x is not None:
            return x
        if other == "another iterator":
            return next(b)
        if other == "the same iterator again":
            return next(a, jnp.float32(0))
        return rx.coordinator.experimental_get_current_worker_index()

    a, b = iterator_of(numbers(1)), iterator_of(numbers(1))
    assert run(step, a, b) == 1
    with pytest.raises(TraceError, match=__file__):
        run(step, a, b)
    assert run(lambda b: next(b), b) == 1


def test_elements_of_several_arrays_and_values_of_the_worker(coordinator, run, iterator_of):
    value = coordinator.create_per_worker_value(lambda: np.float32(7))
    elements = [{"x": np.ones(n, np.float32), "pair": (np.float32(n), np.int32(2 * n))} for n in (1, 2)]
    iterator = iterator_of(elements)

    def step(iterator, value):
        element = next(iterator, None)
        if element is None:
            return {"value": value}
        return {"value": value, "sum": element["x"].sum() + element["pair"][1]}

    assert [run(step, iterator, value) for _ in range(3)] == [
        {"value": 7, "sum": 3},
        {"value": 7, "sum": 6},
        {"value": 7},
    ]


def test_an_element_without_arrays_is_not_a_missing_one(run, iterator_of):
    nothing, some = iterator_of([{}, {}]), iterator_of(numbers(1))
    step = lambda a, b: (next(a, "a"), next(b, "b"))  # noqa: E731
    assert [run(step, nothing, some) for _ in range(3)] == [({}, 1), ({}, "b"), ("a", "b")]


def test_loops_that_stop_at_the_end_as_in_python(run, iterator_of):
    def total(iterator):
        return sum(x for _, x in zip(range(2), iterator)) + jnp.float32(0)

    iterator = iterator_of(numbers(3))
    assert [run(total, iterator) for _ in range(3)] == [3, 3, 0]


def test_optimizers_update_only_where_there_was_an_element(strategy, run, iterator_of):
    with strategy.scope():
        w, optimizer = keras.Variable(10.0), keras.optimizers.SGD(0.5)

    def train(iterator):
        x = next(iterator, None)
        if x is None:
            return False
        with rx.GradientTape() as tape:
            loss = w * x
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        return True

    iterator = iterator_of(numbers(2))
    assert [run(train, iterator) for _ in range(4)] == [True, True, False, False]
    assert float(w.value) == 10 - 0.5 * (1 + 2)
    assert int(optimizer.iterations.value) == 2


def test_gradients_of_a_round_may_not_depend_on_the_end():
    with (
        in_memory_strategy() as strategy,
        ClusterCoordinator(strategy, replicas_to_aggregate=1) as coordinator,
    ):
        with strategy.scope():
            w, optimizer = keras.Variable(10.0), keras.optimizers.SGD(0.5)

        def train(iterator):
            x = next(iterator, None)
            if x is not None:
                optimizer.apply_gradients([(x, w)])

        iterator = iter(coordinator.create_per_worker_dataset(numbers(1)))
        coordinator.schedule(train, (iterator,))
        coordinator.join(WAIT_S)
        coordinator.schedule(train, (iterator,))
        with pytest.raises(UnsupportedError, match="applies gradients only for some elements"):
            coordinator.join(WAIT_S)
        assert float(w.value) == 9.5


@pytest.mark.parametrize("way", ["rows", "elements"])
def test_workers_of_two_devices_count_every_row_once(way):
    rows = np.arange(17, dtype=np.float32)
    with in_memory_strategy(devices_per_worker=2) as strategy, ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            total = rx.Variable(0.0, aggregation="SUM")
        if way == "rows":
            data = strategy.experimental_distribute_dataset(rx.data.from_arrays(rows).batch(4))
        else:
            data = strategy.distribute_datasets_from_function(
                lambda context: rx.data.from_arrays(rows).batch(2)
            )

        def evaluate(iterator):
            count = jnp.int32(0)
            for _ in range(2):
                optional = iterator.get_next_as_optional()
                if optional.has_value():
                    counts = strategy.run(replica_fn, args=(optional.get_value(),))
                    count += strategy.reduce("SUM", counts, axis=None)
            return count

        def replica_fn(x):
            total.assign_add(jnp.sum(x))
            return jnp.int32(x.shape[0])

        iterator = iter(coordinator.create_per_worker_dataset(data))
        counts = [coordinator.schedule(evaluate, (iterator,)) for _ in range(4)]
        coordinator.join(WAIT_S)
        assert coordinator.fetch(counts) == [8, 8, 1, 0]
        assert total == rows.sum()


def test_no_elements_outside_scheduled_functions(iterator_of):
    iterator = iterator_of(numbers(1))
    for call in (iterator.get_next, iterator.get_next_as_optional, lambda: next(iterator, None)):
        with pytest.raises(UnsupportedError, match="Iterating over an `AsyncDistributedIterator`"):
            call()
