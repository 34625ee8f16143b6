"""Replication analysis: which values are proven invariant, and the errors for others."""

import functools
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
from replicax._src.vocabulary.errors import DivergenceError, DivergentCollectiveError

HERE = __file__


@functools.cache
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def data():
    """Replica r's own value: [r + 1, 3]."""
    return strategy().experimental_distribute_values_from_function(
        lambda context: np.asarray([context.replica_id_in_sync_group + 1, 3], "float32")
    )


def run(fn, *args):
    variable()
    return strategy().run(fn, args=args or (data(),))


def total(value):
    return rx.get_replica_context().all_reduce("SUM", value)


def line_of(fn, text):
    """``file:line`` of the line of ``fn`` that holds ``text``."""
    with open(HERE) as file:
        lines = file.read().splitlines()
    first = fn.__code__.co_firstlineno
    return f"{HERE}:{next(n for n in range(first, len(lines) + 1) if text in lines[n - 1])}"


@functools.cache
def variable():
    with strategy().scope():
        return rx.Variable([1.0, 2.0], name="shared")


# --- the same, or not? --------------------------------------------------------------------------------


def carried(x):
    """A scan whose carry is reduced in each step."""
    return jax.lax.scan(lambda c, _: (c + jax.lax.psum(c * x, "replica"), None), variable().value, length=2)[
        0
    ]


SAME = {
    "constant": lambda x: jnp.ones(2),
    "variable": lambda x: variable() * 2 + 1,
    "key": lambda x: jax.random.normal(jax.random.key(3), (2,)),
    "all_reduce": lambda x: total(x),
    "of a reduced value": lambda x: jnp.linalg.norm(total(x)) * jnp.sort(total(x)),
    "pmax": lambda x: jax.lax.pmax(x, "replica"),
    "all_gather": lambda x: rx.get_replica_context().all_gather(x, axis=0),
    "first replica's": lambda x: jax.lax.all_gather(x, "replica")[0],
    "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(()), variable().value)[0],
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: c * 2, variable().value),
    "while with a collective": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + total(x * c), jnp.ones(2)),
    "scan with a collective": carried,
    "cond": lambda x: jax.lax.cond(total(x)[0] > 2, lambda: variable() * 2, lambda: jnp.zeros(2)),
    "switch with a collective": lambda x: jax.lax.switch(
        jnp.int32(variable()[0]), [lambda: jnp.zeros(2), lambda: total(x), lambda: jnp.ones(2)]
    ),
    "jit": lambda x: jax.jit(lambda v: jnp.exp(v))(variable().value),
    "checkpoint": lambda x: jax.checkpoint(lambda v: jnp.exp(v))(variable().value),
    "grad": lambda x: jax.grad(lambda v: jnp.sum(v**2))(variable().value),
    "grad of the summed loss": lambda x: total(jax.grad(lambda v: jnp.sum(v * x))(variable().value)),
    "pure_callback": lambda x: jax.pure_callback(
        lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((2,), jnp.float32), variable().value
    ),
    "vouched for": lambda x: rx.assert_same(x[1]),
    "updated rows": lambda x: variable().value.at[0].set(total(x)[0]),
    "another axis": lambda x: jax.vmap(lambda v: jax.lax.psum(v, "rows"), axis_name="rows")(variable().value),
}

DIFFERS = {
    "argument": lambda x: x * 2,
    "replica id": lambda x: rx.get_replica_context().replica_id_in_sync_group,
    "mixed": lambda x: total(x) + x,
    "index of a gathered value": lambda x: rx.get_replica_context().all_gather(x, axis=0)[
        rx.get_replica_context().replica_id_in_sync_group
    ],
    "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "replica"),
    "ppermute": lambda x: jax.lax.ppermute(x, "replica", [(0, 1), (1, 0)]),
    "groups": lambda x: jax.lax.all_gather(x, "replica", axis_index_groups=[[0], [1]]),
    "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(()), x)[0],
    "second step of a scan": lambda x: jax.lax.scan(
        lambda c, _: ((c[1], x), None), (jnp.zeros(2), jnp.zeros(2)), length=2
    )[0][0],
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: c * 2, x),
    "number of steps": lambda x: jax.lax.while_loop(lambda i: i < x[0], lambda i: i + 1, jnp.float32(0)),
    "cond": lambda x: jax.lax.cond(total(x)[0] > 2, lambda: x, lambda: jnp.zeros(2)),
    "predicate": lambda x: jax.lax.cond(x[0] > 1, lambda: jnp.ones(2), lambda: jnp.zeros(2)),
    "jit": lambda x: jax.jit(lambda v, x: v + x)(variable().value, x),
    "grad": lambda x: jax.grad(lambda v: jnp.sum(v * x))(variable().value),
    "io_callback": lambda x: jax.experimental.io_callback(
        lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32)
    ),
    "pure_callback": lambda x: jax.pure_callback(
        lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((2,), jnp.float32), x
    ),
    "another axis": lambda x: jax.vmap(lambda v: jax.lax.psum(v, "rows"), axis_name="rows")(x),
}


@pytest.mark.parametrize("name", SAME)
def test_values_proven_invariant(name):
    result = run(SAME[name])
    assert result.is_equal
    first, second = result.values
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", DIFFERS)
def test_values_not_proven_invariant(name):
    assert not run(DIFFERS[name]).is_equal


def test_plain_arguments_are_the_same_and_per_replica_ones_are_not():
    plain, mirrored, own = run(
        lambda a, b, c: (a * 2, b * 2, c * 2), jnp.ones(2), strategy().replicate(jnp.ones(2)), data()
    )
    assert plain.is_equal
    assert mirrored.is_equal
    assert not own.is_equal


def test_proof_of_a_run_is_known_to_the_next():
    reduced = run(total)
    assert run(lambda x: x * 2, reduced).is_equal


# --- mirrored variables -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all_reduce", "cond", "while", "scan with a collective", "grad"])
def test_mirrored_variable_accepts_invariant_values(name):
    with strategy().scope():
        written = rx.Variable([0.0, 0.0])
    run(lambda x: written.assign(SAME[name](x)))
    np.testing.assert_array_equal(written.values[0], written.values[1])
    np.testing.assert_allclose(written.value, run(SAME[name]).values[0])


@pytest.mark.parametrize("name", ["argument", "ppermute", "while", "predicate", "grad", "jit"])
def test_mirrored_variable_that_would_vary_raises(name):
    with strategy().scope():
        written = rx.Variable([5.0, 5.0], name="my_weight")

    def step(x):
        written.assign(DIFFERS[name](x))  # the line

    with pytest.raises(DivergenceError) as caught:
        run(step)
    message = str(caught.value)
    assert "'my_weight'" in message
    assert line_of(step, "# the line") in message
    assert "all_reduce" in message  # what to do
    np.testing.assert_array_equal(written.value, [5.0, 5.0])


def test_the_line_is_that_of_the_last_assignment_and_of_the_users_function():
    with strategy().scope():
        written = rx.Variable(0.0, name="my_weight")

    def helper(x):
        written.assign_add(x[0])  # in the helper

    def step(x):
        written.assign(1.0)
        helper(x)

    with pytest.raises(DivergenceError, match=re.escape(line_of(helper, "# in the helper"))):
        run(step)


def test_trainable_keras_variable_that_would_vary_raises():
    with strategy().scope():
        layer = layers.Dense(1)
        layer.build((None, 2))

    def step(x):
        layer.bias.assign(x[:1])  # the line

    with pytest.raises(DivergenceError) as caught:
        run(step)
    assert layer.bias.path in str(caught.value)
    assert line_of(step, "# the line") in str(caught.value)


def test_variable_that_varies_through_another():
    """The other variable's value varies only in between: it is reduced in the end."""
    with strategy().scope():
        between = rx.Variable(0.0, name="between")
        last = rx.Variable(0.0, name="last")

    def step(x):
        between.assign(x[0])
        last.assign(between * 2)
        between.assign(total(x[0]))

    with pytest.raises(DivergenceError, match="'last'"):
        run(step)


def test_one_replica_never_differs():
    with rx.OneDeviceStrategy("cpu:0").scope() as one:
        written = rx.Variable(0.0)
    one.run(lambda x: written.assign(x * jax.lax.axis_index("replica") + x), args=(2.0,))
    assert float(written) == 2.0


# --- collectives under conditions ---------------------------------------------------------------------


def in_cond(x):
    return jax.lax.cond(x[0] > 1, lambda: total(x), lambda: x)  # the line


def in_switch(x):
    return jax.lax.switch(jnp.int32(x[0]), [lambda: x, lambda: x * 2, lambda: total(x)])  # the line


def in_while_body(x):
    return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: c + total(c), x)  # the line


def in_while_condition(x):
    return jax.lax.while_loop(lambda c: total(c)[0] + c[0] < 9, lambda c: c + 1, x)  # the line


def in_cond_in_scan(x):
    def body(carry, row):
        return jax.lax.cond(row > 1, lambda: total(carry), lambda: carry), None  # the line

    return jax.lax.scan(body, jnp.zeros(()), x)[0]


def in_jit_in_cond(x):
    return jax.lax.cond(x[0] > 1, lambda: jax.jit(total)(x), lambda: x)  # the line


def after_a_loop_that_differs(x):
    """The predicate is a number of steps that varies."""
    steps = jax.lax.while_loop(lambda i: i < x[0], lambda i: i + 1, jnp.float32(0))
    return jax.lax.cond(steps > 1, lambda: total(x), lambda: x)  # the line


@pytest.mark.parametrize(
    "fn",
    [
        in_cond,
        in_switch,
        in_while_body,
        in_while_condition,
        in_cond_in_scan,
        in_jit_in_cond,
        after_a_loop_that_differs,
    ],
)
def test_collective_under_a_varying_condition_raises_with_both_lines(fn):
    with pytest.raises(DivergentCollectiveError) as caught:
        run(fn)
    # Once for the collective or the helper that holds it, once for the condition.
    assert line_of(fn, "# the line") in str(caught.value)
    assert HERE in str(caught.value).split("stands under")[0]


def test_optimizer_under_a_varying_condition_raises():
    with strategy().scope():
        weight = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def step(x):
        rx.cond(x[0] > 1, lambda: optimizer.apply([x[0]], [weight]), lambda: None)

    with pytest.raises(DivergentCollectiveError):
        run(step)
    assert float(weight.value) == 1.0


def test_varying_condition_without_a_collective_is_allowed():
    result = run(lambda x: jax.lax.cond(x[0] > 1, lambda: x * 10, lambda: x))
    np.testing.assert_array_equal(result.values, [[1, 3], [20, 30]])


def test_collective_over_another_axis_is_allowed_under_a_varying_condition():
    def rows_total(x):
        return jax.vmap(lambda v: jax.lax.psum(v, "rows"), axis_name="rows")(x)

    result = run(lambda x: jax.lax.cond(x[0] > 1, rows_total, lambda x: x, x))
    np.testing.assert_array_equal(result.values, [[1, 3], [5, 5]])


# --- no false alarms ----------------------------------------------------------------------------------


def attention():
    x = keras.Input((3, 2))
    attended = layers.MultiHeadAttention(1, 2, dropout=0.2)(x, x, use_causal_mask=True)
    return keras.Model(x, layers.GlobalAveragePooling1D()(attended))


@pytest.mark.parametrize(
    "build",
    [
        lambda: keras.Sequential(
            [keras.Input((3, 2)), layers.GRU(2, dropout=0.2), layers.BatchNormalization()]
        ),
        lambda: keras.Sequential(
            [keras.Input((3, 2)), layers.SimpleRNN(2, return_sequences=True), layers.Flatten()]
        ),
        attention,
        lambda: keras.Sequential(
            [keras.Input((3, 2)), layers.SpectralNormalization(layers.Dense(2)), layers.Flatten()]
        ),
        lambda: keras.Sequential(
            [keras.Input((3, 2)), layers.GaussianNoise(0.1), layers.GroupNormalization(1), layers.Flatten()]
        ),
    ],
    ids=["gru", "simple_rnn", "attention", "spectral", "noise"],
)
@pytest.mark.rest
def test_training_keras_models_raises_no_false_alarm(build):
    with strategy().scope():
        model, optimizer = build(), keras.optimizers.Adam()

    def step(x):
        with rx.GradientTape() as tape:
            loss = jnp.sum(model(x, training=True) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )
        return loss

    # Equal rows have no gradient through a batch normalisation, if dropout treats them equally.
    x = strategy().experimental_distribute_values_from_function(
        lambda context: (
            np.random.default_rng(context.replica_id_in_sync_group).normal(size=(2, 3, 2)).astype("float32")
        )
    )
    before = [np.asarray(v.value) for v in model.trainable_variables]
    run(step, x)
    assert any(not np.array_equal(v.value, b) for v, b in zip(model.trainable_variables, before))
    for variable in model.variables:
        assert np.all(np.isfinite(variable.value))


def test_solver_whose_body_uses_the_replica_id_is_not_invariant():
    """Inside operations of JAX that the analysis does not know, it looks for varying values itself."""

    def solve(x):
        scale = lambda v: v * (rx.get_replica_context().replica_id_in_sync_group + 1)  # noqa: E731
        return jax.lax.custom_linear_solve(scale, jnp.ones(2), lambda matvec, b: b / scale(jnp.ones(2)))

    result = run(solve)
    assert not result.is_equal
    np.testing.assert_array_equal(result.values, [[1, 1], [0.5, 0.5]])


def test_solver_of_shared_values_is_invariant():
    def solve(x):
        return jax.lax.custom_linear_solve(lambda v: v * 2, variable().value, lambda matvec, b: b / 2)

    assert run(solve).is_equal
