"""Assignments in conditions, loops and recomputed functions of layers, in ``fit``, ``evaluate``, ``predict`` and ``run``.

``rx.cond`` passes them through its branches. Other functions that JAX traces on its own raise one typed error.
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx

REST = pytest.mark.rest
SUMS = (3.0, -1.0, 2.0, 5.0)
"""The sum of each batch of 4 rows; three are positive."""


def rows():
    return np.repeat(np.asarray(SUMS, np.float32) / 8, 4)[:, None] * np.ones((1, 2), np.float32)


class PerSign(layers.Layer):
    """Counts batches with a positive sum; with the others it subtracts."""

    def build(self, shape):
        self.positive = self.add_weight(shape=(), initializer="zeros", trainable=False, name="positive")
        self.others = self.add_weight(shape=(), initializer="ones", trainable=False, name="others")

    def call(self, x):
        def count():
            self.positive.assign_add(0.5)
            self.positive.assign(self.positive.value + 0.5)
            return x + 1

        def subtract():
            self.others.assign_sub(0.001)
            return x

        return rx.cond(ops.sum(x) > 0, count, subtract)


def strategies():
    return {
        "no_strategy": lambda: None,
        "one_device": lambda: rx.OneDeviceStrategy("cpu:1"),
        "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
        "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        "sharded": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    }


def model_of(strategy, layer, dtype=None, **options):
    if strategy is not None:
        with strategy.scope():
            return model_of(None, layer, dtype, **options)
    keras.utils.set_random_seed(0)
    made = layer(dtype=dtype)
    model = keras.Sequential([keras.Input((2,)), made, layers.Dense(1, dtype=dtype)])
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model, made


def called(model, method):
    x = rows()
    if method == "predict":
        return model.predict(x, batch_size=4, verbose=0)
    if method == "evaluate":
        return model.evaluate(x, x[:, :1], batch_size=4, verbose=0)
    return model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0).history["loss"][0]


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("no_strategy", {}),
        ("one_device", {}),
        ("mirrored", {}),
        pytest.param("mirrored", {"run_eagerly": True}, marks=REST),
        pytest.param("mirrored", {"steps_per_execution": 2}, marks=REST),
        pytest.param("mirrored", {"jit_compile": False}, marks=REST),
        pytest.param("central", {}, marks=REST),
        pytest.param("sharded", {}, marks=REST),
        pytest.param("one_device", {"run_eagerly": True}, marks=REST),
    ],
)
def test_only_the_branch_taken_assigns(name, options, method):
    model, layer = model_of(strategies()[name](), PerSign, **options)
    expected, _ = model_of(None, lambda dtype: layers.Lambda(lambda x: x + (ops.sum(x) > 0)))
    np.testing.assert_allclose(called(model, method), called(expected, method), rtol=1e-5)
    assert float(layer.positive.value) == 3.0
    np.testing.assert_allclose(float(layer.others.value), 0.999, rtol=1e-6)


class Rare(layers.Layer):
    """Assigns a variable in a branch that no batch takes."""

    def build(self, shape):
        constant = keras.initializers.Constant(1.001)
        self.n = self.add_weight(shape=(), initializer=constant, trainable=False)

    def call(self, x):
        return rx.cond(ops.sum(x) > 100, lambda: ops.cast(self.n.assign(self.n * 0), x.dtype) * x, lambda: x)


def test_a_branch_that_is_not_taken_leaves_variables_exact_in_mixed_precision():
    model, layer = model_of(strategies()["mirrored"](), Rare, dtype="mixed_bfloat16")
    called(model, "fit")
    assert np.asarray(layer.n.value) == np.float32(1.001)


def test_a_scope_of_the_users_gets_what_a_branch_assigns():
    v, w = keras.Variable(1.0), keras.Variable(1.001, autocast=True)

    @jax.jit
    def step(x):
        with keras.StatelessScope() as scope:
            rx.cond(x > 0, lambda: v.assign_add(x), lambda: w.assign(w * 2))
        return scope.get_current_value(v), scope.get_current_value(w)

    assert [float(value) for value in step(2.0)] == [3.0, np.float32(1.001)]
    assert [float(value) for value in step(-2.0)] == [1.0, np.float32(2.002)]
    assert (float(v.value), float(w.value)) == (1.0, np.float32(1.001))


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_a_stateless_call_in_run_gets_what_a_branch_assigns(name):
    strategy = strategies()[name]()
    with strategy.scope():
        count, layer = rx.Variable(0.0), PerSign()
        layer.build((None, 2))

    def step(x):
        def both():
            count.assign_add(1.0)
            return layer.stateless_call([], [v.value for v in layer.non_trainable_variables], x)[1]

        return rx.cond(jnp.sum(x) > 0, both, lambda: [v.value for v in layer.non_trainable_variables])

    new = strategy.run(step, args=(rows()[:4],))
    new = [float(strategy.experimental_local_results(v)[0]) for v in new]
    assert (float(count.value), *new, float(layer.positive.value)) == (1.0, 1.0, 1.0, 0.0)


class Nested(layers.Layer):
    """A condition inside another one, a variable that both assign, and layers with state in a branch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.drop, self.norm = layers.Dropout(0.5, seed=1), layers.BatchNormalization()

    def build(self, shape):
        self.n = self.add_weight(shape=(), initializer="zeros", trainable=False, name="n")
        self.norm.build(shape)

    def call(self, x, training=False):
        self.n.assign_add(100.0)

        def outer():
            self.n.assign_add(1.0)
            rx.cond(ops.sum(x) > 4, lambda: self.n.assign_add(10.0), lambda: None)
            return self.norm(self.drop(x, training=training), training=training)

        y = rx.cond(ops.sum(x) > 0, outer, lambda: x)
        self.n.assign_add(0.5)
        return y


@pytest.mark.parametrize("name", ["mirrored", pytest.param("no_strategy", marks=REST)])
def test_nested_conditions_and_layers_with_state_in_a_branch(name):
    model, layer = model_of(strategies()[name](), Nested)
    assert np.isfinite(called(model, "fit"))
    assert float(layer.n.value) == 4 * 100.5 + 3 * 1 + 10
    assert not np.allclose(layer.norm.moving_mean.value, 0)
    eager, other = model_of(None, Nested, run_eagerly=True)
    called(eager, "fit")
    for got, expected in zip(layer.variables, other.variables, strict=True):
        np.testing.assert_allclose(np.asarray(got.value), np.asarray(expected.value), rtol=1e-5, atol=1e-6)


# --- what cannot leave -------------------------------------------------------------------------------------


def within(wrap):
    """Returns a layer that counts in an inner function, which ``wrap`` makes of a function of an array."""

    class Counting(layers.Layer):
        def build(self, shape):
            self.n = self.add_weight(shape=(), initializer="zeros", trainable=False, name="n")

        def call(self, x):
            def inner(y):
                self.n.assign_add(1.0)
                return y * 2

            return wrap(inner, x)

    return Counting


WRAPS = {
    "ops.cond": lambda f, x: ops.cond(ops.sum(x) > 0, lambda: f(x), lambda: x),
    "ops.scan": lambda f, x: ops.scan(lambda c, r: (c, f(r)), 0.0, x)[1],
    "lax.scan": lambda f, x: jax.lax.scan(lambda c, r: (c, f(r)), 0.0, x)[1],
    "ops.while_loop": lambda f, x: ops.while_loop(lambda y: ops.sum(y) < 0, lambda y: (f(y),), (x,))[0],
    "jax.checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "keras.remat": lambda f, x: keras.remat(f)(x),
    "jax.jit": lambda f, x: jax.jit(f)(x),
}


@pytest.mark.parametrize("how", ["fit", "evaluate", "predict", "run", "fit_eagerly"])
@pytest.mark.parametrize(
    "wrap", ["ops.cond", "ops.scan", "keras.remat", *(pytest.param(w, marks=REST) for w in list(WRAPS)[2:])]
)
def test_a_value_that_cannot_leave_an_inner_function_is_one_error_with_the_line(wrap, how):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def run():
        with strategy.scope():
            layer = within(WRAPS[wrap])()
            layer.build((None, 2))
        strategy.run(lambda x: layer(x), args=(rows()[:4],))

    def keras_method():
        model, _ = model_of(strategy, within(WRAPS[wrap]), run_eagerly=how == "fit_eagerly")
        called(model, how.removesuffix("_eagerly"))

    with pytest.raises(rx.errors.TraceError, match=r"n' is assigned at .*test_conditions_in_fit\.py:\d+"):
        (run if how == "run" else keras_method)()


class AddsLoss(layers.Layer):
    cond = staticmethod(rx.cond)

    def call(self, x):
        def inner():
            self.add_loss(ops.sum(x))
            return x

        return self.cond(ops.sum(x) > 0, inner, lambda: x)


@pytest.mark.parametrize("cond", [rx.cond, ops.cond], ids=["rx.cond", "ops.cond"])
def test_a_loss_that_a_branch_adds_is_an_error_not_lost(cond, monkeypatch):
    monkeypatch.setattr(AddsLoss, "cond", staticmethod(cond))
    model, _ = model_of(strategies()["mirrored"](), AddsLoss)
    with pytest.raises(rx.errors.TraceError, match=r"adds a loss at .*test_conditions_in_fit\.py:\d+"):
        called(model, "fit")


@pytest.mark.parametrize(
    "wrap", [jax.vmap, lambda f: jax.grad(lambda r: ops.sum(f(r)))], ids=["vmap", "grad"]
)
def test_values_that_can_leave_a_function_of_jax_still_do(wrap):
    """A count under jax.vmap is not batched, and under jax.grad not differentiated."""
    model, layer = model_of(strategies()["mirrored"](), within(lambda f, x: wrap(f)(x)))
    assert np.isfinite(called(model, "fit"))
    assert float(layer.n.value) == 4.0


@pytest.mark.parametrize(
    "wrap", [jax.vmap, lambda f: jax.grad(lambda r: ops.sum(f(r)))], ids=["vmap", "grad"]
)
def test_batched_and_differentiated_values_do_not_leave(wrap):
    class Last(layers.Layer):
        def build(self, shape):
            self.n = self.add_weight(shape=(), initializer="zeros", trainable=False, name="n")

        def call(self, x):
            return wrap(lambda row: self.n.assign(ops.sum(row)) + row)(x)

    model, _ = model_of(strategies()["mirrored"](), Last)
    with pytest.raises(rx.errors.TraceError, match="n' is assigned at"):
        called(model, "fit")
