"""Keras state in replica functions: statistics, random streams, metrics, losses, counters."""

import functools
import gc

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx


@functools.cache
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def per_replica(*values):
    return strategy().experimental_distribute_values_from_function(
        lambda context: np.asarray(values[context.replica_id_in_sync_group])
    )


def components(value):
    return [np.asarray(v) for v in strategy().experimental_local_results(value)]


# --- moving statistics --------------------------------------------------------------------------------


def test_moving_statistics_are_the_mean_of_the_replicas_updates():
    momentum = 0.8
    with strategy().scope():
        layer = layers.BatchNormalization(momentum=momentum)
        layer.build((None, 3))
    data = np.random.default_rng(0).normal(size=(3, 2, 5, 3)).astype("float32")  # step, replica, row, feature
    mean, variance = np.zeros(3), np.ones(3)
    for batches in data:
        outputs = components(strategy().run(lambda x: layer(x, training=True), args=(per_replica(*batches),)))
        for batch, output in zip(batches, outputs):
            normalised = (batch - batch.mean(axis=0)) / np.sqrt(batch.var(axis=0) + layer.epsilon)
            np.testing.assert_allclose(output, normalised, rtol=1e-4, atol=1e-5)
        mean = momentum * mean + (1 - momentum) * batches.mean(axis=1).mean(axis=0)
        variance = momentum * variance + (1 - momentum) * batches.var(axis=1).mean(axis=0)
    np.testing.assert_allclose(layer.moving_mean.value, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.value, variance, rtol=1e-5)
    inference = components(strategy().run(lambda x: layer(x, training=False), args=(per_replica(*data[0]),)))
    np.testing.assert_allclose(inference[1], layer(data[0][1], training=False), rtol=1e-5, atol=1e-6)


def test_moving_statistics_of_uneven_replicas_are_weighted_by_their_rows():
    with strategy().scope():
        layer = layers.BatchNormalization(momentum=0.5)
        layer.build((None, 3))
    rows = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
    strategy().run(lambda x: layer(x, training=True), args=(per_replica(rows[:5], rows[5:]),))
    variance = (5 * rows[:5].var(axis=0) + 2 * rows[5:].var(axis=0)) / 7
    np.testing.assert_allclose(layer.moving_mean.value, 0.5 * rows.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.value, 0.5 + 0.5 * variance, rtol=1e-5)


def test_statistics_that_are_the_same_are_not_communicated():
    with strategy().scope():
        layer = layers.Layer()
        layer.average = layer.add_weight(shape=(), initializer="ones", trainable=False)
    strategy().run(lambda: layer.average.assign(layer.average * 0.5))
    assert float(layer.average.value) == 0.5


def test_integer_state_takes_the_first_replicas_value():
    with strategy().scope():
        layer = layers.Layer()
        layer.seen = layer.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
    strategy().run(lambda x: layer.seen.assign(layer.seen + x), args=(per_replica(3, 5),))
    assert int(layer.seen.value) == 3


# --- random streams -----------------------------------------------------------------------------------


def dropout_masks(run, layer, steps):
    """The masks of some steps, [step][replica], as sets of kept positions."""
    ones = np.ones((4, 8), "float32")
    masks = []
    for _ in range(steps):
        masks.append([np.asarray(v) != 0 for v in run(layer, ones)])
    return masks


def in_replicas(layer, x):
    return components(strategy().run(lambda x: layer(x, training=True), args=(x,)))


def plainly(layer, x):
    return [layer(x, training=True)]


def test_dropout_masks_differ_between_replicas_and_steps_and_the_first_replica_draws_as_one_device():
    with strategy().scope():
        layer = layers.Dropout(0.5, seed=7)
    masks = dropout_masks(in_replicas, layer, 3)
    expected = dropout_masks(plainly, layers.Dropout(0.5, seed=7), 3)
    for step in range(3):
        np.testing.assert_array_equal(masks[step][0], expected[step][0])
    distinct = {mask.tobytes() for step in masks for mask in step}
    assert len(distinct) == 6
    assert 0.3 < np.mean([mask for step in masks for mask in step]) < 0.7


def test_random_stream_continues_in_every_context():
    """In replicas, in plain Keras, and in replicas again: one stream, as on one device."""
    with strategy().scope():
        layer, reference = layers.Dropout(0.5, seed=7), layers.Dropout(0.5, seed=7)
    seen = []
    for run in (in_replicas, plainly, in_replicas):
        seen += dropout_masks(run, layer, 1)
    expected = dropout_masks(plainly, reference, 3)
    for step in range(3):
        np.testing.assert_array_equal(seen[step][0], expected[step][0])


def test_a_restored_seed_repeats_the_masks():
    with strategy().scope():
        layer = layers.Dropout(0.5, seed=7)
    state = layer.seed_generator.state
    start = np.asarray(state.value)
    once = dropout_masks(in_replicas, layer, 2)
    state.assign(start)
    np.testing.assert_array_equal(dropout_masks(in_replicas, layer, 2), once)


def test_two_draws_in_one_step_differ():
    with strategy().scope():
        generator = keras.random.SeedGenerator(3)
    first, second = strategy().run(
        lambda: (keras.random.uniform((2,), seed=generator), keras.random.uniform((2,), seed=generator))
    )
    drawn = {v.tobytes() for v in components(first) + components(second)}
    assert len(drawn) == 4


# --- metrics ------------------------------------------------------------------------------------------


def test_a_metric_is_aggregated_in_every_context():
    with strategy().scope():
        metric = keras.metrics.Mean()

    def step(x):
        metric.update_state(x)
        return metric.result()

    inside = strategy().run(step, args=(per_replica([1.0, 2.0], [6.0, 7.0]),))
    assert [float(v) for v in components(inside)] == [4.0, 4.0]
    assert inside.is_equal
    assert float(metric.result()) == 4.0
    assert float(metric.total.value) == 16.0
    assert float(rx.function(metric.result)()) == 4.0
    strategy().run(step, args=(per_replica([0.0, 0.0], [0.0, 0.0]),))
    assert float(metric.result()) == 2.0


def test_a_metric_is_reset_in_every_context():
    with strategy().scope():
        metric = keras.metrics.Mean()
    update = lambda x: metric.update_state(x)  # noqa: E731
    for reset in (
        metric.reset_state,
        lambda: strategy().run(metric.reset_state),
        rx.function(metric.reset_state),
    ):
        strategy().run(update, args=(per_replica(1.0, 5.0),))
        assert float(metric.result()) == 3.0
        reset()
        assert float(metric.total.value) == float(metric.count.value) == 0.0


def test_a_metric_is_updated_in_a_function_outside_run():
    with strategy().scope():
        metric = keras.metrics.Sum()

    @rx.function
    def step(x):
        per_replica = strategy().run(lambda x: (metric.update_state(x), 2 * x)[1], args=(x,))
        metric.update_state(strategy().reduce("SUM", per_replica, axis=None))
        return metric.result()

    assert float(step(jnp.float32(1.0))) == 1.0 + 1.0 + 4.0
    assert float(step(jnp.float32(1.0))) == 12.0
    metric.update_state(3.0)
    assert float(metric.result()) == 15.0
    strategy().run(lambda: metric.update_state(1.0))
    assert float(metric.result()) == 17.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.metrics.SparseCategoricalAccuracy(),
        lambda: keras.metrics.AUC(num_thresholds=10),
        lambda: keras.metrics.MeanSquaredError(),
        lambda: keras.metrics.RootMeanSquaredError(),
        lambda: keras.metrics.Precision(),
        lambda: keras.metrics.F1Score(threshold=0.5),
        lambda: keras.metrics.R2Score(),
        lambda: keras.metrics.CategoricalCrossentropy(),
    ],
    ids=["accuracy", "auc", "mse", "rmse", "precision", "f1", "r2", "crossentropy"],
)
@pytest.mark.rest
def test_metrics_equal_one_device(make):
    rng = np.random.default_rng(0)
    truth = np.eye(3, dtype="float32")[rng.integers(0, 3, size=(2, 6))]
    predicted = rng.dirichlet(np.ones(3), size=(2, 6)).astype("float32")
    with strategy().scope():
        metric = make()
    expected = make()
    to_truth = (lambda t: np.argmax(t, axis=-1)) if "Sparse" in type(metric).__name__ else (lambda t: t)
    inside = None
    for t, p in zip(truth, predicted):
        t = to_truth(t)
        expected.update_state(t, p)

        def step(t, p):
            metric.update_state(t, p)
            return metric.result()

        inside = strategy().run(step, args=(per_replica(t[:3], t[3:]), per_replica(p[:3], p[3:])))
    np.testing.assert_allclose(metric.result(), expected.result(), rtol=1e-5, atol=1e-6)
    for value in components(inside):
        np.testing.assert_allclose(value, expected.result(), rtol=1e-5, atol=1e-6)


def test_metric_of_the_user_with_its_own_result():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.sums = self.add_variable((3,), "zeros", name="sums")

        def update_state(self, x):
            self.sums.assign_add(x)

        def result(self):
            return jnp.max(self.sums.value)

    with strategy().scope():
        metric = Largest()

    def step(x):
        metric.update_state(x)
        return metric.result()

    inside = strategy().run(step, args=(per_replica([1.0, 5.0, 0.0], [5.0, 0.0, 4.0]),))
    assert [float(v) for v in components(inside)] == [6.0, 6.0]
    assert float(metric.result()) == 6.0


# --- losses, counters, assignments from outside -------------------------------------------------------


class Penalised(layers.Layer):
    """Adds a loss that depends on the activations, and has a regulariser."""

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones", regularizer=keras.regularizers.L2(0.5))

    def call(self, x):
        self.add_loss(jnp.sum(x) * self.w * 0.1)
        return x * self.w


def test_losses_of_layers_are_seen_in_the_step_and_leave_no_tracer_behind():
    with strategy().scope():
        model = keras.Sequential([keras.Input((2,)), Penalised()])
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        with rx.GradientTape() as tape:
            model(x, training=True)
            added, regular = model.losses
            loss = added + rx.nn.scale_regularization_loss(regular)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )
        return added, regular

    x = per_replica(np.full((1, 2), 1.0, "float32"), np.full((1, 2), 2.0, "float32"))
    added, regular = strategy().run(step, args=(x,))
    np.testing.assert_allclose([float(v) for v in components(added)], [0.2, 0.4], rtol=1e-6)
    assert [float(v) for v in components(regular)] == [0.5, 0.5]
    np.testing.assert_allclose(float(model.layers[0].w.value), 1 - 0.1 * (0.2 + 0.4 + 1.0), rtol=1e-6)
    assert all(not isinstance(loss, jax.core.Tracer) for loss in model.losses)


def small_training(schedule=0.5):
    with strategy().scope():
        layer = layers.Dense(1, use_bias=False, kernel_initializer="ones")
        layer.build((None, 1))
        optimizer = keras.optimizers.SGD(schedule)
        optimizer.build(layer.trainable_variables)

    def step(x):
        with rx.GradientTape() as tape:
            loss = jnp.sum(layer(x))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        )
        return optimizer.learning_rate

    return layer, optimizer, lambda: strategy().run(step, args=(per_replica([[1.0]], [[2.0]]),))


def test_learning_rate_changed_outside_is_used_without_a_new_trace():
    layer, optimizer, step = small_training()
    gc.collect()  # the programs of earlier tests' models go with them
    before = strategy().runner.num_programs
    for rate in (0.5, 0.25, 0.125):
        start = float(layer.kernel.value[0, 0])
        optimizer.learning_rate = rate
        step()
        assert float(layer.kernel.value[0, 0]) == start - rate * 3.0
    assert strategy().runner.num_programs == before + 1


def test_a_learning_rate_schedule_follows_the_iterations():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.125])
    layer, optimizer, step = small_training(schedule)
    rates = [float(components(step())[0]) for _ in range(4)]
    assert int(optimizer.iterations.value) == 4
    assert float(layer.kernel.value[0, 0]) == 1 - 3 * (0.5 + 0.5 + 0.125 + 0.125)
    assert rates[-1] == 0.125


def test_weights_assigned_from_outside_are_used_by_the_next_step():
    layer, _, step = small_training()
    step()
    layer.set_weights([np.asarray([[10.0]], "float32")])
    step()
    assert float(layer.kernel.value[0, 0]) == 10 - 0.5 * 3
    layer.kernel.assign(layer.kernel * 2)
    step()
    assert float(layer.kernel.value[0, 0]) == 17 - 0.5 * 3


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras 3.15, in save
def test_a_trained_model_is_an_ordinary_keras_model(tmp_path):
    layer, _, step = small_training()
    step()
    model = keras.Sequential([keras.Input((1,)), layer])
    expected = 3.0 * float(layer.kernel.value[0, 0])
    np.testing.assert_allclose(model.predict(np.asarray([[3.0]]), verbose=0), [[expected]])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(np.asarray([[3.0]])), [[expected]])


# --- stateless Keras inside a step --------------------------------------------------------------------


def test_a_users_stateless_scope_reads_what_it_does_not_map_from_the_step():
    """Otherwise the variable would become a constant of the program."""
    with strategy().scope():
        mapped, free = (keras.Variable(1.0, dtype="float32") for _ in range(2))

    def step(x):
        with keras.StatelessScope([(mapped, x)]):
            return mapped + 10 * free

    for value in (1.0, 2.0):
        free.assign(value)
        result = strategy().run(step, args=(per_replica(np.float32(3), np.float32(4)),))
        assert [float(v) for v in components(result)] == [3 + 10 * value, 4 + 10 * value]


def test_stateless_call_and_stateless_apply_in_a_step():
    """The functional form, with ``jax.grad``; the state is assigned at the end."""
    with strategy().scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1), layers.BatchNormalization()])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)

    def step(x):
        def loss_of(weights, state):
            y, state = model.stateless_call(weights, state, x, training=True)
            return jnp.sum(y**2) / 4 + jnp.sum(weights[0]) / 2, state

        weights = [v.value for v in model.trainable_variables]
        state = [v.value for v in model.non_trainable_variables]
        (loss, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, state)
        gradients = rx.get_replica_context().all_reduce("SUM", gradients)
        bindings = [v.value for v in optimizer.variables]
        weights, bindings = optimizer.stateless_apply(bindings, gradients, weights)
        variables = [*model.trainable_variables, *model.non_trainable_variables, *optimizer.variables]
        for variable, value in zip(variables, [*weights, *state, *bindings], strict=True):
            variable.assign(value)
        return loss

    before = [np.asarray(v.value) for v in model.variables]
    x = np.random.default_rng(0).normal(size=(2, 2, 2)).astype("float32")
    for _ in range(2):
        strategy().run(step, args=(per_replica(*x),))
    assert int(optimizer.iterations.value) == 2
    for variable, start in zip(model.variables, before, strict=True):
        assert np.all(np.isfinite(variable.value))
        if variable.path.split("/")[-1] in ("kernel", "moving_mean", "moving_variance"):
            assert not np.allclose(variable.value, start), variable.path
