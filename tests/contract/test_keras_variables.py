"""Keras variables where JAX wants arrays: in ``jnp``, and in functions that JAX traces."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx

USES = {
    "square": lambda w, x: jnp.square(w),
    "clip": lambda w, x: jnp.clip(w, 0.0, 1.5),
    "sum": lambda w, x: jnp.sum(w),
    "matmul": lambda w, x: w @ x,
    "dot": lambda w, x: jnp.dot(x, w),
    "where": lambda w, x: jnp.where(w > 1, w, x),
    "stack": lambda w, x: jnp.stack([w, x]),
    "jit": lambda w, x: jax.jit(lambda pytree: jnp.exp(pytree["w"]) * x)({"w": w}),
    "jit_in_jit": lambda w, x: jax.jit(lambda x: jnp.square(w) * x)(x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda v: jnp.sin(v) * x)(w),
    "scan": lambda w, x: jax.lax.scan(lambda v, _: (jnp.square(v) * x, None), w, None, length=2)[0],
    "softmax": lambda w, x: jax.nn.softmax(w) * x,
}
START, X = np.array([0.5, 2.0], "float32"), np.array([1.0, 3.0], "float32")


def total(use, w, x):
    return jnp.sum(use(w, x))


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return keras.Variable(START)


def called(strategy, fn, way):
    options = rx.RunOptions(eager=True) if way == "eager" else None

    def run():
        return strategy.run(fn, options=options)

    result = rx.function(run)() if way == "function" else run()
    return jax.tree.map(lambda value: strategy.experimental_local_results(value)[0], result)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("way", ["run", "function", pytest.param("eager", marks=pytest.mark.rest)])
def test_in_a_step_under_a_tape(strategy, variable, way, use):
    def step():
        with rx.GradientTape() as tape:
            value = total(use, variable, X)
        return value, tape.gradient(value, variable)

    value, gradient = called(strategy, step, way)
    expected = jax.value_and_grad(lambda w: total(use, w, X))(START)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-6)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_in_a_scope_and_outside_every_function(strategy, variable, use):
    expected = total(use, START, X)
    with strategy.scope():
        np.testing.assert_allclose(total(use, variable, X), expected, rtol=1e-6)
    np.testing.assert_allclose(total(use, variable, X), expected, rtol=1e-6)


def test_in_merge_call(strategy, variable):
    merged = strategy.run(lambda: rx.get_replica_context().merge_call(lambda s: jnp.square(variable)))
    assert strategy.experimental_local_results(merged)[0].tolist() == [0.25, 4.0]


def test_reads_return_the_assigned_value(strategy, variable):
    def step():
        variable.assign(jnp.square(variable))
        return jnp.square(variable)

    got = [strategy.experimental_local_results(strategy.run(step))[0].tolist() for _ in range(2)]
    assert got == [[0.0625, 16.0], [0.00390625, 256.0]]


def test_variables_stay_leaves_in_tree_map(strategy, variable):
    """Otherwise the results of ``jax.tree.map`` could not be assigned."""
    jax.tree.map(lambda v, gradient: v.assign_sub(gradient), [variable], [X])
    assert np.asarray(variable.value).tolist() == [-0.5, -1.0]


def test_class_of_the_user(strategy):
    class Positive(keras.Variable):
        pass

    with strategy.scope():
        variable = Positive(START)
    got = strategy.run(lambda: jnp.square(variable))
    assert strategy.experimental_local_results(got)[0].tolist() == [0.25, 4.0]
