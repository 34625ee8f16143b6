"""``ParameterServerStrategy`` from the user's view, with parameter servers of this process."""

import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax import errors
from replicax._ps.store.store import Store
from replicax.cluster_resolver import ClusterSpec, SimpleClusterResolver
from replicax.experimental.partitioners import FixedShardsPartitioner
from servers import servers

TABLE = np.arange(1, 11, dtype=np.float32).reshape(5, 2)


@pytest.fixture
def strategy():
    return servers(2)


def made(strategy, *values, **options):
    """Variables of a strategy that are already on its servers, in this order."""
    with strategy.scope():
        variables = [rx.Variable(value, **options) for value in values]
    for variable in variables:
        variable.numpy()
    return variables


def where(variable):
    """The servers of the pieces of a variable."""
    (whole,) = variable.shards.held if isinstance(variable, rx.experimental.ShardedVariable) else [variable]
    return [piece.ps for piece in whole._value.shards]


# --- the cluster ---------------------------------------------------------------------------------------


def of_cluster(task_type="chief", is_coordinator=None, **jobs):
    spec = {job: [f"localhost:{n}" for n in range(count)] for job, count in jobs.items()}
    resolver = SimpleClusterResolver(ClusterSpec(spec), task_type=task_type, task_id=0)
    return lambda: rx.ParameterServerStrategy(resolver, is_coordinator=is_coordinator)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (of_cluster(chief=1, worker=1), ("There must be at least one ps.", "replicax launch")),
        (of_cluster(chief=1, ps=1), ("There must be at least one worker.", "The cluster has chief, ps")),
        (of_cluster(chief=2, worker=1, ps=1), ("at most one 'chief' job. Got 2",)),
        (of_cluster(chief=1, worker=1, ps=1, reader=1), ("Disallowed task type found in", "reader")),
        (of_cluster("worker", True, chief=1, worker=1, ps=1), ("is worker 0", "replicax server")),
        (of_cluster("ps", chief=1, worker=1, ps=1), ("is ps 0", "replicax server")),
    ],
    ids=["no ps", "no worker", "two chiefs", "unknown job", "in a worker", "in a ps"],
)
def test_invalid_clusters(make, says):
    text = message(errors.TaskError, make, *says)
    assert isinstance(errors.TaskError(text), ValueError)


def test_servers_that_do_not_answer_are_named(monkeypatch):
    monkeypatch.setenv("REPLICAX_START_TIMEOUT_S", "0.5")
    make = of_cluster(chief=1, worker=1, ps=1)
    message(errors.UnavailableError, make, "waited 0.5 s for ps 0 (localhost:0)", "REPLICAX_START_TIMEOUT_S")


# --- where variables are -------------------------------------------------------------------------------


def test_variables_go_to_servers_in_turn_on_any_device():
    strategy = servers(3)
    assert [where(v) for v in made(strategy, 0.0, 0.0, 0.0, 0.0)] == [[0], [1], [2], [0]]
    strategy = servers(3)
    with jax.default_device(jax.devices()[1]):
        assert [where(v) for v in made(strategy, 0.0, 0.0, 0.0, 0.0)] == [[0], [1], [2], [0]]


def test_a_variable_goes_where_the_fewest_bytes_are():
    strategy = servers(3)
    big = made(strategy, np.zeros(1000, np.float32), 0.0, 0.0, 0.0, 0.0)
    assert [where(v) for v in big] == [[0], [1], [2], [1], [2]]


def test_shards_go_to_servers_in_turn():
    strategy = servers(2, FixedShardsPartitioner(3))
    table, scalar = made(strategy, TABLE, 1.0)
    assert where(table) == [0, 1, 0]  # of 2, 2 and 1 rows
    assert where(scalar) == [1]
    assert [shard.shape for shard in table.variables] == [(2, 2), (2, 2), (1, 2)]
    assert [shard.name for shard in table.variables] == [f"{table.name}/part_{n}" for n in range(3)]


@pytest.mark.parametrize("result", [[2, 2], [0, 1], "2", None, (2,), [2, 1, 1], [2.0, 1]])
def test_partitioner_with_invalid_results(result):
    strategy = servers(2, lambda shape, dtype: result)
    message(
        errors.InvalidArgumentError,
        lambda: made(strategy, TABLE),
        "variable_partitioner must return a list/tuple whose elements are 1 besides the first element (non-zero), got: "
        f"{result!r}",
        "(5, 2)",
    )


def test_a_partitioner_is_a_function():
    message(errors.InvalidArgumentError, lambda: servers(1, 3), "got 3", "MinSizePartitioner()")


def test_at_most_one_shard_per_row_and_one_shard_means_none():
    (table,) = made(servers(2, lambda shape, dtype: [9, 1]), TABLE)
    assert len(table.variables) == 5
    (table,) = made(servers(2, lambda shape, dtype: [1, 1]), TABLE)
    assert isinstance(table, rx.Variable)


def test_a_variable_in_shards_acts_as_one():
    strategy = servers(2, FixedShardsPartitioner(3))
    for value in (TABLE, lambda: TABLE, TABLE.tolist()):
        (v,) = made(strategy, value)
        assert isinstance(v, rx.experimental.ShardedVariable)
        np.testing.assert_array_equal(v.numpy(), TABLE)
    np.testing.assert_array_equal(v + 1, TABLE + 1)
    np.testing.assert_array_equal(v @ np.ones((2, 1), np.float32), TABLE.sum(1, keepdims=True))
    np.testing.assert_array_equal(v[::-2], TABLE[::-2])
    v.assign(v * 2)
    v.assign_add(np.ones_like(TABLE))
    v.scatter_sub(rx.IndexedSlices(np.ones((2, 2), np.float32), np.array([4, 0]), (5, 2)))
    expected = TABLE * 2 + 1
    expected[[0, 4]] -= 1
    np.testing.assert_array_equal(v.numpy(), expected)


def test_lookups_return_rows_in_order_and_send_only_rows():
    stores = [Store(), Store()]
    strategy = servers(2, FixedShardsPartitioner(3), stores)
    with strategy.scope():
        v = rx.Variable(TABLE)  # the lookup is the first that needs it
    np.testing.assert_array_equal(
        strategy.run_here(lambda: rx.nn.embedding_lookup(v, [0, 3, 4])), [[1, 2], [7, 8], [9, 10]]
    )
    assert [store.statistics()["rows_sent"] for store in stores] == [2, 1]
    np.testing.assert_array_equal(
        strategy.run_here(
            lambda: rx.nn.embedding_lookup_sparse(v, [[0, 3], [4], [1]], combiner="mean"),
        ),
        [[4, 5], [9, 10], [3, 4]],
    )
    np.testing.assert_array_equal(rx.nn.embedding_lookup(v, [4, 0]), [[9, 10], [1, 2]])


# --- scopes --------------------------------------------------------------------------------------------


def test_scopes_pytree_in_themselves_but_not_in_others(strategy):
    mirrored = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope(), strategy.scope():
        assert rx.get_strategy() is strategy
        assert rx.in_cross_replica_context()
        nested = rx.Variable(3.0)
        message(errors.MixedStrategiesError, lambda: mirrored.scope().__enter__(), "Mixing different")
    assert where(nested) == []
    assert nested.numpy() == 3
    assert where(nested) == [0]
    with mirrored.scope():
        other = rx.Variable(2.0)
    assert mirrored.run(lambda: other.assign_add(1.0)) is not None  # side by side
    assert strategy.run_here(lambda: nested * 2) == 6
    for run in (strategy.run_here, lambda fn: mirrored.run(fn)):
        message(
            errors.MixedStrategiesError,
            lambda run=run: run(lambda: nested + other),
            "was made in the scope of",
        )


def test_one_replica_for_any_number_of_workers(strategy):
    assert strategy.num_replicas_in_sync == 1

    def fn():
        context = rx.get_replica_context()
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == 1
        return context.replica_id_in_sync_group, context.all_reduce("sum", jnp.float32(3))

    assert strategy.run_here(lambda: strategy.run(fn)) == (0, 3)


def test_variables_made_outside_the_scope_raise(strategy):
    outside = rx.Variable(1.0, name="outside")
    metric = keras.metrics.Mean(name="average")
    message(
        errors.VariableError,
        lambda: strategy.run_here(lambda: outside + 1),
        "'outside'",
        "made outside of the scope",
        "with strategy.scope():",
    )
    message(
        errors.VariableError, lambda: strategy.run_here(lambda: metric.update_state(1.0)), "'average/total'"
    )


# --- run and reduce ------------------------------------------------------------------------------------


def test_run_outside_scheduled_functions_works_and_logs_once(strategy, caplog):
    (v,) = made(strategy, 1.0)

    def add_here(x):
        v.assign_add(x)
        return v * 10

    with caplog.at_level(logging.WARNING, logger="replicax"):
        assert strategy.run(add_here, args=(np.float32(2),)) == 30
        assert strategy.run(add_here, args=(np.float32(2),)) == 50
    assert v.numpy() == 5
    (record,) = [r for r in caplog.records if "outside of a scheduled function" in r.getMessage()]
    assert "add_here" in record.getMessage()
    assert "ClusterCoordinator.schedule" in record.getMessage()


def test_reduce_and_gather_use_one_replica(strategy):
    (v,) = made(strategy, 2.0)

    def fn(x):
        y = strategy.run(lambda x: x * v, args=(x,))
        return strategy.reduce("sum", y, axis=None), strategy.reduce("mean", y, axis=0), strategy.gather(y, 0)

    total, mean, gathered = strategy.run_here(fn, np.float32([1, 2, 6]))
    np.testing.assert_array_equal(total, [2, 4, 12])
    assert mean == 6
    np.testing.assert_array_equal(gathered, [2, 4, 12])
    np.testing.assert_array_equal(strategy.experimental_local_results(total), [[2, 4, 12]])
    assert strategy.reduce("sum", np.float32([1, 2]), axis=0) == 3


def test_rx_function_is_the_function_with_or_without_run_in_it(strategy):
    (v,) = made(strategy, 1.0)
    assert rx.function(lambda x: v.assign_add(x) * 2)(np.float32(1)) == 4
    with_run = rx.function(lambda x: strategy.run(lambda x: v + x, args=(x,)))
    assert with_run(np.float32(1)) == 3
    v.assign(10.0)
    assert with_run(np.float32(1)) == 11
    message(
        errors.CrossReplicaContextError,
        lambda: strategy.run_here(lambda: strategy.run(lambda: strategy.run(lambda: v + 1))),
        "inside a function that strategy.run runs",
    )


def test_aggregation_is_over_the_one_replica(strategy):
    summed, first = made(strategy, 0.0, 0.0, aggregation=rx.VariableAggregation.SUM)
    (on_read,) = made(
        strategy,
        0.0,
        synchronization=rx.VariableSynchronization.ON_READ,
        aggregation=rx.VariableAggregation.SUM,
    )

    def worker_fn():
        def replica_fn():
            number = rx.get_replica_context().replica_id_in_sync_group
            summed.assign(number + 1.0)
            first.assign_add(number + 5.0)
            on_read.assign_add(number + 2.0)

        strategy.run(replica_fn)

    for _ in range(2):
        strategy.run_here(worker_fn)
    assert [v.numpy() for v in (summed, first, on_read)] == [1, 10, 4]


def test_cached_reads_are_of_the_first(strategy):
    (v,) = made(strategy, 1.0)
    with rx.experimental.cache_variable_reads():
        assert v.numpy() == 1
        v.assign_add(1.0)
        assert v.numpy() == 1
    assert v.numpy() == 2


def test_merge_call_and_update_assign_on_the_servers(strategy):
    (v,) = made(strategy, 1.0)

    def replica_fn(x):
        def merge_fn(strategy, x):
            strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(x,))

        rx.get_replica_context().merge_call(merge_fn, args=(x,))

    strategy.run_here(lambda x: strategy.run(replica_fn, args=(x,)), np.float32(4))
    strategy.extended.update(v, lambda v: v.assign(v * 2))
    assert v.numpy() == 10


def test_conditions_assign_on_the_servers(strategy):
    (v,) = made(strategy, 0.0)

    def fn(x):
        rx.cond(x > 0, lambda: v.assign_add(10.0), lambda: v.assign_add(-1.0))

    for x in (1.0, -1.0, 1.0):
        strategy.run_here(fn, np.float32(x))
    assert v.numpy() == 19


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: s.run(lambda: 1, options=rx.RunOptions(eager=True)), "RunOptions(eager=True)"),
        (lambda s: s.run(lambda: 1, options=rx.RunOptions(check_same=True)), "RunOptions(check_same=True)"),
        (
            lambda s: s.run(lambda: 1, options=rx.RunOptions(check_finite=True)),
            "RunOptions(check_finite=True)",
        ),
        (lambda s: s.run_steps(lambda x: x, None, 2), "Give each step to ClusterCoordinator.schedule"),
    ],
    ids=["eager", "same", "finite", "run_steps"],
)
def test_unsupported_methods_raise(strategy, call, says):
    message(errors.UnsupportedError, lambda: call(strategy), says)


# --- data ----------------------------------------------------------------------------------------------


def test_distributed_datasets_are_for_create_per_worker_dataset(strategy):
    dataset = rx.data.from_arrays(np.arange(8.0)).batch(4)
    for distributed in (
        strategy.experimental_distribute_dataset(dataset),
        strategy.distribute_datasets_from_function(lambda context: dataset),
        strategy.experimental_distribute_datasets_from_function(lambda context: dataset),
    ):
        text = message(errors.InvalidArgumentError, lambda distributed=distributed: iter(distributed))
        assert text == (
            "To use this dataset, you need to pass this dataset to ClusterCoordinator.create_per_worker_dataset."
        )


def test_datasets_that_cannot_be_distributed(strategy):
    message(
        errors.InvalidArgumentError,
        lambda: strategy.distribute_datasets_from_function([1]),
        "needs a function of an InputContext",
    )
    message(
        errors.UnsupportedError,
        lambda: strategy.distribute_datasets_from_function(
            lambda context: [], rx.InputOptions(experimental_replication_mode="PER_REPLICA")
        ),
        "does not support InputReplicationMode.PER_REPLICA",
    )
    message(
        errors.InvalidArgumentError,
        lambda: strategy.experimental_distribute_dataset([], {"a": 1}),
        "rx.InputOptions, got {'a': 1}",
    )


# --- Keras ---------------------------------------------------------------------------------------------

X = np.random.RandomState(0).randn(16, 4).astype(np.float32)
Y = (X.sum(1, keepdims=True) > 0).astype(np.float32)


def model_in(strategy, *layers):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return keras.Sequential([keras.Input((4,)), *(layer() for layer in layers), keras.layers.Dense(1)])


def weights_of(model):
    return [np.asarray(variable.value) for variable in model.weights]


def step_of(strategy, model, *optimizers):
    def replica_fn(x, y):
        with rx.GradientTape() as tape:
            loss = jnp.mean((model(x, training=True) - y) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        each = len(variables) // len(optimizers)
        for n, optimizer in enumerate(optimizers):
            part = slice(n * each, (n + 1) * each if n + 1 < len(optimizers) else None)
            optimizer.apply_gradients(zip(gradients[part], variables[part]))
        return loss

    return lambda x, y: strategy.run(replica_fn, args=(x, y))


def both(train):
    """The results of ``train(strategy, run)`` with parameter servers, and on one device."""
    strategy, one = servers(2), rx.OneDeviceStrategy("cpu:0")
    return train(strategy, strategy.run_here), train(one, lambda fn, *args: fn(*args))


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


@pytest.mark.rest
def test_batch_normalisation_and_dropout_are_those_of_one_device():
    def train(strategy, run):
        model = model_in(strategy, keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.5, seed=3))
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.1)
        step = step_of(strategy, model, optimizer)
        losses = [float(run(step, X, Y)) for _ in range(3)]
        return [losses, *weights_of(model), np.asarray(model(X))]

    assert_near(*both(train))


@pytest.mark.rest
def test_several_optimizers_of_one_step():
    def train(strategy, run):
        model = model_in(strategy, lambda: keras.layers.Dense(3, activation="relu"))
        with strategy.scope():
            optimizers = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.05, momentum=0.9)
        optimizers[0].build(model.trainable_variables[:2])
        optimizers[1].build(model.trainable_variables[2:])
        step = step_of(strategy, model, *optimizers)
        for _ in range(3):
            run(step, X, Y)
        return [*weights_of(model), *(int(o.iterations.value) for o in optimizers)]

    assert_near(*both(train))


@pytest.mark.rest
def test_schedule_continues_its_count_and_a_learning_rate_may_be_assigned():
    def train(strategy, run):
        model = model_in(strategy)
        with strategy.scope():
            scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
            assigned = keras.optimizers.SGD(0.1)
        for optimizer in (scheduled, assigned):
            optimizer.build(model.trainable_variables)
        by_schedule, by_hand = step_of(strategy, model, scheduled), step_of(strategy, model, assigned)
        weights = []
        for n in range(3):
            run(by_schedule, X, Y)
            assigned.learning_rate = 0.1 / (n + 1)
            run(by_hand, X, Y)
            weights += weights_of(model)
        return [*weights, float(scheduled.learning_rate), float(assigned.learning_rate)]

    assert_near(*both(train))


def test_a_model_whose_layers_are_built_when_it_is_first_traced(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.05)
    step = step_of(strategy, model, optimizer)
    losses = [float(strategy.run_here(step, X, Y)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert all(len(variable._value.shards) == 1 for variable in [*model.variables, *optimizer.variables])


def test_losses_of_layers_that_are_built_when_they_are_first_traced(strategy):
    keras.utils.set_random_seed(0)

    def train(is_built_before):
        with strategy.scope():
            model = keras.Sequential(
                [keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer="l1", name="dense")]
            )
            optimizer = keras.optimizers.SGD(0.05)
            if is_built_before:
                model.build(X.shape)

        def step(x, y):
            with rx.GradientTape() as tape:
                loss = jnp.mean((model(x) - y) ** 2) + sum(model.losses)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return [float(strategy.run_here(step, X, Y)) for _ in range(3)]

    assert train(is_built_before=False) == train(is_built_before=True)


@pytest.mark.parametrize("kind", [rx.Variable, keras.Variable])
def test_a_variable_that_every_call_would_create_is_an_error(strategy, kind):
    def count():
        return kind(1.0) + 1.0

    with pytest.raises(errors.VariableError, match=r"test_parameter_server\.py:\d+ in count"):
        strategy.run_here(count)


def test_variables_that_a_function_makes_the_first_time(strategy):
    kept = {}

    def count():
        if "v" not in kept:
            kept["v"] = rx.Variable(5.0)
        return kept["v"].assign_add(1.0)

    assert [float(strategy.run_here(count)) for _ in range(3)] == [6, 7, 8]
    assert len(where(kept["v"])) == 1


def test_metrics_inside_and_outside(strategy):
    with strategy.scope():
        mean = keras.metrics.Mean()

    def update(x):
        mean.update_state(x)
        return mean.result()

    assert [float(strategy.run_here(update, np.float32(x))) for x in (1, 2, 6)] == [1, 1.5, 3]
    assert mean.result() == 3
    mean.reset_state()
    assert mean.result() == 0
    assert strategy.run_here(update, np.float32(4)) == 4
    mean.update_state([6.0])
    assert mean.result() == 5


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras 3.15, in save
def test_weights_are_saved_and_loaded(strategy, tmp_path):
    model = model_in(strategy, keras.layers.BatchNormalization)
    before = weights_of(model)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    model.set_weights([np.zeros_like(weight) for weight in before])
    assert not any(np.any(weight) for weight in weights_of(model))
    model.load_weights(path)
    for weight, value in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(weight, value)
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(X), model(X))
    assert all(len(variable._value.shards) == 1 for variable in loaded.variables)
