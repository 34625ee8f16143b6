"""Workers that each run the program, on parameter servers that all share: ``ParameterServerStrategy``."""

import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._ps.strategy.coordinator_form import CoordinatorForm
from replicax.cluster_resolver import TFConfigClusterResolver
from replicax.errors import (
    InvalidArgumentError,
    ProgramMismatchError,
    TaskError,
    UnavailableError,
    UnsupportedError,
)
from replicax.testing import LocalCluster

pytestmark = pytest.mark.timeout(250)


# --- in this process, on real servers ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(1, chief=True, num_ps=2, script_in="workers", timeout_s=150) as cluster:
        cluster.start_servers()
        yield cluster


@pytest.fixture
def strategy_of(cluster, monkeypatch):
    """Makes the strategy of a task."""
    for name, value in cluster.environment_of("ps", 0).items():
        if name != "TF_CONFIG":
            monkeypatch.setenv(name, value)
    made = []

    def make(task_type, **options):
        resolver = TFConfigClusterResolver(environ=cluster.environment_of(task_type, 0))
        made.append(rx.ParameterServerStrategy(resolver, **options))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()
    make("chief", is_coordinator=True).close()  # takes over, and leaves nothing to the next test


@pytest.fixture
def chief(strategy_of):
    return strategy_of("chief", is_coordinator=False)


@pytest.fixture
def worker(chief, strategy_of):
    return strategy_of("worker")


def counter(strategy, first=0.0):
    with strategy.scope():
        return rx.Variable(np.full(2, first, np.float32), name="count")


@pytest.mark.rest
def test_all_share_variables_with_the_chiefs_initial_values(chief, worker):
    ours, theirs = counter(chief, 5), counter(worker, 7)
    assert ours.numpy().tolist() == theirs.numpy().tolist() == [5, 5]
    chief.run(lambda: ours.assign_add([1.0, 2.0]))
    for _ in range(3):
        worker.run(lambda: theirs.assign_add([10.0, 20.0]))
    assert ours.numpy().tolist() == theirs.numpy().tolist() == [36, 67]
    theirs.assign([1, 1])
    assert ours.numpy().tolist() == [1, 1]


def test_warnings_of_a_worker(chief, worker):
    assert (chief.is_chief, worker.is_chief) == (True, False)
    for strategy in (chief, worker):
        extended = strategy.extended
        assert strategy.num_replicas_in_sync == 1
        assert extended.experimental_between_graph
        assert extended.should_checkpoint == extended.should_save_summary == strategy.is_chief
        assert extended.experimental_should_init == strategy.is_chief


def test_a_worker_that_leaves_devices_unused_names_the_argument_that_uses_them(strategy_of, caplog):
    strategy_of("chief", is_coordinator=False)
    (said,) = [record.message for record in caplog.records if "is used" in record.message]
    assert "chief 0 has 8 devices, and 1 of them" in said
    assert "devices_per_worker=8" in said
    caplog.clear()
    strategy_of("worker", devices_per_worker=1)
    assert "used" not in caplog.text


def test_each_worker_has_its_own_pipeline(chief, worker):
    """As in TensorFlow, a dataset is read in full, and a function learns which worker calls it."""
    data = rx.data.from_arrays(np.arange(6)).batch(2)
    seen = []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return data.shard(context.num_input_pipelines, context.input_pipeline_id)

    for strategy, of_function in ((chief, [[0, 1], [4, 5]]), (worker, [[2, 3]])):
        whole = [batch.tolist() for batch in strategy.experimental_distribute_dataset(data)]
        assert whole == [[0, 1], [2, 3], [4, 5]]
        shards = strategy.distribute_datasets_from_function(dataset_fn)
        assert [batch.tolist() for batch in shards] == of_function
    assert seen == [(2, 0, 1), (2, 1, 1)]


def test_functions_run_in_this_process_compiled_and_without_a_warning(worker, chief, caplog):
    ours, theirs = counter(chief), counter(worker)
    assert ours.numpy().tolist() == [0, 0]
    traced = set()  # not a number, which would be a constant of the programs

    @rx.function
    def step(x):
        traced.add(("step", id(x)))

        def replica_fn(x):
            theirs.assign_add(x)
            return x.sum()

        return worker.reduce("SUM", worker.run(replica_fn, args=(x,)), axis=None)

    def direct(x):
        traced.add(("direct", id(x)))
        theirs.assign_add(x)

    for value in (1.0, 2.0, 3.0):
        x = np.full(2, value, np.float32)
        assert step(x) == 2 * value
        worker.run(direct, args=(x,))
    assert len(traced) <= 3  # a function is traced twice before it is known where it runs
    assert ours.numpy().tolist() == [12, 12]
    assert not [record for record in caplog.records if "runs in this process" in record.message]


def test_each_knows_which_worker_it_is(chief, worker):
    for strategy, expected in ((chief, 0), (worker, 1)):
        assert (
            strategy.run(lambda: rx.coordinator.experimental_get_current_worker_index() + 10) == 10 + expected
        )


def test_reduce_needs_no_axis_as_in_tensorflow_1(worker):
    value = worker.run(lambda: np.asarray([1.0, 2.0], np.float32))
    assert worker.reduce("SUM", value).tolist() == worker.reduce("SUM", value, axis=None).tolist()
    assert worker.reduce("SUM", value).shape == (2,)


def test_values_cannot_be_reduced_to_another_worker(chief, worker):
    value = np.ones(2, np.float32)
    text = message(
        InvalidArgumentError,
        lambda: chief.extended.reduce_to("MEAN", value, "/job:worker/task:0/device:CPU:0"),
        "Cannot reduce to another worker: '/job:worker/task:0/device:CPU:0', current worker is '/job:chief/task:0'",
    )
    assert "name a device of this one" in text
    assert worker.extended.reduce_to("MEAN", value, "/job:worker/task:0/device:CPU:0").tolist() == [1, 1]


def test_programs_that_differ_are_named(chief, worker):
    counter(chief).numpy()
    with worker.scope():
        theirs = rx.Variable(np.zeros(3), name="count")
    message(ProgramMismatchError, theirs.numpy, "Variable 'count' has the shape (3,)", "the shape (2,)")


def test_there_is_no_coordinator(chief):
    message(
        InvalidArgumentError,
        lambda: rx.coordinator.ClusterCoordinator(chief),
        "every worker runs this program",
    )


def test_fit_raises_and_says_what_to_do_instead(chief):
    with chief.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4, 2), np.float32)
    text = message(UnsupportedError, lambda: model.fit(x, x), "fit() is not supported")
    assert "Write the loop" in text


def test_variables_outlive_a_worker_that_ends(chief, worker, strategy_of):
    ours, theirs = counter(chief), counter(worker)
    chief.run(lambda: ours.assign_add([1.0, 1.0]))
    assert theirs.numpy().tolist() == [1, 1]
    chief.close()
    worker.run(lambda: theirs.assign_add([1.0, 1.0]))
    again = strategy_of("chief", is_coordinator=False)
    assert again.session.incarnation == worker.session.incarnation
    assert counter(again).numpy().tolist() == [2, 2]
    again.close()
    worker.close()
    anew = strategy_of("chief", is_coordinator=False)
    assert anew.session.incarnation != worker.session.incarnation
    assert counter(anew).numpy().tolist() == [0, 0]


def test_no_worker_starts_without_the_chief(strategy_of, monkeypatch):
    monkeypatch.setenv("REPLICAX_START_TIMEOUT_S", "1")
    text = message(
        UnavailableError, lambda: strategy_of("worker"), "worker 0 waited 1 s for chief 0: it creates"
    )
    assert "Check that it runs the program" in text


def test_a_worker_of_a_coordinator_is_told_to_be_a_server(cluster, strategy_of, monkeypatch):
    coordinator = strategy_of("chief")
    assert isinstance(coordinator.form, CoordinatorForm)
    monkeypatch.setenv("REPLICAX_START_TIMEOUT_S", "1")
    text = message(UnavailableError, lambda: strategy_of("worker"), "serve a coordinator")
    assert "run `replicax server` here" in text
    assert "is_coordinator=False" in text


def test_tasks_without_a_role(strategy_of):
    environ = {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'}
    resolver = TFConfigClusterResolver(environ=environ)
    message(
        TaskError,
        lambda: rx.ParameterServerStrategy(resolver),
        "`ps` jobs",
    )
    message(TaskError, lambda: strategy_of("ps"), "This process is ps 0")
    message(TaskError, lambda: strategy_of("ps", is_coordinator=False), "This process is ps 0")
    message(TaskError, lambda: strategy_of("worker", is_coordinator=True), "This process is worker 0")


def test_optimizers_of_all_update_the_same_variables(chief, worker):
    """The chief creates bindings, and an optimizer's shared state, beside their variables."""
    weights, steps = [], []

    def trained(strategy):
        with strategy.scope():
            weight = keras.Variable(np.zeros((2, 2), np.float32), name="weight")
            other = keras.Variable(np.ones(3, np.float32), name="other")
            optimizer = keras.optimizers.SGD(0.5, momentum=0.5, name="sgd")

        def step():
            optimizer.apply([weight * 0 + 1, other * 0 + 1], [weight, other])

        strategy.run(step)
        weights.append(weight)
        steps.append(optimizer.iterations)
        return step

    step = trained(chief)
    trained(worker)
    chief.run(step)
    assert [int(number) for number in steps] == [3, 3]
    for weight in weights:
        np.testing.assert_allclose(np.asarray(weight.value), np.full((2, 2), -2.125))


# --- in processes of their own ----------------------------------------------------------------------------


def counts():
    import os
    import time

    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.ParameterServerStrategy()
    me = strategy.cluster_resolver.task_id
    with strategy.scope():
        by_worker = rx.Variable(np.zeros(2, np.int32), name="by_worker")
        total = rx.Variable(np.zeros((), np.int32), name="total")
        num_ended = rx.Variable(np.zeros((), np.int32), name="num_ended")
    mine = np.eye(2, dtype=np.int32)[me]

    def step(mine):
        by_worker.assign_add(mine)
        total.assign_add(1)

    report(began_with=int(by_worker.numpy()[me]))
    is_first = os.environ["REPLICAX_RESTART_COUNT"] == "0"
    number = 0
    while is_first or number < 100:  # the first one is killed
        strategy.run(step, args=(mine,))
        number += 1
        if number == 50:
            print("has begun", flush=True)
    num_ended.assign_add(1)
    while int(num_ended) < 2:
        time.sleep(0.05)
    report(by_worker=by_worker.numpy().tolist(), total=int(total))


@pytest.mark.rest
def test_restarted_workers_resume():
    """The chief too. Each step counts once, no matter when the kill hits it."""
    with LocalCluster(2, num_ps=1, timeout_s=150) as cluster:
        cluster.start(counts)
        for index in (1, 0):
            cluster.tasks["worker", index].wait_for_output("has begun")
            cluster.restart("worker", index)
        results = cluster.wait()
        results.raise_if_failed()
    expected = []
    for index in range(2):
        first, again = (r["began_with"] for r in results["worker", index].reports if "began_with" in r)
        assert first == 0
        assert again >= 50
        expected.append(again + 100)
    for index in range(2):
        report = results["worker", index].report
        assert report["by_worker"] == expected
        assert report["total"] == sum(expected)


def trains():
    import os

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    task = rx.cluster_resolver.TFConfigClusterResolver().task_id
    keras.utils.set_random_seed(task)
    partitioner = rx.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = rx.experimental.ParameterServerStrategy(variable_partitioner=partitioner)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.05)
        loss_sum = keras.metrics.Sum()
    if strategy.is_chief:
        assert int(optimizer.iterations) == 0  # used earlier than in the other worker
    x = np.random.default_rng(task).normal(size=(16, 4)).astype(np.float32)
    y = x @ np.arange(4, dtype=np.float32)[:, None]

    def step(x, y):
        with rx.GradientTape() as tape:
            loss = ((model(x) - y) ** 2).mean()
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        loss_sum.update_state(1.0)
        return loss

    first = float(strategy.run(step, args=(x, y)))
    for _ in range(149):
        last = strategy.run(step, args=(x, y))
    while int(loss_sum.result()) < 300:
        last = last
    report(
        first=first,
        last=float(last),
        iterations=int(optimizer.iterations),
        weights=[w.tolist() for w in model.get_weights()],
        script_in=os.environ["REPLICAX_SCRIPT_IN"],
    )


@pytest.mark.long
def test_a_keras_model_is_trained_by_all():
    """Its variables, in shards, start with the chief's seed in both; bindings, and the optimizer's shared state, are
    found."""
    environment = {"KERAS_BACKEND": "jax"}
    with LocalCluster(2, num_ps=2, environment=environment, timeout_s=150) as cluster:
        cluster.start(trains)
        results = cluster.wait()
        results.raise_if_failed()
    reports = [results["worker", index].report for index in range(2)]
    assert [report["iterations"] for report in reports] == [300, 300]
    assert reports[0]["weights"] == reports[1]["weights"]
    assert all(report["last"] < 1e-2 for report in reports)
    assert min(report["first"] for report in reports) > 1
