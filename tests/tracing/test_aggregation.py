"""Gradients at ``optimizer.apply``: all are summed over replicas, except those already reduced.

Each case is a loss of one replica and the gradient by which plain SGD (learning rate 1) must change the weight.
"""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.vocabulary.errors import TraceError

# The replicas' data: replica r holds VALUES[r].
VALUES = np.asarray([1.0, 2.0], "float32")
START = 2.0


@functools.cache
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def data():
    return strategy().experimental_distribute_values_from_function(
        lambda context: VALUES[context.replica_id_in_sync_group]
    )


def total(value):
    return rx.get_replica_context().all_reduce("SUM", value)


def mean(value):
    return rx.get_replica_context().all_reduce("MEAN", value)


def make_weight(optimizer, value=START):
    with strategy().scope():
        weight = keras.Variable(value, dtype="float32", name="weight")
        optimizer.build([weight])
    return weight


def change_by(gradient_of, optimizer=None):
    """The distance that one SGD step with ``gradient_of(weight, x)`` moves the weight."""
    optimizer = optimizer or keras.optimizers.SGD(1.0)
    weight = make_weight(optimizer)
    strategy().run(lambda x: optimizer.apply([gradient_of(weight, x)], [weight]), args=(data(),))
    return START - float(weight.value)


def by_tape(loss):
    def gradient_of(weight, x):
        with rx.GradientTape() as tape:
            value = loss(weight, x)
        return tape.gradient(value, weight)

    return gradient_of


def by_jax(loss):
    return lambda weight, x: jax.grad(lambda w: loss(w, x))(weight.value)


# The loss of one replica, and the sum over replicas of its gradients at 2. Where each replica has the loss of all, this
# is an error unless the program vouches for it.
LOSSES = {
    "data": (lambda w, x: w * x, 1.0 + 2.0),
    "regularisation only": (lambda w, x: w**2 / 2, 2.0 + 2.0),
    "all_reduce of the data": (lambda w, x: w * total(x), 3.0 + 3.0),
    "mean of the data": (lambda w, x: w * mean(x), 1.5 + 1.5),
    "all_reduce of the loss": (lambda w, x: rx.assert_same(total(w * x)), 3.0 + 3.0),
    "psum in a nonlinear loss": (
        lambda w, x: rx.assert_same(jax.lax.psum(w * x, "replica") ** 2),
        2 * (2 * 6.0 * 3.0),
    ),
    "batch normalisation over replicas": (lambda w, x: (w * x - mean(w * x)) ** 2, 2 * 2 * 2 * 0.25),
    "distance from an all_reduce": (lambda w, x: (w - total(x)) ** 2, 2 * 2 * (2.0 - 3.0)),
    "collective in a scan": (
        lambda w, x: rx.assert_same(
            jax.lax.scan(lambda c, _: (jax.lax.psum(c * x, "replica"), None), w * x, length=1)[0]
        ),
        2 * (1.0 + 4.0),
    ),
    "all_gather": (
        lambda w, x: rx.assert_same(jnp.sum(rx.get_replica_context().all_gather((w * x)[None], axis=0))),
        3.0 + 3.0,
    ),
}


@pytest.mark.parametrize("differentiate", [by_tape, by_jax])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_summed_over_replicas(name, differentiate):
    loss, expected = LOSSES[name]
    np.testing.assert_allclose(change_by(differentiate(loss)), expected, rtol=1e-6)


@pytest.mark.parametrize("differentiate", [by_tape, by_jax])
@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (total, 3.0),
        (mean, 1.5),
        (lambda g: jax.lax.psum(g, "replica"), 3.0),
        (lambda g: jnp.clip(total(g), -2.5, 2.5), 2.5),
        (lambda g: mean(g) * 4 + 1, 7.0),
        (lambda g: total(g) + 0.5 * total(g) / jnp.sqrt(total(g) ** 2), 3.5),
        (lambda g: jax.jit(total)(g), 3.0),
        (lambda g: jnp.where(total(g) > 2, total(g), 0.0), 3.0),
        (lambda g: total([g, g])[1], 3.0),
        (lambda g: total(jnp.stack([g, 2 * g]))[1], 6.0),
        (lambda g: total(g.astype("bfloat16")).astype("float32"), 3.0),
    ],
    ids=[
        "sum",
        "mean",
        "psum",
        "clipped",
        "scaled",
        "sum_of_sums",
        "in_jit",
        "where",
        "in_a_list",
        "stacked",
        "converted",
    ],
)
def test_reduced_gradients_are_applied_as_they_are(reduce, expected, differentiate):
    gradient_of = differentiate(lambda w, x: w * x)
    np.testing.assert_allclose(change_by(lambda w, x: reduce(gradient_of(w, x))), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("gradient_of", "expected"),
    [
        (lambda w, x: jnp.float32(0.5), 1.0),
        (lambda w, x: jnp.zeros(()), 0.0),
        (lambda w, x: w.value, 2 * START),
        (lambda w, x: x, 3.0),
    ],
    ids=["constant", "zero", "variable", "argument"],
)
def test_values_that_are_not_gradients_are_summed_too(gradient_of, expected):
    assert change_by(gradient_of) == expected


def test_a_plain_argument_as_gradient_is_each_replicas_share():
    optimizer = keras.optimizers.SGD(1.0)
    weight = make_weight(optimizer)
    strategy().run(lambda g: optimizer.apply([g], [weight]), args=(jnp.float32(0.5),))
    assert float(weight.value) == START - 2 * 0.5


def test_some_reduced_and_some_not_in_one_apply():
    optimizer = keras.optimizers.SGD(1.0)
    with strategy().scope():
        weights = [keras.Variable(START, dtype="float32") for _ in range(3)]
        optimizer.build(weights)

    def step(x):
        with rx.GradientTape() as tape:
            loss = weights[0] * x + weights[1] * x + weights[2] ** 2 / 2
        gradients = tape.gradient(loss, weights)
        gradients[1] = total(gradients[1])
        optimizer.apply_gradients(zip(gradients, weights))

    strategy().run(step, args=(data(),))
    assert [START - float(w.value) for w in weights] == [3.0, 3.0, 4.0]


def test_source_without_gradient_is_not_updated():
    """Weight decay and momentum must not touch a variable whose gradient is None, as in TensorFlow."""
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    with strategy().scope():
        used, unused = (keras.Variable(START, dtype="float32") for _ in range(2))
        optimizer.build([used, unused])

    def step(x):
        with rx.GradientTape() as tape:
            loss = used * x
        optimizer.apply_gradients(zip(tape.gradient(loss, [used, unused]), [used, unused]))

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        strategy().run(step, args=(data(),))
    assert float(unused.value) == START
    assert float(used.value) != START


# --- optimizers ---------------------------------------------------------------------------------------


def one_device_changes(make_optimizer, gradients):
    """The weight after each step on one device with the summed gradients."""
    optimizer = make_optimizer()
    weights = [jnp.asarray([START, 1.0])]
    optimizer.build([keras.Variable(weights[0])])
    bindings = [v.value for v in optimizer.variables]
    seen = []
    for gradient in gradients:
        weights, bindings = optimizer.stateless_apply(bindings, [jnp.asarray(gradient)], weights)
        seen.append(np.asarray(weights[0]))
    return seen


class Halving(keras.optimizers.SGD):
    """A user's optimizer that changes the gradients linearly, before they are summed."""

    def apply(self, grads, trainable_variables=None):
        super().apply([g / 2 for g in grads], trainable_variables)


class Clipping(keras.optimizers.SGD):
    """A user's optimizer that reduces itself, then applies a function that is not linear."""

    def apply(self, grads, trainable_variables=None):
        grads = [jnp.clip(rx.get_replica_context().all_reduce("SUM", g), -1, 1) for g in grads]
        super().apply(grads, trainable_variables)


OPTIMIZERS = {
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=1.0),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=1.0),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=1.0),
    "accumulating": lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=4.0),
    "loss_scale_clipped": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, global_clipnorm=1.0), initial_scale=4.0
    ),
    "overrides_apply": lambda: Halving(0.5),
    "lamb": lambda: keras.optimizers.Lamb(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_see_the_summed_gradients(name):
    """Functions that are not linear in the gradients (clipping, accumulation, Adam) come after the sum."""
    make_optimizer = OPTIMIZERS[name]
    by_replica = np.random.default_rng(0).normal(size=(4, 2, 2)).astype("float32")  # step, replica, weight
    optimizer = make_optimizer()
    with strategy().scope():
        weight = keras.Variable([START, 1.0], dtype="float32")
        optimizer.build([weight])

    def step(gradient):
        optimizer.apply([gradient], [weight])

    seen = []
    for gradients in by_replica:
        value = strategy().experimental_distribute_values_from_function(
            lambda context, gradients=gradients: gradients[context.replica_id_in_sync_group]
        )
        strategy().run(step, args=(value,))
        seen.append(np.asarray(weight.value))
    expected = one_device_changes(make_optimizer, by_replica.sum(axis=1))
    np.testing.assert_allclose(seen, expected, rtol=1e-5)


def test_a_subclass_that_reduces_itself_is_not_summed_again():
    assert change_by(by_tape(lambda w, x: w * x), Clipping(1.0)) == 1.0


def test_a_loss_scale_that_one_replica_overflows_is_halved_for_all():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    change = change_by(lambda w, x: jnp.where(x > 1, jnp.inf, 1.0), optimizer)
    assert change == 0.0
    assert float(optimizer.dynamic_scale.value) == 4.0


def test_a_loss_scale_undoes_the_scaling():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    assert change_by(by_tape(lambda w, x: optimizer.scale_loss(w * x)), optimizer) == 3.0


def test_two_optimizers_and_two_applies_in_one_step():
    first, second = keras.optimizers.SGD(1.0), keras.optimizers.SGD(0.5)
    weight = make_weight(first)
    second.build([weight])

    def step(x):
        for optimizer in (first, second):
            optimizer.apply([by_tape(lambda w, x: w * w * x)(weight, x)], [weight])

    strategy().run(step, args=(data(),))
    after_first = START - 2 * START * 3.0
    np.testing.assert_allclose(float(weight.value), after_first - 0.5 * 2 * after_first * 3.0, rtol=1e-6)


# --- where apply may stand ----------------------------------------------------------------------------


def test_apply_under_a_condition_that_is_the_same_on_all_replicas():
    optimizer = keras.optimizers.SGD(1.0)
    weight = make_weight(optimizer)
    with strategy().scope():
        step_number = rx.Variable(0)

    def step(x):
        gradient = by_tape(lambda w, x: w * x)(weight, x)
        rx.cond(step_number % 2 == 0, lambda: optimizer.apply([gradient], [weight]), lambda: None)
        step_number.assign_add(1)

    seen = []
    for _ in range(3):
        strategy().run(step, args=(data(),))
        seen.append(START - float(weight.value))
    assert seen == [3.0, 3.0, 6.0]
    assert int(optimizer.iterations.value) == 2


def test_apply_under_jax_grad_or_vmap_raises():
    optimizer = keras.optimizers.SGD(1.0)
    weight = make_weight(optimizer)

    def step(x):
        return jax.vmap(lambda g: optimizer.apply([g], [weight]))(jnp.stack([x, x]))

    with pytest.raises(TraceError):
        strategy().run(step, args=(data(),))
    assert float(weight.value) == START


def test_outside_replica_functions_apply_is_keras_own():
    optimizer = keras.optimizers.SGD(1.0)
    weight = make_weight(optimizer)
    optimizer.apply([jnp.float32(0.5)], [weight])
    assert float(weight.value) == START - 0.5
    rx.function(lambda g: optimizer.apply([g], [weight]))(jnp.float32(0.5))
    assert float(weight.value) == START - 1.0


def test_one_replica_sums_nothing():
    one = rx.OneDeviceStrategy("cpu:0")
    optimizer = keras.optimizers.SGD(1.0)
    with one.scope():
        weight = keras.Variable(START, dtype="float32")
        optimizer.build([weight])
    one.run(lambda g: optimizer.apply([g], [weight]), args=(jnp.float32(0.5),))
    assert float(weight.value) == START - 0.5
