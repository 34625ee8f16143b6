"""``rx.cond`` passes assignments through a condition; ``rx.assert_same`` declares values equal."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def per_replica(strategy, *values):
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: np.float32(values[ctx.replica_id_in_sync_group])
    )


@pytest.mark.parametrize(("given", "expected"), [(5.0, 1.0), (1.0, 0.0)])
def test_only_the_branch_taken_assigns(strategy, given, expected):
    with strategy.scope():
        count = rx.Variable(0.0)

    def step(x):
        return rx.cond(x > 3, lambda: count.assign_add(1.0), lambda: count.read_value())

    result = strategy.run(step, (np.float32(given),))
    assert float(count.value) == expected
    assert [float(v) for v in strategy.experimental_local_results(result)] == [expected, expected]


def test_branches_may_assign_different_variables(strategy):
    with strategy.scope():
        a, b = rx.Variable(0.0), rx.Variable(0.0)

    def step(x):
        rx.cond(x > 0, lambda: a.assign_add(x), lambda: b.assign_sub(x))

    for value in (2.0, -3.0):
        strategy.run(step, (np.float32(value),))
    assert (float(a.value), float(b.value)) == (2.0, 3.0)


def test_branch_sees_earlier_assignments_and_later_code_sees_its_own(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)

    def step(x):
        v.assign(v * 10.0)
        rx.cond(x > 0, lambda: v.assign(v.assign_add(1.0) + 1.0), lambda: v.read_value())
        return v + 0.0

    result = strategy.run(step, (np.float32(1.0),))
    assert float(strategy.experimental_local_results(result)[0]) == 12.0
    assert float(v.value) == 12.0


def test_operands_and_results_pass_through(strategy):
    result = strategy.run(
        lambda x: rx.cond(x[0] > 0, lambda y: {"a": y * 2}, lambda y: {"a": y}, x), (np.ones(3, np.float32),)
    )
    assert strategy.experimental_local_results(result)[1]["a"].tolist() == [2.0, 2.0, 2.0]


def test_an_optimizer_every_second_step_equals_plain_python(strategy):
    def train(is_conditional):
        with strategy.scope():
            w = rx.Variable([1.0, 2.0])
            kernel = keras.Variable(np.array([1.0, 2.0], "float32"))
            optimizer = keras.optimizers.Adam(0.1)
            optimizer.build([kernel])

        def step(x, number):
            with rx.GradientTape() as tape:
                loss = jnp.sum(keras.ops.square(kernel * x)) + jnp.sum(w * x)
            gradients = tape.gradient(loss, [kernel])
            if is_conditional:
                rx.cond(number % 2 == 0, lambda: optimizer.apply(gradients, [kernel]), lambda: None)
            elif number % 2 == 0:
                optimizer.apply(gradients, [kernel])

        x = per_replica(strategy, 1.0, 2.0)
        for number in range(4):
            strategy.run(step, (x, np.int32(number) if is_conditional else number))
        return np.asarray(kernel.value), int(optimizer.iterations.value)

    (conditional, steps), (python, python_steps) = train(True), train(False)
    np.testing.assert_allclose(conditional, python, rtol=1e-6)  # the same maths, fused differently
    assert steps == python_steps == 2


def test_a_gradient_goes_through_a_condition(strategy):
    with strategy.scope():
        v = rx.Variable(3.0)

    def step(x):
        with rx.GradientTape() as tape:
            loss = rx.cond(x > 0, lambda: v * v, lambda: v * 1.0)
        return tape.gradient(loss, v)

    results = [strategy.run(step, (np.float32(x),)) for x in (1.0, -1.0)]
    assert [float(strategy.experimental_local_results(r)[0]) for r in results] == [6.0, 1.0]


def test_varying_condition_with_a_collective_in_a_branch_raises(strategy):
    with strategy.scope():
        v = rx.Variable(0.0, aggregation="SUM")

    def step(x):
        rx.cond(x > 1, lambda: v.assign_add(x), lambda: v.read_value())

    with pytest.raises(rx.errors.DivergentCollectiveError, match=r"test_control\.py:\d+"):
        strategy.run(step, (per_replica(strategy, 1.0, 2.0),))
    assert float(v.value) == 0.0


def test_varying_condition_that_assigns_a_mirrored_variable_raises(strategy):
    with strategy.scope():
        v = rx.Variable(0.0, name="steps")

    def step(x):
        rx.cond(x > 1, lambda: v.assign_add(1.0), lambda: v.read_value())

    with pytest.raises(rx.errors.DivergenceError, match="'steps'"):
        strategy.run(step, (per_replica(strategy, 1.0, 2.0),))


def test_cond_works_in_a_function_and_in_plain_python():
    v = rx.Variable(0)

    def count(x):
        return rx.cond(x > 0, lambda: v.assign_add(1), lambda: v.read_value())

    rx.function(count)(1.0)
    rx.function(count)(-1.0)
    count(2.0)
    count(-2.0)
    assert int(v.value) == 2


def test_a_branch_may_return_nothing(strategy):
    with strategy.scope():
        v = rx.Variable(0.0)

    def step(x):
        return rx.cond(x > 0, lambda: v.assign_add(x), lambda: None)

    assert strategy.run(step, (np.float32(2.0),)) is None
    assert float(v.value) == 2.0


def test_nested_conditions(strategy):
    with strategy.scope():
        v = rx.Variable(0.0)

    def step(x, y):
        def inner():
            rx.cond(y > 0, lambda: v.assign_add(1.0), lambda: v.assign_add(10.0))

        rx.cond(x > 0, inner, lambda: None)

    for x, y in ((1, 1), (1, -1), (-1, 1)):
        strategy.run(step, (np.float32(x), np.float32(y)))
    assert float(v.value) == 11.0


def test_assert_same_is_believed(strategy):
    with strategy.scope():
        v = rx.Variable(0.0)

    def step(x, vouch):
        first = jax.lax.all_gather(x, "replica")[jax.lax.axis_index("replica") * 0]
        v.assign(rx.assert_same(first) if vouch else first)

    x = per_replica(strategy, 4.0, 5.0)
    with pytest.raises(rx.errors.DivergenceError):
        strategy.run(step, (x, False))
    strategy.run(step, (x, True))
    assert [float(c) for c in v.values] == [4.0, 4.0]


def test_assert_same_is_differentiable_and_plain_outside():
    assert float(rx.assert_same(jnp.float32(2.0))) == 2.0
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    gradient = strategy.run(lambda x: jax.grad(lambda y: rx.assert_same(y) ** 2)(x), (np.float32(3.0),))
    assert float(strategy.experimental_local_results(gradient)[0]) == 6.0
