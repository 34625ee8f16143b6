"""Several devices of a worker: synchronous replicas, as with MirroredStrategy, and one push to each server per
closure."""

import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from in_memory_servers import in_memory_strategy
from replicax._src.cluster.server_settings import ServerSettings
from replicax._src.jax_internals.jax_compat import export_platform

pytestmark = [pytest.mark.timeout(120), pytest.mark.rest]

ROWS = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
DEVICES = [f"cpu:{n}" for n in range(2)]


@pytest.fixture(scope="module")
def on_servers():
    with in_memory_strategy(workers=1, ps=2, devices_per_worker=2) as strategy:
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            yield strategy, coordinator


class Everything:
    """Every kind of variable update in a step, once each."""

    def __init__(self, strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.dense = keras.layers.Dense(2)
            self.norm = keras.layers.BatchNormalization(momentum=0.75)
            self.drop = keras.layers.Dropout(0.5)
            for layer in (self.dense, self.norm, self.drop):
                layer.build((None, 3))
            self.optimizer = keras.optimizers.Adam(0.1)
            self.optimizer.build(self.dense.trainable_variables)
            self.mean = keras.metrics.Mean()
            self.seen = rx.Variable(0, aggregation="SUM", name="seen")
            self.scale = rx.Variable(1.0, aggregation="MEAN", name="scale")
            self.first = rx.Variable(jnp.zeros(2), aggregation="ONLY_FIRST_REPLICA", name="first")
            self.on_read = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM", name="on_read")
            self.same = rx.Variable(1.0, name="same")

    def replica_step(self, x):
        context = rx.get_replica_context()
        with rx.GradientTape() as tape:
            y = self.dense(self.drop(self.norm(x, training=True), training=True))
            loss = rx.nn.compute_average_loss(jnp.sum(y**2, axis=-1), global_batch_size=4)
        variables = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.mean.update_state(x[:, 0])
        self.seen.assign_add(x.shape[0])
        self.scale.assign(self.scale * 0.5 + jnp.sum(x))
        self.first.assign_add(x[0, :2])

        def count_again():
            self.on_read.assign(self.on_read + jnp.sum(x**2))  # this replica's part, and what is new

        rx.cond(self.same.value > 0, count_again, lambda: None)
        self.on_read.assign_add(jnp.sum(x))
        self.same.assign_add(context.all_reduce("SUM", jnp.sum(x)))
        after = self.seen.value + context.replica_id_in_sync_group
        return {"loss": loss, "x": x, "after": after, "mean": self.mean.result()}

    def state(self):
        variables = [
            *self.dense.variables,
            *self.norm.variables,
            *self.optimizer.variables,
            *self.drop.variables,
        ]
        own = [self.seen, self.scale, self.first, self.on_read, self.same]
        return [np.asarray(v.value) for v in [*variables, *own]] + [np.asarray(self.mean.result())]


def summary(strategy, result):
    total = strategy.reduce("SUM", result["loss"], axis=None)
    rows = strategy.gather(result["x"], axis=0)
    return {**result, "total": total, "rows": rows}


def components(strategy, result):
    return jax.tree.map(np.asarray, strategy.experimental_local_results(result))


@pytest.mark.quick
def test_replicas_of_a_worker_equal_those_of_mirrored_strategy(on_servers):
    mirrored = rx.MirroredStrategy(DEVICES)
    theirs = Everything(mirrored)
    expected = []
    for batch in mirrored.experimental_distribute_dataset(rx.data.from_arrays(ROWS).batch(4)):
        expected.append(
            components(mirrored, summary(mirrored, mirrored.run(theirs.replica_step, args=(batch,))))
        )
    strategy, coordinator = on_servers
    ours = Everything(strategy)
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(ROWS).batch(4))
    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def step(iterator):
        return summary(strategy, strategy.run(ours.replica_step, args=(next(iterator),)))

    got = [components(strategy, coordinator.schedule(step, args=(iterator,)).fetch()) for _ in expected]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)
    for a, b in zip(ours.state(), theirs.state(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_updates_of_replicas_add_up_on_the_servers_with_one_push_each(on_servers, caplog):
    strategy, coordinator = on_servers
    ours = Everything(strategy)

    def step(x):
        def replica_step(x):
            ours.drop(ours.norm(x, training=True), training=True)
            ours.mean.update_state(x[:, 0], sample_weight=2.0)
            ours.seen.assign_add(1)
            ours.scale.assign_sub(x[0, 0])

        strategy.run(replica_step, args=(x,))

    arguments = strategy.experimental_distribute_values_from_function(
        lambda context: ROWS[: 2 + context.replica_id_in_sync_group]
    )
    prepared = strategy.closures.prepare(step, [arguments])
    (digest,) = prepared.programs.values()
    pushes = prepared.program(digest).pushes
    assert sorted(push.ps for push in pushes) == [0, 1]
    assert "a parameter server cannot apply" not in caplog.text
    before = [np.asarray(v.value) for v in (ours.norm.moving_mean, ours.scale)]
    for value in [ours.norm.moving_mean, ours.scale]:
        value.assign(value.value + 100.0)
    coordinator.schedule(step, args=(arguments,)).fetch()
    # The first replica has two rows, the second three.
    mean = (2 * ROWS[:2].mean(0) + 3 * ROWS[:3].mean(0)) / 5
    np.testing.assert_allclose(ours.norm.moving_mean.value, (before[0] + 100) * 0.75 + 0.25 * mean, rtol=1e-5)
    np.testing.assert_allclose(ours.scale.numpy(), before[1] + 100 - ROWS[0, 0], rtol=1e-5)
    assert ours.seen.numpy() == 2


def test_updates_of_components_change_the_total_also_in_branches(on_servers, caplog):
    strategy, coordinator = on_servers
    with strategy.scope():
        total = rx.Variable(np.zeros(2), synchronization="ON_READ", aggregation="SUM")

    def step(x):
        def replica_step(x):
            total.assign(total * 2.0 + x * (1.0 + rx.get_replica_context().replica_id_in_sync_group))
            rx.cond(x > 1, lambda: total.assign(total * x) is None, lambda: total.assign(jnp.ones(2)) is None)

        strategy.run(replica_step, args=(x,))

    values = [coordinator.schedule(step, args=(np.float32(x),)) for x in (0.0, 2.0, 3.0)]
    coordinator.fetch(values)
    np.testing.assert_array_equal(total.numpy(), [147.0, 147.0])
    assert "a parameter server cannot apply" not in caplog.text


def test_each_replica_gets_one_element_and_the_last_ones_get_none(on_servers):
    strategy, coordinator = on_servers

    def make(input_context):
        size = input_context.get_per_replica_batch_size(4)
        return rx.data.from_arrays(np.arange(10.0, dtype=np.float32)).batch(size)

    iterator = iter(
        coordinator.create_per_worker_dataset(lambda: strategy.distribute_datasets_from_function(make))
    )

    def step(iterator):
        return strategy.run(lambda x: x, args=(next(iterator),))

    got = [coordinator.schedule(step, args=(iterator,)).fetch().values for _ in range(3)]
    assert [[list(part) for part in parts] for parts in got] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9], []],
    ]


def test_arrays_and_elements_of_a_plain_dataset_go_to_all_replicas(on_servers):
    strategy, coordinator = on_servers
    dataset = rx.data.from_arrays(np.arange(4.0, dtype=np.float32)).batch(2)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: dataset))

    def step(iterator, shift):
        def replica_step(x, shift):
            return x + shift + rx.get_replica_context().replica_id_in_sync_group

        return strategy.run(replica_step, args=(next(iterator), shift))

    got = coordinator.schedule(step, args=(iterator, np.float32(10))).fetch()
    assert [list(part) for part in got.values] == [[10, 11], [11, 12]]


@pytest.mark.quick
def test_mirrored_variable_with_varying_new_values_raises_with_the_line(on_servers):
    strategy, _ = on_servers
    with strategy.scope():
        v = rx.Variable(0.0, name="mirrored")

    def step(x):
        strategy.run(lambda x: v.assign(x * rx.get_replica_context().replica_id_in_sync_group), args=(x,))

    with pytest.raises(
        rx.errors.DivergenceError, match=r"Variable 'mirrored' is .* at .*test_remote_replicas"
    ):
        strategy.closures.prepare(step, [np.float32(1)])


def test_next_inside_run_says_where_to_call_it(on_servers):
    strategy, coordinator = on_servers
    iterator = iter(coordinator.create_per_worker_dataset(lambda: rx.data.from_arrays(ROWS).batch(2)))

    def step(iterator):
        return strategy.run(lambda: next(iterator))

    with pytest.raises(rx.errors.TraceError, match=r"2 replicas.*strategy.run"):
        strategy.closures.prepare(step, [iterator])


def test_assignments_that_depend_on_the_batch_size_in_python_raise(on_servers):
    strategy, _ = on_servers
    with strategy.scope():
        v = keras.Variable(1.0, trainable=False)

    def step(x):
        strategy.run(lambda x: v.assign(v * (1.0 / x.shape[0]) + jnp.sum(x)), args=(x,))

    rows = strategy.experimental_distribute_values_from_function(
        lambda context: ROWS[: 2 + context.replica_id_in_sync_group]
    )
    with pytest.raises(rx.errors.StructureError, match="another local batch size"):
        strategy.closures.prepare(step, [rows])


def test_run_inside_of_merge_call_raises_as_on_devices(on_servers):
    def replica_step():
        rx.get_replica_context().merge_call(lambda strategy: strategy.run(lambda: jnp.zeros(())))

    for strategy in (on_servers[0], rx.MirroredStrategy(DEVICES)):
        schedule = on_servers[1].schedule if strategy is on_servers[0] else lambda fn: fn()
        with pytest.raises(rx.errors.CrossReplicaContextError, match="was called in merge_call"):
            schedule(lambda strategy=strategy: strategy.run(replica_step))


def test_a_process_with_fewer_devices_says_that_a_replica_function_belongs_to_the_workers():
    with in_memory_strategy(devices_per_worker=jax.local_device_count() + 1) as strategy:
        with pytest.raises(rx.errors.DeviceError, match=r"9 devices.* 8 "):
            strategy.run(lambda: jnp.float32(1))


def test_run_outside_a_scheduled_function_runs_the_replicas_here(on_servers):
    strategy, _ = on_servers
    result = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    assert [int(x) for x in strategy.experimental_local_results(result)] == [0, 1]


@pytest.mark.parametrize("where", ["scheduled", "here"])
def test_each_replica_has_a_result_even_if_all_are_equal(on_servers, where):
    strategy, coordinator = on_servers

    def step():
        context = rx.get_replica_context()
        return context.replica_id_in_sync_group + 1, context.all_reduce("SUM", jnp.ones(2))

    if where == "scheduled":
        own, equal = coordinator.schedule(lambda: strategy.run(step)).fetch()
    else:
        own, equal = strategy.run(step)
    assert [int(x) for x in strategy.experimental_local_results(own)] == [1, 2]
    assert [x.tolist() for x in strategy.experimental_local_results(equal)] == [[2, 2], [2, 2]]
    assert "0: array([2., 2.]" in repr(equal)
    assert "1: array([2., 2.]" in repr(equal)
    assert strategy.gather(equal, axis=0).tolist() == [2, 2, 2, 2]


def test_values_that_the_coordinator_makes_have_a_component_for_each_replica(on_servers):
    strategy, coordinator = on_servers
    with strategy.scope():
        variable = rx.Variable(3.0)

    def values():
        return strategy.experimental_distribute_values_from_function(
            lambda context: jnp.ones(1 + context.replica_id_in_sync_group)
        )

    def scheduled():
        return strategy.reduce("SUM", strategy.run(lambda x: 2 * x, args=(values(),)), axis=0)

    assert [x.tolist() for x in strategy.experimental_local_results(values())] == [[1], [1, 1]]
    assert float(coordinator.schedule(scheduled).fetch()) == 6
    for copied in (strategy.replicate(np.ones(2)), strategy.extended.broadcast_to(jnp.ones(2), None)):
        assert [x.tolist() for x in strategy.experimental_local_results(copied)] == [[1, 1], [1, 1]]
    assert [float(x) for x in strategy.experimental_local_results(variable)] == [3, 3]


def test_parameter_devices_are_the_parameter_servers(on_servers):
    extended = on_servers[0].extended
    assert extended.parameter_devices == ("/job:ps/task:0", "/job:ps/task:1")
    assert extended.non_slot_devices([]) == extended.parameter_devices


def test_worker_devices_of_a_coordinator_are_the_names_of_a_workers_devices(on_servers):
    """As in TensorFlow. They belong to another process."""
    strategy, coordinator = on_servers
    names = ("/device:CPU:0", "/device:CPU:1")
    assert strategy.extended.worker_devices == names
    seen = []

    def step():
        strategy.run(lambda: seen.append(rx.get_replica_context().devices))

    coordinator.schedule(step).fetch()
    assert seen == [names]


# --- what workers have ------------------------------------------------------------------------------------


def add_up(strategy):
    with strategy.scope():
        total = rx.Variable(0.0, aggregation="SUM")

    def step(x):
        strategy.run(lambda x: total.assign_add(jnp.sum(x)), args=(x,))

    return total, step


def platforms_of(prepared):
    return [
        jax.export.deserialize(bytearray(prepared.program(digest).blob)).platforms
        for digest in prepared.programs.values()
    ]


def test_programs_are_exported_for_the_platforms_of_early_and_late_workers():
    with in_memory_strategy(devices_per_worker=2) as strategy:
        _, step = add_up(strategy)
        session = strategy.session
        session.meet_worker("worker 0", {"num_devices": 2, "platform": "cuda"})
        prepared = strategy.closures.prepare(step, [ROWS])
        (before,) = prepared.programs.values()
        assert platforms_of(prepared) == [("cuda",)]  # whatever this process has
        session.meet_worker("worker 1", {"num_devices": 2, "platform": "rocm"})
        assert platforms_of(prepared) == [("cuda", "rocm")]
        assert before not in prepared.programs.values()
        assert platforms_of(strategy.closures.prepare(step, [ROWS])) == [("cuda", "rocm")]
        for _, update in prepared.traced.first.updates:  # the servers have CPUs
            assert jax.export.deserialize(bytearray(update.blob)).platforms == ("cpu",)
        strategy.run_here(step, ROWS)  # and here it runs for what is here
        assert platforms_of(prepared) == [("cpu", "cuda", "rocm")]


def test_worker_with_fewer_devices_ends_the_job_and_says_why():
    with in_memory_strategy(workers=2, devices_per_worker=2, told={0: {"num_devices": 1}}) as strategy:
        _, step = add_up(strategy)
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            with pytest.raises(rx.errors.DeviceError, match=r"^worker 0.* 1 .*--devices 2"):
                scheduled_until_it_fails(coordinator, step)
        assert strategy.session._tasks.workers[0].statistics()["num_closures"] == 0


def scheduled_until_it_fails(coordinator, step):
    while True:
        coordinator.schedule(step, args=(ROWS,))


def test_a_worker_with_more_devices_uses_the_first_ones_and_says_so(caplog):
    told = {index: {"num_devices": 4} for index in range(2)}
    with in_memory_strategy(workers=2, devices_per_worker=2, told=told) as strategy:
        total, step = add_up(strategy)
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(step, args=(np.ones(3, np.float32),))
            coordinator.join()
        assert total.numpy() == 6
    (said,) = [
        record.message for record in caplog.records if "are used" in record.message
    ]  # once for all workers
    assert "has 4 devices, and 2 of them are used" in said


def test_number_of_devices_comes_from_the_option_or_the_launcher(monkeypatch):
    monkeypatch.setenv("REPLICAX_DEVICES_PER_WORKER", "3")
    assert ServerSettings().num_devices(None) == 3
    assert ServerSettings().num_devices(2) == 2
    monkeypatch.delenv("REPLICAX_DEVICES_PER_WORKER")
    assert ServerSettings().num_devices(None) == 1
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"devices_per_worker=.* at least 1, got 0"):
        ServerSettings().num_devices(0)


def test_programs_for_gpus_use_the_export_platforms_of_jax():
    def device(platform, version=""):
        return types.SimpleNamespace(
            platform=platform, client=types.SimpleNamespace(platform_version=version)
        )

    assert export_platform(device("gpu", "cuda 12090")) == "cuda"
    assert export_platform(device("gpu", "rocm 60300")) == "rocm"
    assert export_platform(device("cpu")) == "cpu"


def test_prints_of_replicas_are_dropped_and_python_callbacks_raise(on_servers, caplog):
    strategy, coordinator = on_servers

    def printing(x):
        jax.debug.print("{}", x)
        return x

    coordinator.schedule(lambda x: strategy.run(printing, args=(x,)), args=(np.float32(1),)).fetch()
    assert "printing prints at" in caplog.text

    def calling(x):
        return jax.pure_callback(np.asarray, x, x)

    with pytest.raises(rx.errors.UnsupportedError, match=r"calling calls back into Python"):
        strategy.closures.prepare(lambda x: strategy.run(calling, args=(x,)), [np.float32(1)])


def test_worker_computes_an_update_only_if_the_function_uses_it_later(on_servers):
    strategy, coordinator = on_servers
    with strategy.scope():
        w = keras.Variable(2.0)
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer.build([w])

    def replica_step(x):
        with rx.GradientTape() as tape:
            loss = w * x
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    def step(x):
        strategy.run(replica_step, args=(x,))

    def looking(x):
        strategy.run(replica_step, args=(x,))
        return w.value

    prepared = strategy.closures.prepare(step, [np.float32(1)])
    (digest,) = prepared.programs.values()
    assert prepared.program(digest).variables == ()
    assert (
        coordinator.schedule(looking, args=(np.float32(1),)).fetch() == 2 - 0.5 * 2
    )  # a gradient of 1 on each
    assert w.value == 1


def test_full_table_is_sent_to_replicas_with_a_warning_and_equals_one_device(caplog):
    ids = np.array([[1, 2], [2, 3], [1, 9]], np.int32)
    shards = rx.experimental.partitioners.FixedShardsPartitioner(2)
    with in_memory_strategy(ps=2, partitioner=shards, devices_per_worker=2) as strategy:
        with strategy.scope():
            table = keras.layers.Embedding(10, 2, embeddings_initializer="ones")
            table.build()
            optimizer = keras.optimizers.SGD(0.5)
        variables = table.trainable_variables

        def replica_step(ids):
            with rx.GradientTape() as tape:
                loss = jnp.sum(table(ids) ** 2) / 2
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            dataset = strategy.experimental_distribute_dataset([ids])
            iterator = iter(coordinator.create_per_worker_dataset(dataset))
            coordinator.schedule(
                lambda i: strategy.run(replica_step, args=(next(i),)), args=(iterator,)
            ).fetch()
        counts = np.bincount(ids.reshape(-1), minlength=10)
        np.testing.assert_allclose(variables[0].value, 1 - 0.5 * counts[:, None] * np.ones(2))
    assert "is sent to the workers in full" in caplog.text
    assert "the replicas of a worker use it" in caplog.text
