"""Which values passed from step to step have diverged, and which ones replicas keep separately on purpose."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax.errors import DivergenceError, InvalidArgumentError, PerReplicaUseError

CHECKED = rx.RunOptions(check_same=True)


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def batch(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.full((3, 2), context.replica_id_in_sync_group + 1, np.float32)
    )


def loop(strategy, step, *state, options=CHECKED):
    for _ in range(3):
        state = strategy.run(step, (*state, batch(strategy)), options=options)
    return state


def all_reduce(value):
    return rx.get_replica_context().all_reduce("sum", value)


def reduced(w, x):
    return (w - 0.1 * all_reduce(jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)),)


def mean_over_axis(w, x):
    return (w - 0.1 * jax.lax.pmean(jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), "replica"),)


def vouched_for(w, x):
    return (rx.assert_same(w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)),)


def sum_over_steps(total, x):
    return (total + jnp.sum(x, axis=0),)


def moving_average(mean, x):
    return (0.9 * mean + 0.1 * jnp.mean(x, axis=0),)


def residual_of_compression(residual, x):
    gradient = jnp.mean(x, axis=0) + residual
    sent = jnp.sign(gradient)
    return (gradient - sent + 0 * all_reduce(sent),)


def chosen_elements(residual, x):
    """The large elements are sent, as floats times a mask."""
    gradient = jnp.mean(x, axis=0) + residual
    sent = gradient * (jnp.abs(gradient) > 1.0)
    return (gradient - sent,)


def returns_of_episodes(total, x):
    return (total * (1.0 - x[0] / 2) + x[0],)


def running_mean(mean, x):
    return (mean + (jnp.mean(x, axis=0) - mean) / jnp.sum(x),)


def log_likelihood(total, x):
    return (jnp.logaddexp(total, x[0]),)


MEANT = [
    reduced,
    mean_over_axis,
    vouched_for,
    sum_over_steps,
    moving_average,
    residual_of_compression,
    chosen_elements,
    returns_of_episodes,
    running_mean,
    log_likelihood,
]


@pytest.mark.parametrize("step", MEANT)
def test_intended_and_equal_values_are_not_drift(strategy, step):
    loop(strategy, step, strategy.replicate(np.zeros(2, np.float32)))


def test_per_replica_random_keys_are_not_drift(strategy):
    def step(key, old, x):
        index = rx.get_replica_context().replica_id_in_sync_group
        key, old = jax.random.fold_in(key, index), jax.random.fold_in(old, index)
        noise = jax.random.normal(key) + jax.random.normal(old)
        return key, old, jnp.sum(x) + noise

    key, old = strategy.replicate((jax.random.key(0), jax.random.PRNGKey(0)))
    for _ in range(3):
        key, old, _ = strategy.run(step, (key, old, batch(strategy)), options=CHECKED)


def test_state_that_starts_per_replica_is_not_drift(strategy):
    own = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(2, context.replica_id_in_sync_group, np.float32)
    )
    loop(strategy, lambda w, x: (jnp.tanh(w * jnp.sum(x @ w)),), own)


def test_results_of_another_function_are_not_drift(strategy):
    def predict(w, x):
        return jnp.tanh(x @ w)

    def sums(x):
        return jnp.sum(x**2)

    plain = jnp.ones((3, 2))
    strategy.run(sums, (plain,), options=CHECKED)
    predicted = strategy.run(predict, (jnp.ones(2), batch(strategy)), options=CHECKED)
    strategy.run(sums, (predicted,), options=CHECKED)


def test_returned_values_are_not_drift(strategy):
    def step(w, x):
        return jnp.sum(x @ w), w * jnp.sum(x @ w)

    w = strategy.replicate(np.ones(2, np.float32))
    for _ in range(3):
        strategy.run(step, (w, batch(strategy)), options=CHECKED)


def drifts(w, x):
    return (w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w),)


@pytest.mark.parametrize("begin", [np.ones, jnp.ones], ids=["numpy", "jax"])
def test_state_that_was_never_replicated_drifts_too(strategy, begin):
    message(DivergenceError, lambda: loop(strategy, drifts, begin(2, "float32")), "args[0]", __file__)


def test_a_step_that_was_warmed_up_before_drifts_too(strategy):
    w = strategy.replicate(np.ones(2, np.float32))
    strategy.run(drifts, (w, batch(strategy)), options=CHECKED)
    message(DivergenceError, lambda: loop(strategy, drifts, w), "args[0]")


def test_a_function_whose_first_result_is_dropped_drifts_too(strategy):
    @rx.function
    def train(w, x):
        return strategy.run(drifts, (w, x), options=CHECKED)[0]

    def run():
        w = strategy.replicate(np.ones(2, np.float32))
        train(w, batch(strategy))
        for _ in range(3):
            w = train(w, batch(strategy))

    message(DivergenceError, run, "args[0]")


def test_state_that_has_drifted_is_no_array_and_says_what_to_sum(strategy, caplog):
    (w,) = loop(strategy, drifts, strategy.replicate(np.ones(2, np.float32)), options=None)
    text = message(
        PerReplicaUseError, lambda: np.asarray(w), "args[0] of drifts", "all_reduce('sum', gradients)"
    )
    assert "strategy.reduce" not in text
    (other,) = strategy.run(lambda x: (jnp.sum(x),), args=(batch(strategy),))
    message(PerReplicaUseError, lambda: np.asarray(other), "strategy.reduce")


def test_step_with_an_existing_program_drifts_too(strategy):
    own = strategy.experimental_distribute_values_from_function(lambda context: np.ones(2, np.float32))
    strategy.run(drifts, (own, batch(strategy)), options=CHECKED)
    w = strategy.replicate(np.ones(2, np.float32))
    message(DivergenceError, lambda: loop(strategy, drifts, w), "args[0]")


def step_of_a_product(w, x):
    return (w - 0.1 * 2 * (w * x[0, 0] - 1) * x[0, 0],)


def step_of_a_bias(b, x):
    return (b - 0.1 * jax.grad(lambda b: (jnp.tanh(b) - x[0, 0]) ** 2)(b),)


@pytest.mark.parametrize("step", [step_of_a_product, step_of_a_bias])
def test_gradient_descent_without_a_sum_is_not_an_accumulation(strategy, step):
    message(DivergenceError, lambda: loop(strategy, step, strategy.replicate(np.float32(0.0))), "args[0]")


def decorated(fn):
    @functools.wraps(fn)
    def call(*args):
        return fn(*args)

    return call


class Method:
    def __init__(self, fn):
        self._fn = fn

    def __call__(self, *args):
        return self._fn(*args)

    def call(self, *args):
        return self._fn(*args)


WRAPPED = {
    "partial": lambda fn: functools.partial(fn, scale=2.0),
    "decorator": decorated,
    "jit": jax.jit,
    "function": rx.function,
    "argument": lambda fn: functools.partial(lambda fn, *args: fn(*args), fn),
    "default": lambda fn: lambda w, x, fn=fn: fn(w, x),
    "object": Method,
    "method": lambda fn: Method(fn).call,
}


def noisy(x, own, scale=1.0):
    return jnp.tanh(x * jnp.sum(own)) * scale


def head(x, own, scale=1.0):
    return jnp.sin(x @ own.T @ own) * scale


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_results_of_another_wrapped_function_are_not_drift(strategy, wrap):
    ones = jnp.ones((3, 2))
    strategy.run(wrap(head), (ones, batch(strategy)), options=CHECKED)
    made = strategy.run(wrap(noisy), (ones, batch(strategy)), options=CHECKED)
    strategy.run(wrap(head), (made, batch(strategy)), options=CHECKED)


def test_results_of_another_model_are_not_drift(strategy):
    models = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "tanh")]) for _ in range(2)]
    own = batch(strategy)
    strategy.run(models[1], (jnp.ones((3, 2)),), options=CHECKED)
    for call in (lambda model: model, lambda model: lambda x, own: model(x) * own):
        args = (own,) if call(models[0]) is not models[0] else ()
        made = strategy.run(call(models[0]), (jnp.ones((3, 2)), *args), options=CHECKED)
        strategy.run(call(models[1]), (made, *args), options=CHECKED)


@pytest.mark.parametrize("wrap", ["partial", "decorator", "jit", "function", "argument", "default"])
def test_a_wrapped_step_that_is_made_again_drifts_too(strategy, wrap):
    def step(w, x, scale=1.0):
        return drifts(w, x * scale)[0]

    def train():
        w = strategy.replicate(np.ones(2, np.float32))
        for _ in range(2):
            w = strategy.run(WRAPPED[wrap](step), (w, batch(strategy)), options=CHECKED)

    message(DivergenceError, train, "args[0]")


def test_result_of_another_shape_is_not_state(strategy):
    def layer(x, own):
        return jnp.tanh(x @ jnp.ones((x.shape[-1], x.shape[-1] - 1))) * jnp.sum(own)

    x = jnp.ones((3, 3))
    for _ in range(2):
        x = strategy.run(layer, (x, batch(strategy)), options=CHECKED)


def test_unsupported_uses_raise():
    message(InvalidArgumentError, lambda: rx.RunOptions(eager=True, check_same=True), "check_same")


def test_keyword_arguments_are_named(strategy):
    def step(x, state):
        return {"w": drifts(state["w"], x)[0]}

    state = strategy.replicate({"w": np.ones(2, np.float32)})

    def train(state):
        for _ in range(2):
            state = strategy.run(step, (batch(strategy),), {"state": state}, options=CHECKED)

    message(DivergenceError, lambda: train(state), "kwargs['state']['w']")


def test_steps_in_one_function_drift_too(strategy):
    @rx.function
    def train(w, x):
        for _ in range(2):
            (w,) = strategy.run(drifts, (w, x), options=CHECKED)
        return w

    w = strategy.replicate(np.ones(2, np.float32))
    message(DivergenceError, lambda: train(w, batch(strategy)), "args[0]")


def test_sum_over_steps_in_a_function_is_not_drift(strategy):
    @rx.function
    def add(total, x):
        return strategy.run(sum_over_steps, (total, x), options=CHECKED)[0]

    total = strategy.replicate(np.zeros(2, np.float32))
    for _ in range(3):
        total = add(total, batch(strategy))
    assert np.asarray(strategy.reduce("sum", total, axis=None)).tolist() == [27.0, 27.0]
