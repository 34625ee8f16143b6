"""Keras's loops with parameter servers: one worker gives the numbers of one device; with several, every row counts
once."""

import gc
import time
import weakref

import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from fit_models import SUBJECTS
from in_memory_servers import in_memory_strategy
from replicax._ps.coordinator.cluster_coordinator import coordinator_of
from replicax._ps.worker.worker import Worker
from replicax.coordinator import ClusterCoordinator
from replicax.errors import ContextError, InvalidArgumentError, OutOfRangeError, UnsupportedError
from replicax.experimental.partitioners import FixedShardsPartitioner

pytestmark = [
    pytest.mark.rest,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

ROWS, BATCH = 43, 8  # the last batch has 3 rows
X = np.random.RandomState(0).randn(ROWS, 4).astype("float32")
Y = np.argmax(X[:, :3], 1)
WEIGHTS = np.linspace(0.5, 2, ROWS).astype("float32")


@pytest.fixture(scope="module")
def two_workers():
    with in_memory_strategy(workers=2) as strategy:
        yield strategy


def classifier(optimizer="sgd", layers=(), inputs=True, **options):
    keras.utils.set_random_seed(0)
    first = [keras.Input((4,))] if inputs else []
    model = keras.Sequential([*first, *(layer() for layer in layers), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer() if callable(optimizer) else optimizer, loss, **{"metrics": ["accuracy"], **options}
    )
    return model


def made_in(strategy, *args, **kwargs):
    with strategy.scope():
        return classifier(*args, **kwargs)


def same(one, other, atol=1e-6):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(other[name], one[name], rtol=0, atol=atol, err_msg=name)


def same_state(one, other, atol=1e-6):
    for expected, found in zip(one.weights, other.weights, strict=True):
        np.testing.assert_allclose(found.value, expected.value, rtol=0, atol=atol, err_msg=expected.path)


def fitted(model, **options):
    """The state after two epochs, in an order given by the seed."""
    keras.utils.set_random_seed(1)
    return model.fit(
        X,
        Y,
        **{"batch_size": BATCH, "epochs": 2, "verbose": 0, "validation_data": (X[:11], Y[:11]), **options},
    ).history


# --- what one device gives ------------------------------------------------------------------------------


def normalised():
    return [lambda: keras.layers.Dense(5, activation="relu"), keras.layers.BatchNormalization]


CASES = {
    "sgd, batch normalisation": (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        normalised(),
        {"class_weight": {0: 0.5, 1: 1.0, 2: 2.0}},
    ),
    "adam, sample weights": (
        lambda: keras.optimizers.Adam(0.05),
        [],
        {"sample_weight": WEIGHTS, "validation_data": None},
    ),
}


@pytest.mark.parametrize(
    "case", ["sgd, batch normalisation", pytest.param("adam, sample weights", marks=pytest.mark.quick)]
)
def test_one_worker_trains_as_one_device_does(case):
    optimizer, layers, options = CASES[case]
    expected = classifier(optimizer, layers, weighted_metrics=["accuracy"])
    with in_memory_strategy(workers=1) as strategy:
        model = made_in(strategy, optimizer, layers, weighted_metrics=["accuracy"])
        same(fitted(expected, **options), fitted(model, **options))
        same_state(expected, model)
        assert model.optimizer.iterations.value == 2 * 6
        # And further: from another epoch, with other trained variables.
        again = {"initial_epoch": 2, "epochs": 3, "steps_per_epoch": 2, "validation_data": None}
        same(fitted(expected, **again), fitted(model, **again))
        same_state(expected, model)


def test_fit_does_not_shard_variables_for_an_optimizer_that_needs_them_in_full():
    expected = classifier(lambda: keras.optimizers.Lamb(0.05))
    with in_memory_strategy(workers=1, partitioner=FixedShardsPartitioner(2)) as strategy:
        model = made_in(strategy, lambda: keras.optimizers.Lamb(0.05))
        same(fitted(expected), fitted(model))
        same_state(expected, model)
        assert {len(v._value.shards) for v in model.trainable_variables} == {1}


@pytest.mark.parametrize(
    "case", ["sgd, batch normalisation", pytest.param("adam, sample weights", marks=pytest.mark.long)]
)
def test_two_devices_of_a_worker_train_as_one_device_does(case):
    optimizer, layers, options = CASES[case]
    expected = classifier(optimizer, layers, weighted_metrics=["accuracy"])
    with in_memory_strategy(workers=1, devices_per_worker=2) as strategy:
        model = made_in(strategy, optimizer, layers, weighted_metrics=["accuracy"])
        same(fitted(expected, **options), fitted(model, **options))
        same_state(expected, model)
        same(
            expected.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True),
            model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True),
        )
        np.testing.assert_allclose(
            model.predict(X, batch_size=BATCH, verbose=0),
            expected.predict(X, verbose=0),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.long
def test_only_rows_of_a_table_are_sent_to_a_worker_of_two_devices():
    ids = np.random.RandomState(0).randint(0, 50, (22, 3)).astype("int32")

    def made():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.layers.Input((3,), dtype="int32"), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adagrad(0.1), loss)
        return model

    expected = made()
    expected.fit(ids, Y[:22], batch_size=5, shuffle=False, verbose=0)
    shards = rx.experimental.partitioners.FixedShardsPartitioner(2)
    with in_memory_strategy(workers=1, ps=2, partitioner=shards, devices_per_worker=2) as strategy:
        with strategy.scope():
            model = made()
        model.fit(ids, Y[:22], batch_size=5, shuffle=False, verbose=0)
        same_state(expected, model)
        assert sum(store.statistics()["rows_sent"] for store in strategy.session._tasks.stores) > 0


class InReplicas(keras.Sequential):
    """A model whose steps are in TensorFlow's style: replica functions."""

    def train_step(self, data):
        return super().train_step(data)

    def test_step(self, data):
        return super().test_step(data)


@pytest.mark.long
def test_two_devices_run_a_step_in_tensorflows_style_as_two_replicas():
    def made():
        keras.utils.set_random_seed(0)
        model = InReplicas([keras.Input((4,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
        return model

    expected = made()
    with in_memory_strategy(workers=1, devices_per_worker=2) as strategy:
        with strategy.scope():
            model = made()
        same(fitted(expected), fitted(model))
        same_state(expected, model)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "custom_train_step"])  # of arrays
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # Keras, in BinaryIoU
def test_every_kind_of_model_trains_as_on_one_device(name):
    subject = SUBJECTS[name]
    arrays = dict(zip(("x", "y", "sample_weight"), subject.rows()))

    def build():
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        return subject.build()

    def trained(model):
        keras.utils.set_random_seed(1)
        history = model.fit(**arrays, batch_size=64, verbose=0).history
        return history, model.evaluate(**arrays, batch_size=64, verbose=0, return_dict=True)

    expected = build()
    with in_memory_strategy(workers=1, ps=2) as strategy:
        with strategy.scope():
            model = build()
        for one, other in zip(trained(expected), trained(model), strict=True):
            same(one, other)
        same_state(expected, model)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.quick), 3])
def test_every_row_is_evaluated_once_and_predicted_in_order(workers):
    expected = classifier()
    with in_memory_strategy(workers=workers) as strategy:
        model = made_in(strategy)
        model.set_weights(expected.get_weights())
        options = {"batch_size": BATCH, "verbose": 0, "return_dict": True, "sample_weight": WEIGHTS}
        for _ in range(2):
            same(expected.evaluate(X, Y, **options), model.evaluate(X, Y, **options))
        predicted = model.predict(X, batch_size=BATCH, verbose=0)
        np.testing.assert_allclose(predicted, expected.predict(X, verbose=0), rtol=0, atol=1e-6)
        closures = coordinator_of(strategy).statistics()["closures"]
        assert closures["finished"] == 3 * 6


def test_several_workers_reach_what_one_device_reaches(two_workers):
    options = {"epochs": 30, "validation_data": None}
    reached = fitted(classifier(lambda: keras.optimizers.SGD(0.2)), **options)
    model = made_in(two_workers, lambda: keras.optimizers.SGD(0.2))
    found = fitted(model, **options)
    assert found["loss"][-1] < 0.5 * found["loss"][0]
    assert abs(found["loss"][-1] - reached["loss"][-1]) < 0.05
    assert model.optimizer.iterations.value == 30 * 6


# --- the model ------------------------------------------------------------------------------------------


def test_a_model_that_fit_builds(two_workers):
    model = made_in(two_workers, inputs=False)
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert model.count_params() == 15
    assert model.optimizer.iterations.value == 6
    unseen = made_in(two_workers, inputs=False)
    assert unseen.predict(X[:5], batch_size=2, verbose=0).shape == (5, 3)


def test_inputs_and_outputs_by_name_several_steps_a_call(two_workers):
    def two_heads():
        keras.utils.set_random_seed(0)
        left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
        joined = keras.layers.Concatenate()([left, right])
        outputs = {name: keras.layers.Dense(2, name=name)(joined) for name in ("a", "b")}
        model = keras.Model({"left": left, "right": right}, outputs)
        model.compile("sgd", {"a": "mse", "b": "mae"}, steps_per_execution=4)
        return model

    expected = two_heads()
    with two_workers.scope():
        model = two_heads()
    inputs = {"left": X, "right": X[:, :2]}
    one, other = (m.predict(inputs, batch_size=BATCH, verbose=0) for m in (expected, model))
    same(one, other)
    targets = {"a": X[:, :2], "b": X[:, 2:]}
    options = {"batch_size": BATCH, "verbose": 0, "return_dict": True}
    same(expected.evaluate(inputs, targets, **options), model.evaluate(inputs, targets, **options))
    model.fit(inputs, targets, batch_size=BATCH, verbose=0)
    assert model.optimizer.iterations.value == 6


class WithOwnStep(keras.Model):
    """Its logs contain more than metrics."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=x.shape[0])
            else:
                metric.update_state(y, self(x))
        norm = keras.ops.sqrt(sum(keras.ops.sum(g**2) for g in gradients))
        return {**self.get_metrics_result(), "norm": norm}


@pytest.fixture
def slow_worker(monkeypatch):
    """Worker 0 starts each closure late."""
    answer = Worker.answer

    def slow(self, message):
        if self._place.index == 0 and message.header["op"] == "closure":
            time.sleep(0.1)
        return answer(self, message)

    monkeypatch.setattr(Worker, "answer", slow)


def test_a_step_in_tensorflows_style_and_its_logs(two_workers, slow_worker):
    with two_workers.scope():
        model = WithOwnStep()
        model.compile(
            "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
        )
    history = model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0).history
    assert set(history) == {"loss", "accuracy", "norm"}
    # Metrics have their values after all steps.
    same({name: history[name][-1] for name in ("loss", "accuracy")}, model.get_metrics_result(), atol=0)
    assert model.metrics[0].count.value == ROWS
    assert history["norm"][-1] > 0


class WithArrayStep(keras.Sequential):
    def train_step(self, state, data):
        return super().train_step(state, data)


class WithoutLogs(keras.Sequential):
    def train_step(self, data):
        return None


@pytest.mark.quick
def test_unsupported_steps(two_workers):
    for kind, error, says in (
        (
            WithArrayStep,
            UnsupportedError,
            ("WithArrayStep.train_step(self, state, data)", "train_step(self, data)"),
        ),
        (WithoutLogs, InvalidArgumentError, ("WithoutLogs.train_step returned NoneType", "a dict of logs")),
    ):
        with two_workers.scope():
            model = kind([keras.Input((4,)), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
        message(error, lambda model=model: model.fit(X, X[:, :3], verbose=0), *says)


def test_run_eagerly_runs_the_steps_here_one_by_one(two_workers):
    model = made_in(two_workers, run_eagerly=True)
    expected = classifier()
    model.set_weights(expected.get_weights())
    before = coordinator_of(two_workers).statistics()["closures"]["scheduled"]
    same(fitted(expected, epochs=1), fitted(model, epochs=1))
    assert coordinator_of(two_workers).statistics()["closures"]["scheduled"] == before
    same_state(expected, model)
    predicted = model.predict(X, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(predicted, expected.predict(X, verbose=0), rtol=0, atol=1e-6)


def test_single_batches(two_workers):
    expected = classifier("adam")
    model = made_in(two_workers, "adam")
    model.set_weights(expected.get_weights())
    for _ in range(2):
        one, other = (
            m.train_on_batch(X, Y, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, return_dict=True)
            for m in (expected, model)
        )
        same(one, other)
    same(expected.test_on_batch(X, Y, return_dict=True), model.test_on_batch(X, Y, return_dict=True))
    np.testing.assert_allclose(model.predict_on_batch(X), expected.predict_on_batch(X), rtol=0, atol=1e-6)
    same_state(expected, model)


# --- callbacks ------------------------------------------------------------------------------------------


def test_callbacks_see_the_model_and_its_logs(two_workers, tmp_path):
    seen, saved = [], tmp_path / "model.weights.h5"

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["loss"])
            if batch == 2:
                steps.append((batch, int(self.model.optimizer.iterations.value)))

        def on_epoch_end(self, epoch, logs=None):
            steps.append((epoch, int(self.model.optimizer.iterations.value)))

    steps = []
    model = made_in(two_workers)
    checkpoint = keras.callbacks.ModelCheckpoint(saved, save_weights_only=True)
    fitted(model, callbacks=[Look(), checkpoint])
    assert len(seen) == 12
    assert all(0 < loss < 10 for loss in seen)
    assert steps == [(2, 3), (0, 6), (2, 9), (1, 12)]  # asking for the model waits for its steps
    again = classifier()
    again.load_weights(saved)
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])


def test_early_stopping_restores_the_best_weights(two_workers):
    weights = []

    class Record(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            weights.append(self.model.get_weights())

    model = made_in(two_workers, lambda: keras.optimizers.SGD(0.1))
    worse = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    history = fitted(model, epochs=5, callbacks=[Record(), worse], validation_data=None)
    assert len(history["loss"]) == 2
    for found, best in zip(model.get_weights(), weights[0], strict=True):
        np.testing.assert_array_equal(found, best)


def test_training_stops_when_a_callback_says_so(two_workers):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                self.model.stop_training = True

    model = made_in(two_workers)
    history = fitted(model, callbacks=[Stop()], validation_data=None)
    assert len(history["loss"]) == 1
    assert model.optimizer.iterations.value == 4


def test_nothing_runs_after_fit_was_left(two_workers):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4:
                raise RuntimeError("of a callback")

    model = made_in(two_workers)
    with pytest.raises(RuntimeError, match="of a callback"):
        fitted(model, callbacks=[Fail()])
    assert coordinator_of(two_workers).done()
    assert model.optimizer.iterations.value == 4
    assert "_get_jax_state" not in vars(model)
    fitted(model)
    assert model.optimizer.iterations.value == 4 + 12


def test_nothing_runs_after_evaluate_was_left(two_workers, slow_worker):
    class Fail(keras.callbacks.Callback):
        def on_test_batch_begin(self, batch, logs=None):
            if batch == 4:
                raise RuntimeError("of a callback")

    with pytest.raises(RuntimeError, match="of a callback"):
        made_in(two_workers).evaluate(X, Y, batch_size=BATCH, verbose=0, callbacks=[Fail()])
    assert coordinator_of(two_workers).done()


def test_few_steps_are_in_flight(two_workers):
    most = []

    class Count(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            counts = coordinator_of(two_workers).statistics()["closures"]
            most.append(counts["scheduled"] - counts["finished"])

    fitted(made_in(two_workers), batch_size=1, epochs=1, callbacks=[Count()])
    assert len(most) == ROWS
    assert 1 < max(most) <= 4 * 2


def test_a_callback_of_predict_sees_arrays(two_workers):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            seen.append(logs["outputs"] + 0)

    predicted = made_in(two_workers).predict(X, batch_size=BATCH, verbose=0, callbacks=[Look()])
    np.testing.assert_array_equal(np.concatenate(seen), predicted)


# --- datasets that the workers make ---------------------------------------------------------------------


def batches():
    return [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, 40, BATCH)]


def for_ever(context):
    assert context.num_input_pipelines == 2
    while True:
        yield from batches()


@pytest.mark.parametrize("way", ["function", "dataset of the coordinator", "distributed"])
def test_each_worker_has_its_own_dataset(two_workers, way):
    data = {
        "function": lambda: for_ever,
        "dataset of the coordinator": lambda: ClusterCoordinator(two_workers).create_per_worker_dataset(
            for_ever
        ),
        "distributed": lambda: two_workers.distribute_datasets_from_function(for_ever),
    }[way]()
    model = made_in(two_workers, inputs=False)
    history = model.fit(
        data, steps_per_epoch=7, epochs=2, verbose=0, validation_data=data, validation_steps=3
    ).history
    assert set(history) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert model.optimizer.iterations.value == 14
    assert model.metrics[0].count.value == 3 * BATCH
    assert model.evaluate(data, steps=2, verbose=0)[0] > 0


def test_a_dataset_that_ends_too_early_is_an_error_of_fit(two_workers):
    model = made_in(two_workers)
    message(
        OutOfRangeError,
        lambda: model.fit(batches, steps_per_epoch=30, verbose=0),
        "has no more elements: it had 5",
    )
    fitted(model, epochs=1)  # and all goes on


def test_arguments_that_conflict_with_a_dataset_of_the_workers(two_workers):
    values = ClusterCoordinator(two_workers).create_per_worker_dataset(for_ever)
    model, eager = made_in(two_workers), made_in(two_workers, run_eagerly=True)
    for call, says in (
        (lambda: model.fit(for_ever), ("fit(): `x`", "`steps_per_epoch`")),
        (lambda: model.evaluate(values), ("evaluate(): `x`", "`steps`")),
        (lambda: model.fit(X, Y, validation_data=values), ("`validation_data`", "`validation_steps`")),
        (lambda: model.predict(values, steps=1), ("predict(): `x`", "no order")),
        (lambda: model.fit(values, Y, steps_per_epoch=1), ("`y` was given beside",)),
        (lambda: model.fit(values, steps_per_epoch=1, class_weight={0: 1.0}), ("`class_weight`",)),
        (
            lambda: model.fit(iter(values), steps_per_epoch=1),
            ("PerWorkerIterator", "create_per_worker_dataset"),
        ),
    ):
        message(InvalidArgumentError, call, *says)
    message(UnsupportedError, lambda: eager.fit(values, steps_per_epoch=1), "run_eagerly=True")


def test_a_dataset_of_replicax_is_read_here(two_workers):
    expected, model = classifier(), made_in(two_workers)
    model.set_weights(expected.get_weights())
    dataset = rx.data.from_arrays((X, Y)).batch(BATCH)
    options = {"verbose": 0, "return_dict": True}
    same(expected.evaluate(X, Y, batch_size=BATCH, **options), model.evaluate(dataset, **options))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
        lambda: "rmsprop",
    ],
)
def test_compile_may_be_called_outside_the_scope(optimizer):
    """The optimizer was made there too: its rate and its iterations are then on the servers."""
    expected = classifier(optimizer)
    with in_memory_strategy(ps=2) as strategy:
        with strategy.scope():
            model = keras.models.clone_model(expected)
        model.set_weights(expected.get_weights())
        model.compile(optimizer(), expected.loss, metrics=["accuracy"])
        given = model.optimizer
        run = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, **run).history
        assert model.optimizer is given
        assert int(given.iterations.numpy()) == 12
    same(expected.fit(X, Y, **run).history, history)


# --- the coordinator ------------------------------------------------------------------------------------


def test_the_coordinator_is_the_users_or_the_strategys():
    with in_memory_strategy() as strategy:
        model = made_in(strategy)
        with ClusterCoordinator(strategy, max_staleness=3) as coordinator:
            model.evaluate(X, Y, verbose=0)
            assert coordinator.statistics()["closures"]["finished"] == 2
            assert strategy.own_coordinator is None
        model.evaluate(X, Y, verbose=0)
        own = strategy.own_coordinator
        assert ClusterCoordinator(strategy) is own
        gc.collect()
        model.evaluate(X, Y, verbose=0)
        assert strategy.own_coordinator is own
    with pytest.raises(ContextError, match="closed"):
        own.schedule(lambda: 1)


def test_deleted_strategy_is_freed_with_its_coordinator():
    with in_memory_strategy() as strategy:
        coordinator_of(strategy)
        gone = weakref.ref(strategy)
        del strategy
    until = time.monotonic() + 60
    while gone() is not None and time.monotonic() < until:  # a thread that ends may have it for a moment
        gc.collect()
    assert gone() is None


# --- tasks that are processes ---------------------------------------------------------------------------
