"""``RunOptions(check_finite=True)`` names the first computation that gave a NaN or an infinity, and changes nothing else."""

import inspect

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax.errors import InvalidArgumentError, NotFiniteError, UnsupportedError

CHECKED = rx.RunOptions(check_finite=True)


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def rows(strategy, *values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(values[context.replica_id_in_sync_group])
    )


def line_of(fn, text):
    lines, first = inspect.getsourcelines(fn)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def plain(x):
    return {"loss": jnp.sum(jnp.log(x - 1.0) * 2)}


def in_scan(x):
    def body(carry, row):
        return jnp.sqrt(carry - row), carry

    return jax.lax.scan(body, jnp.float32(1.0), x)


def in_loop(x):
    def body(carry):
        return carry[0] + 1, jnp.log(carry[1] + 2.0)

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x[0]))


def in_condition(x):
    return jax.lax.cond(
        x[0] < 1.0,
        lambda x: x / jnp.zeros(2),
        lambda x: x,
        x,
    )


@jax.custom_vjp
def halved(x):
    return x / 2


def backward(x, g):
    return (jnp.log(x - 1) * g,)


halved.defvjp(lambda x: (x / 2, x), backward)


def in_backward_pass(x):
    return jax.grad(lambda x: jnp.sum(halved(x)))(x)


def through_a_square_root(x):
    zeros = 0 * x
    return jax.grad(lambda x: jnp.sum(jnp.sqrt(x)))(zeros)


def before_a_collective(x):
    return rx.get_replica_context().all_reduce("sum", jnp.sum(jnp.log(x - 1)))


CASES = {
    plain: "jnp.log",
    in_scan: "jnp.sqrt",
    in_loop: "jnp.log",
    in_condition: "x / jnp.zeros",
    through_a_square_root: "jnp.sqrt",
    before_a_collective: "jnp.log",
}


@pytest.mark.parametrize("wrap", [lambda fn: fn, rx.function], ids=["run", "function"])
@pytest.mark.parametrize("step", CASES, ids=lambda step: step.__name__)
def test_the_line_and_the_replica_are_named(strategy, step, wrap):
    good, bad = np.float32([4, 8]), np.float32([0.5, 0.5])
    first = step is through_a_square_root
    if step is in_loop:
        bad = -good
    if step is in_scan:
        good, bad = -good, np.float32([0.5, 3])
    call = wrap(lambda x: strategy.run(step, (x,), options=CHECKED))
    if not first:
        call(rows(strategy, good, good))
    at = line_of(step, CASES[step])
    message(NotFiniteError, lambda: call(rows(strategy, good, bad)), at, f"replica {0 if first else 1}.")


def test_a_backward_pass_of_the_users_own_is_named_by_the_call(strategy):
    """JAX knows no other line for it."""
    at = line_of(in_backward_pass, "halved(x)") + " in <lambda> in the backward pass"
    message(
        NotFiniteError, lambda: strategy.run(in_backward_pass, (jnp.zeros(2),), options=CHECKED), "log", at
    )


@pytest.mark.parametrize("wrap", [lambda fn: fn, rx.function], ids=["run", "function"])
def test_variables_keep_their_values_and_may_be_trained_on(strategy, wrap):
    with strategy.scope():
        w = rx.Variable(np.float32([1.0, 2.0]), name="w")

    def step(x):
        with rx.GradientTape() as tape:
            loss = jnp.sum(jnp.sqrt(w * x))
        gradient = rx.get_replica_context().all_reduce("sum", tape.gradient(loss, w))
        w.assign(w - 0.1 * gradient)

    call = wrap(lambda x: strategy.run(step, (x,), options=CHECKED))
    one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    text = message(NotFiniteError, lambda: call(rows(strategy, one, zero)), "the new value of variable 'w'")
    assert line_of(step, "jnp.sqrt") in text
    np.testing.assert_array_equal(w, [1.0, 2.0])
    call(rows(strategy, one, one))
    np.testing.assert_allclose(w, [0.9, 2 - 0.1 / np.sqrt(2)], rtol=1e-6)


def masked(x):
    return jax.nn.softmax(jnp.where(jnp.arange(2) < 1, x, -jnp.inf))


def avoided(x):
    return jnp.where(x > 1, jnp.log(x - 1), 0.0)


@pytest.mark.parametrize("step", [masked, avoided])
def test_values_that_reach_no_result_are_no_error(strategy, step):
    given = rows(strategy, [1.0, 2.0], [0.0, 3.0])
    checked, plain = (strategy.run(step, (given,), options=options) for options in (CHECKED, None))
    for a, b in zip(checked.values, plain.values, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_that_ran_unchecked_is_checked_from_when_it_is_asked_for(strategy):
    values = rows(strategy, [2.0], [0.5])
    strategy.run(plain, (values,))
    with pytest.raises(NotFiniteError):
        strategy.run(plain, (values,), options=CHECKED)
    strategy.run(plain, (values,))


def test_batch_that_is_not_finite_is_named(strategy):
    message(
        NotFiniteError,
        lambda: strategy.run(plain, ({"x": 1, "y": rows(strategy, 2.0, np.nan)}["y"],), options=CHECKED),
        "nan value comes from args[0]",
        "replica 1",
    )


def test_a_checked_step_keeps_what_each_size_of_batch_gives(strategy):
    batch = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(2 + context.replica_id_in_sync_group, np.float32)
    )
    result = strategy.run(lambda x: jnp.float32(x.shape[0]), (batch,), options=CHECKED)
    assert [float(value) for value in result.values] == [2.0, 3.0]


@pytest.mark.rest
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_uneven_batches_are_checked_and_replicas_without_rows_are_not(strategy, num_rows):
    with strategy.scope():
        norm = keras.layers.BatchNormalization()
        norm.build((None, 1))

    def step(x):
        total = rx.get_replica_context().all_reduce("sum", jnp.sum(norm(x, training=True)))
        return jnp.mean(x), total + jnp.sum(jnp.log(x))

    def batch(last):
        data = np.ones((num_rows, 1), np.float32)
        data[-1] = last
        return next(iter(strategy.experimental_distribute_dataset(rx.data.from_arrays(data).batch(num_rows))))

    strategy.run(step, (batch(1.0),), options=CHECKED)
    at = line_of(step, "jnp.log")
    message(
        NotFiniteError,
        lambda: strategy.run(step, (batch(0.0),), options=CHECKED),
        at,
        f"replica {min(num_rows - 1, 1)}.",
    )


def test_a_keras_model_that_diverges(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(1e30)

    def step(x):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(model(x, training=True)[:, 0] ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )
        return loss

    def train():
        for _ in range(4):
            strategy.run(step, (rows(strategy, np.ones((2, 3)), np.ones((2, 3))),), options=CHECKED)

    message(NotFiniteError, train, __file__, "in step")
    assert all(np.isfinite(np.asarray(weight.value)).all() for weight in model.weights)


def test_unsupported_uses_raise(strategy):
    message(InvalidArgumentError, lambda: rx.RunOptions(eager=True, check_finite=True), "eager")
    sharded = rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="optimizer")
    message(UnsupportedError, lambda: sharded.run(plain, (jnp.ones(2),), options=CHECKED), "shard_state")


def test_first_value_is_reported_first(strategy):
    def step(x):
        return jnp.sum(
            jnp.log(x)
            * 0.0
        )  # fmt: skip

    text = message(
        NotFiniteError, lambda: strategy.run(step, (jnp.zeros(2),), options=CHECKED), "nan", "infinite"
    )
    log, product = line_of(step, "jnp.log"), "mul at"
    assert text.index(log) < text.index(product)


def test_replica_of_the_first_value_is_named(strategy):
    def step(x):
        return jnp.log(x) + jnp.sqrt(1.0 - 2.0 * x)

    given = rows(strategy, 0.0, 1.0)  # an infinity, then a NaN; only a NaN
    at = line_of(step, "jnp.log")
    message(
        NotFiniteError, lambda: strategy.run(step, (given,), options=CHECKED), at, "replica 0.", "infinite"
    )


def looping(call, x):
    return jax.lax.fori_loop(0, 3, lambda i, carry: call(carry), x)


def conditional(call, x):
    return rx.cond(x > 0, lambda: call(x), lambda: x)


def conditional_of_jax(call, x):
    return jax.lax.cond(x > 0, call, lambda x: x, x)


@pytest.mark.parametrize("around", [looping, conditional, conditional_of_jax])
def test_loop_or_condition_around_run_raises_and_is_named(strategy, around):
    def call(x):
        return strategy.reduce("SUM", strategy.run(lambda x: x * 2, (x,), options=CHECKED), axis=None)

    train = rx.function(lambda x: around(call, x))
    message(UnsupportedError, lambda: train(jnp.float32(1.0)), "check_finite", "loop or condition")


def test_donated_arguments_survive_the_error(strategy):
    state = strategy.replicate(np.zeros(2, np.float32))
    options = rx.RunOptions(check_finite=True, donate_args=(0,))
    message(NotFiniteError, lambda: strategy.run(plain, (state,), options=options), "nan")
    assert np.asarray(state).tolist() == [0.0, 0.0]
