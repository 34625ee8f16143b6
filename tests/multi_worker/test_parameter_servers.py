"""``ParameterServerStrategy`` and ``ClusterCoordinator`` from the user's view, with real workers and parameter
servers."""

import os
import threading
import time

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax import errors
from replicax.coordinator import ClusterCoordinator, experimental_get_current_worker_index
from replicax.experimental.partitioners import FixedShardsPartitioner
from replicax.testing import server_cluster

JOIN_S = 60.0

pytestmark = pytest.mark.timeout(250)


@pytest.fixture(scope="module")
def cluster():
    with server_cluster(workers=2, ps=2) as cluster:
        yield cluster


@pytest.fixture
def strategy(cluster):
    with rx.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2)) as strategy:
        yield strategy


@pytest.fixture
def coordinator(strategy):
    with ClusterCoordinator(strategy) as coordinator:
        yield coordinator


def taken(coordinator, dataset, num=6):
    """The elements that functions of both workers take from a per-worker dataset."""
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    values = [coordinator.schedule(lambda iterator: next(iterator), (iterator,)) for _ in range(num)]
    coordinator.join(JOIN_S)
    return [np.asarray(value).tolist() for value in coordinator.fetch(values)]


# --- data ----------------------------------------------------------------------------------------------

TWOS = np.full(400, 2, np.int32)


@pytest.mark.rest
def test_per_worker_dataset_in_every_form(strategy, coordinator):
    twos = TWOS
    dataset = rx.data.from_arrays(twos).batch(2)
    ways = {
        "dataset": dataset,
        "function": lambda: rx.data.from_arrays(twos).batch(2),
        "function of a context": lambda context: rx.data.from_arrays(twos).batch(2),
        "generator function": lambda: (np.full(2, 2, np.int32) for _ in range(100)),
        "distributed": strategy.experimental_distribute_dataset(dataset),
        "distributed from a function": strategy.distribute_datasets_from_function(lambda context: dataset),
        "function that distributes": lambda: strategy.experimental_distribute_dataset(dataset),
        "function that distributes from one": lambda: strategy.distribute_datasets_from_function(
            lambda context: rx.data.from_arrays(twos).batch(2 * strategy.num_replicas_in_sync)
        ),
    }
    for way, given in ways.items():
        assert taken(coordinator, given) == [[2, 2]] * 6, way


def test_dataset_functions_know_the_calling_worker(strategy, coordinator):
    def dataset_fn(context):
        assert context.input_pipeline_id == experimental_get_current_worker_index()
        numbers = [context.input_pipeline_id, context.num_input_pipelines, context.num_replicas_in_sync]
        return [np.int32(numbers)] * 100

    for given in (
        dataset_fn,
        strategy.distribute_datasets_from_function(dataset_fn),
        lambda: strategy.distribute_datasets_from_function(dataset_fn),
    ):
        assert {tuple(numbers) for numbers in taken(coordinator, given, 20)} <= {(0, 2, 1), (1, 2, 1)}


def test_variables_are_not_made_in_dataset_functions(strategy, coordinator):
    def dataset_fn(context):
        rx.Variable(1.0)
        return [np.int32(1)]

    for given in (dataset_fn, strategy.distribute_datasets_from_function(dataset_fn)):
        with pytest.raises(
            errors.ClosureInputError, match="Creating variables in `dataset_fn` is not allowed"
        ):
            taken(coordinator, given, 1)


# --- scheduled functions -------------------------------------------------------------------------------


def test_run_and_reduce_in_a_scheduled_function(strategy, coordinator):
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
        mean = keras.metrics.Mean()
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.float32([1, 2, 3])] * 1000))

    @rx.function
    def step(iterator):
        def replica_fn(x):
            total.assign_add(rx.get_replica_context().replica_id_in_sync_group + 1.0)
            mean.update_state(x)
            return x * 2

        per_replica = strategy.run(replica_fn, args=(next(iterator),))
        return strategy.reduce("sum", per_replica, axis=None), strategy.reduce("mean", per_replica, axis=0)

    for _ in range(2):
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(5)]
        coordinator.join(JOIN_S)
        for summed, averaged in coordinator.fetch(values):
            np.testing.assert_array_equal(summed, [2, 4, 6])
            assert averaged == 4
    assert total.numpy() == 10
    assert mean.result() == 2
    coordinator.join(JOIN_S)  # there is nothing to wait for
    assert coordinator.done()


def test_results_are_pytrees_and_outlive_the_strategy(strategy):
    with ClusterCoordinator(strategy) as coordinator:
        value = coordinator.schedule(lambda x: {"a": (x + 1, None), "name": "b"}, args=(np.float32(1),))
        value.fetch(JOIN_S)
    strategy.close()
    fetched = value.fetch()
    assert fetched == {"a": (2, None), "name": "b"}
    assert isinstance(fetched["a"][0], np.ndarray)
    assert value.get()["a"][0] + jnp.float32(1) == 3


def test_an_error_while_tracing_is_raised_by_schedule_and_nothing_else_ends(coordinator):
    def wrong(x):
        return x @ jnp.ones((7, 7))

    with pytest.raises(TypeError, match="dot_general"):
        coordinator.schedule(wrong, args=(np.ones((2, 3), np.float32),))
    assert coordinator.schedule(lambda: 1).fetch(JOIN_S) == 1
    coordinator.join(JOIN_S)


def test_closed_strategy_raises(cluster):
    strategy = rx.ParameterServerStrategy()
    with strategy.scope():
        variable = rx.Variable(1.0)
    assert variable.numpy() == 1
    strategy.close()
    strategy.close()
    with pytest.raises((errors.UnavailableError, errors.StaleCoordinatorError)):
        variable.numpy()
    with rx.ParameterServerStrategy() as another:
        with another.scope():
            assert rx.Variable(2.0).numpy() == 2


def test_lookups_of_a_sharded_variable(strategy, coordinator):
    with strategy.scope():
        table = rx.Variable(np.arange(1, 11, dtype=np.float32).reshape(5, 2))
    found = coordinator.schedule(
        lambda ids: (
            rx.nn.embedding_lookup(table, ids),
            rx.nn.embedding_lookup_sparse(table, [[0, 3], [4], [1]], combiner="mean"),
        ),
        args=(np.int32([0, 3, 4]),),
    ).fetch(JOIN_S)
    np.testing.assert_array_equal(found[0], [[1, 2], [7, 8], [9, 10]])
    np.testing.assert_array_equal(found[1], [[4, 5], [9, 10], [3, 4]])


# --- training ------------------------------------------------------------------------------------------


@pytest.mark.rest
def test_one_worker_at_a_time_trains_as_one_device(strategy, coordinator):
    x = np.random.RandomState(0).randn(32, 4).astype(np.float32)
    y = x.sum(1, keepdims=True)

    def trained(strategy, run):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
            )
            optimizer = keras.optimizers.Adam(0.05)

        def replica_fn(x, y):
            with rx.GradientTape() as tape:
                loss = jnp.mean((model(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        losses = [float(run(lambda x, y: strategy.run(replica_fn, args=(x, y)))) for _ in range(5)]
        return [losses, *(np.asarray(variable.value) for variable in model.variables)]

    expected = trained(rx.OneDeviceStrategy("cpu:0"), lambda fn: fn(x, y))
    found = trained(strategy, lambda fn: coordinator.schedule(fn, args=(x, y)).fetch(JOIN_S))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_table_that_is_too_large_for_the_coordinator_and_the_workers(
    cluster, strategy, coordinator, tmp_path, most_bytes
):
    """1 GiB of embeddings, and 1 GiB of their accumulators: neither this process nor a worker holds a copy.

    They are created, trained, looked up, saved and loaded.
    """
    num_rows = 8_000_000
    before = dict(most_bytes)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((16,), dtype="int32"),
                keras.layers.Embedding(num_rows, 32),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adagrad(0.1)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        def replica_fn(x, y):
            with rx.GradientTape() as tape:
                loss = jnp.mean((model(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        return strategy.run(replica_fn, args=(x, y))

    random = np.random.RandomState(0)
    x = random.randint(0, num_rows, (64, 16)).astype(np.int32)
    y = random.randn(64, 1).astype(np.float32)
    losses = [coordinator.schedule(step, args=(x, y)) for _ in range(20)]
    coordinator.join(300)
    losses = coordinator.fetch(losses)
    assert losses[-1] < losses[0]
    table = model.layers[0].embeddings
    rows = np.asarray(rx.nn.embedding_lookup(table, x))
    rx.experimental.save_table(table, tmp_path / "table.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "table.npy", mmap_mode="r")[x], rows)
    for _ in range(2):
        coordinator.schedule(step, args=(x, y))
    coordinator.join(300)
    assert np.any(np.asarray(rx.nn.embedding_lookup(table, x)) != rows)
    rx.experimental.load_table(table, tmp_path / "table.npy")
    np.testing.assert_array_equal(rx.nn.embedding_lookup(table, x), rows)
    assert len(before) == 3
    for pid in before:
        assert most_bytes[pid] - before[pid] < 400e6
    until = time.monotonic() + 60
    while min(bytes_of_servers(coordinator)) <= 0.9 * num_rows * 32 * 4:  # half of both
        assert time.monotonic() < until, bytes_of_servers(coordinator)
        time.sleep(0.1)


def bytes_of_servers(coordinator):
    """Servers say once a second how they are."""
    return [ps["statistics"].get("bytes", 0) for ps in coordinator.statistics()["ps"].values()]


@pytest.fixture
def most_bytes(cluster):
    """The peak memory of this process and the workers, by pid, which a thread samples."""
    pids = [os.getpid(), *(cluster.tasks["worker", index].pid for index in range(2))]
    most = {pid: _private_bytes(pid) for pid in pids}
    over = threading.Event()

    def watch():
        while not over.wait(0.01):
            for pid in pids:
                most[pid] = max(most[pid], _private_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield most
    over.set()
    watcher.join()


def _private_bytes(pid):
    """Memory of a process, without mapped files."""
    with open(f"/proc/{pid}/status") as file:
        (line,) = (line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def test_two_coordinators_of_one_strategy_are_one(strategy, coordinator):
    assert ClusterCoordinator(strategy) is coordinator
    message(
        errors.InvalidArgumentError,
        lambda: ClusterCoordinator(rx.MirroredStrategy(["cpu:0"])),
        "got MirroredStrategy",
    )
