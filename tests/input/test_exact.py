"""Every row reaches exactly one replica, for any number of rows, batch size and number of replicas."""

import functools
import gc

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from checks import examples
from replicax._src.devices.split import split_sizes

NUM_ROWS = st.integers(0, 40)
BATCH_SIZE = st.integers(1, 12)
NUM_REPLICAS = st.integers(1, 8)


@functools.cache
def strategy_of(num_replicas):
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


def batches(rows, batch_size):
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


SOURCES = {
    "arrays": lambda rows, size: rx.data.from_arrays(rows).batch(size),
    "grain": lambda rows, size: grain.MapDataset.source(list(rows)).batch(size),
    "list": batches,
    "generator": lambda rows, size: (batch for batch in batches(rows, size)),
}


@pytest.mark.parametrize("source", SOURCES)
@examples(60, short=30)
@given(NUM_ROWS, BATCH_SIZE, NUM_REPLICAS)
def test_every_row_reaches_one_replica(source, num_rows, batch_size, num_replicas):
    strategy = strategy_of(num_replicas)
    rows = np.arange(num_rows, dtype=np.int32)
    dataset = strategy.experimental_distribute_dataset(SOURCES[source](rows, batch_size))
    expected = batches(rows, batch_size)
    steps = [strategy.experimental_local_results(element) for element in dataset]
    assert len(steps) == len(expected)
    for parts, batch in zip(steps, expected, strict=True):
        assert tuple(len(part) for part in parts) == split_sizes(len(batch), num_replicas)
        np.testing.assert_array_equal(np.concatenate([np.asarray(part) for part in parts]), batch)


@pytest.mark.rest
@examples(25, short=9)
@given(NUM_ROWS, BATCH_SIZE, NUM_REPLICAS)
def test_an_epoch_is_as_on_one_device(num_rows, batch_size, num_replicas):
    strategy = strategy_of(num_replicas)
    rows = np.random.default_rng(num_rows).normal(size=(num_rows, 2)).astype(np.float32)
    with strategy.scope():
        weights = rx.Variable(np.array([0.5, -0.25], np.float32))
        total = rx.Variable(0.0, trainable=False, synchronization="ON_READ", aggregation="SUM")
        count = rx.Variable(0.0, trainable=False, synchronization="ON_READ", aggregation="SUM")

    def step(x):
        total.assign_add(jnp.sum(x))
        count.assign_add(jnp.float32(x.shape[0]))
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((x @ weights - 1) ** 2)
        gradient = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        weights.assign_sub(0.1 * gradient)
        return x, loss

    expected = np.array([0.5, -0.25])
    data = rx.data.from_arrays(rows).batch(batch_size)
    for batch, element in zip(
        batches(rows.astype(np.float64), batch_size),
        strategy.experimental_distribute_dataset(data),
        strict=True,
    ):
        x, loss = strategy.run(step, args=(element,))
        residual = batch @ expected - 1
        np.testing.assert_allclose(
            strategy.reduce("SUM", loss, axis=None), np.mean(residual**2), rtol=2e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            strategy.reduce("MEAN", x, axis=0), batch.mean(axis=0), rtol=2e-5, atol=1e-6
        )
        expected = expected - 0.1 * 2 * residual @ batch / len(batch)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=2e-5, atol=1e-6)
    assert float(count.read_value()) == num_rows
    np.testing.assert_allclose(float(total.read_value()), rows.sum(dtype=np.float64), rtol=2e-5, atol=1e-5)


def test_batch_sizes_that_change_in_mid_stream():
    strategy = strategy_of(3)
    sizes = [5, 2, 7, 1, 0, 6, 5]
    rows = np.arange(sum(sizes))
    ends = np.cumsum(sizes)
    stream = [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    steps = [strategy.experimental_local_results(x) for x in strategy.experimental_distribute_dataset(stream)]
    assert [[len(part) for part in parts] for parts in steps] == [
        list(split_sizes(size, 3)) for size in sizes
    ]
    assert np.concatenate([np.asarray(part) for parts in steps for part in parts]).tolist() == rows.tolist()


def test_differing_sizes_compile_one_program_each():
    strategy = strategy_of(2)
    stream = [np.arange(float(size)) for size in (5, 4, 5, 3, 4, 5, 3)]
    dataset = strategy.experimental_distribute_dataset(stream)
    gc.collect()
    before = strategy.runner.num_programs
    for _ in range(3):
        sums = [strategy.reduce("SUM", strategy.run(jnp.sum, args=(x,)), axis=None) for x in dataset]
        assert [float(s) for s in sums] == [float(batch.sum()) for batch in stream]
    assert strategy.runner.num_programs - before == 3


def test_an_infinite_dataset():
    strategy = strategy_of(2)
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(3)).batch(2).repeat())
    seen = []
    for step, element in enumerate(dataset):
        seen.append([np.asarray(part).tolist() for part in strategy.experimental_local_results(element)])
        if step == 3:
            break
    assert seen == [[[0], [1]], [[2], []], [[0], [1]], [[2], []]]
    assert iter(dataset).get_next_as_optional().has_value()


@pytest.mark.parametrize("source", SOURCES)
def test_an_empty_dataset(source):
    strategy = strategy_of(2)
    dataset = strategy.experimental_distribute_dataset(SOURCES[source](np.arange(0), 3))
    assert list(dataset) == []
    if source != "generator":
        assert dataset.reduce(7, lambda state, element: state + 1) == 7
        assert not iter(dataset).get_next_as_optional().has_value()


def test_enumerate_and_iterate_again():
    strategy = strategy_of(2)
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(5)).batch(2))
    for _ in range(3):
        numbered = [(i, float(strategy.reduce("SUM", x, axis=0))) for i, x in enumerate(dataset, start=1)]
        assert numbered == [(1, 1.0), (2, 5.0), (3, 4.0)]
    first, second = iter(dataset), iter(dataset)
    next(first)
    assert strategy.reduce("SUM", next(second), axis=0) == 1
    assert strategy.reduce("SUM", next(first), axis=0) == 5


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("buffer_size", [1, 3])
def test_options_change_timing_but_not_values(fetch, buffer_size):
    strategy = strategy_of(3)
    options = rx.InputOptions(
        experimental_fetch_to_device=fetch, experimental_per_replica_buffer_size=buffer_size
    )
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(10)).batch(4), options)
    rows = [np.asarray(p).tolist() for x in dataset for p in strategy.experimental_local_results(x)]
    assert rows == [[0, 1], [2], [3], [4, 5], [6], [7], [8], [9], []]
    made = strategy.distribute_datasets_from_function(
        lambda context: rx.data.from_arrays(np.arange(5)).batch(2), options
    )
    assert [np.asarray(p).tolist() for x in made for p in strategy.experimental_local_results(x)] == [
        [0, 1],
        [2, 3],
        [4],
    ]
