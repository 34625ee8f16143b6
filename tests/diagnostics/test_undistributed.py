"""A batch that was not distributed is said once; everything else that is whole on all replicas is silent."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import replicax as rx
from replicax._src.diagnostics import undistributed


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(undistributed, "_warned", set())


X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X.sum(1)


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def dataset():
    return rx.data.from_arrays((X, Y)).batch(4)


def average(w, batch):
    x, y = batch
    return rx.nn.compute_average_loss((x @ w - y) ** 2)


def functional(w, batch):
    gradient = jax.grad(average)(w, batch)
    return w - 0.1 * rx.get_replica_context().all_reduce("sum", gradient)


def keras_step(strategy, *layers):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((model(x, training=True)[:, 0] - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def test_plain_arrays_of_a_batch_are_named_once_with_the_remedy(strategy, caplog):
    w = jnp.zeros(3)
    for start in (0, 4):
        w = strategy.run(functional, args=(w, (X[start : start + 4], Y[start : start + 4])))
    (told,) = caplog.messages
    assert "the batch (args[1][0], args[1][1]) was not distributed" in told
    assert "each of the 2 replicas computes all of its rows" in told
    assert "strategy.experimental_distribute_dataset(dataset)" in told
    assert f"{__file__}:" in told


def test_arrays_of_a_dataset_that_was_not_distributed_are_named(strategy, caplog):
    for batch in dataset():
        strategy.run(lambda batch: jnp.float32(batch[0].shape[0]), args=(batch,))
    (told,) = caplog.messages
    assert "the batch (args[0][0], args[0][1]) was not distributed" in told


def test_batch_with_an_axis_of_devices_gets_its_shape(strategy, caplog):
    batch = (X.reshape(2, 4, 3), Y.reshape(2, 4, 1))

    def step(w, batch):
        x, y = batch
        return rx.nn.compute_average_loss((x @ w - y)[:, 0] ** 2)

    strategy.run(step, args=(jnp.zeros((3, 1)), batch))
    (told,) = caplog.messages
    assert "first make the batch [global batch, ...], here of 8 rows: x.reshape(-1, *x.shape[2:])" in told


@pytest.mark.parametrize("layers", [[], [lambda: keras.layers.Dropout(0.5)]], ids=["dense", "dropout"])
def test_keras_loop_over_a_dataset_that_was_not_distributed_is_named(strategy, layers, caplog):
    step = keras_step(strategy, *(make() for make in layers))

    @rx.function
    def function(batch):
        return strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)

    for batch in dataset():
        function(batch)
    (told,) = caplog.messages
    assert "was not distributed" in told


def test_arrays_in_a_closure_are_named(strategy, caplog):
    batch = X, Y
    strategy.run(lambda: average(jnp.zeros(3), batch))
    (told,) = caplog.messages
    assert "was not distributed" in told


def distributed(strategy):
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    return batch


def with_weights_of_as_many_rows(strategy):
    """A weight [4, 3], and 4 rows for each replica."""
    w = np.ones((4, 3), np.float32)
    strategy.run(lambda w, batch: average(w[0], batch), args=(w, distributed(strategy)))


def with_parameters_and_optimizer_state(strategy):
    optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.adam(0.1))
    w = jnp.zeros(3)

    def step(w, state, key, rate, batch):
        gradient = jax.grad(average)(w + 0 * jax.random.normal(key, w.shape) * rate, batch)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(w, updates), state

    strategy.run(step, args=(w, optimizer.init(w), jax.random.key(0), 0.5, distributed(strategy)))


def without_a_batch(strategy):
    w = np.ones((8, 3), np.float32)
    strategy.run(lambda w, scale: scale * jnp.sum(w**2), args=(w, np.float32(2)))


def rows_by_the_number_of_the_replica(strategy):
    def step(x, y):
        start = 4 * rx.get_replica_context().replica_id_in_sync_group
        rows = (jax.lax.dynamic_slice_in_dim(a, start, 4) for a in (x, y))
        return average(jnp.zeros(3), tuple(rows))

    strategy.run(step, args=(X[:4].repeat(2, axis=0), Y[:4].repeat(2)))


def regularizer(strategy):
    w = np.ones(8, np.float32)
    strategy.run(lambda w: rx.nn.scale_regularization_loss(jnp.sum(w**2)), args=(w,))


def values_of_a_function(strategy):
    x = strategy.experimental_distribute_values_from_function(
        lambda context: X[4 * context.replica_id_in_sync_group :][:4]
    )
    strategy.run(lambda x: rx.nn.compute_average_loss(jnp.sum(x, axis=1)), args=(x,))


def one_replica(strategy):
    del strategy
    alone = rx.MirroredStrategy(["cpu:0"])
    alone.run(functional, args=(jnp.zeros(3), (X, Y)))


def evaluation_with_a_constant_table(strategy):
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    strategy.run(lambda batch, table: average(table[0], batch), args=(batch, X[:4]))


def rows_in_a_variable_of_each_replica(strategy):
    with strategy.scope():
        rows = rx.Variable(jnp.ones((4, 4)), synchronization="on_read", aggregation="sum")
    strategy.run(
        lambda w: rx.nn.compute_average_loss(jnp.sum(rows @ w, axis=1)), args=(np.ones((4, 4), np.float32),)
    )


SILENT = [
    rows_in_a_variable_of_each_replica,
    with_weights_of_as_many_rows,
    with_parameters_and_optimizer_state,
    without_a_batch,
    rows_by_the_number_of_the_replica,
    regularizer,
    values_of_a_function,
    one_replica,
    evaluation_with_a_constant_table,
]


@pytest.mark.parametrize("program", SILENT)
def test_program_whose_batch_is_distributed_or_that_has_none_is_silent(strategy, program, caplog):
    program(strategy)
    assert not caplog.messages
