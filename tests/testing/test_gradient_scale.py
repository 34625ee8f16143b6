"""The comparison with one device names the cause of a wrong scale of gradients."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax.testing import check_against_one_device

RATE = 0.125
TASK = jnp.float32([1.0, -2.0, 0.5])


def rows(num_rows=8):
    x = np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)
    return x, (x @ np.asarray(TASK) + 0.25).astype(np.float32)


def weights():
    return jnp.float32([0.5, 0.25, 1.0])


def replica():
    return rx.get_replica_context()


def squares(w, batch):
    x, y = batch
    return (x @ w - y) ** 2


def share(w, batch):
    return rx.nn.compute_average_loss(squares(w, batch))


def summed(w, batch):
    """The loss of the global batch, on every replica."""
    return jax.lax.psum(share(w, batch), "replica")


def updated(w, gradient):
    return w - RATE * gradient


def with_sum(loss_of, psum=lambda g: replica().all_reduce("sum", g)):
    def step(batch, w):
        return updated(w, psum(jax.grad(loss_of)(w, batch)))

    return step


def with_mean(loss_of):
    return with_sum(loss_of, lambda g: replica().all_reduce("mean", g))


def make_strategy(devices=2):
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(devices)])


def keras_step(strategy, loss_of, apply):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)

    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = loss_of((model(x)[:, 0] - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        apply(optimizer, gradients, model.trainable_variables)

    return step


def apply_gradients(optimizer, gradients, variables):
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def test_keras_optimizer_takes_means_of_gradients_of_a_reduced_loss():
    strategy = make_strategy()

    def apply(optimizer, gradients, variables):
        apply_gradients(optimizer, replica().all_reduce("mean", gradients), variables)

    step = keras_step(
        strategy, lambda losses: replica().all_reduce("sum", rx.nn.compute_average_loss(losses)), apply
    )
    check_against_one_device(step, rows(), strategy).raise_if_different()


UNCERTAIN = {
    "mean_and_sum": (
        with_sum(lambda w, batch: jnp.mean(squares(w, batch))),
        "a mean loss summed over 2 replicas",
    ),
    "average_and_mean": (with_mean(share), "divided by 2 twice"),
    "pmean_and_sum": (
        with_sum(lambda w, batch: jax.lax.pmean(jnp.mean(squares(w, batch)), "replica")),
        "the loss is reduced over replicas at",
    ),
    "half_at_two_replicas": (
        with_sum(lambda w, batch: 0.5 * summed(w, batch)),
        "the loss is reduced over replicas at",
    ),
}


@pytest.mark.parametrize(("step", "cause"), UNCERTAIN.values(), ids=UNCERTAIN)
def test_check_against_one_device_names_the_cause(step, cause):
    report = check_against_one_device(step, rows(), make_strategy(), args=(weights(),))
    (entry,) = report.differences
    assert cause in entry.hint


@pytest.mark.parametrize("loss_of", [jnp.mean, lambda losses: jax.lax.pmean(jnp.mean(losses), "replica")])
def test_check_against_one_device_names_local_means_in_stateless_apply(loss_of):
    strategy = make_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    parameters = [v.value for v in model.trainable_variables]
    slots = [v.value for v in optimizer.variables]

    def step(batch, parameters):
        x, y = batch
        predict = lambda p: model.stateless_call(p, [], x)[0][:, 0]  # noqa: E731
        gradients = jax.grad(lambda p: loss_of((predict(p) - y) ** 2))(parameters)
        return optimizer.stateless_apply(slots, gradients, parameters)

    report = check_against_one_device(step, rows(), strategy, args=(parameters,))
    assert not report.ok
    for entry in report.differences:
        assert entry.factor == pytest.approx(2, rel=1e-3)
        assert (
            "mean loss summed over 2 replicas" in entry.hint
            or "the loss is reduced over replicas" in entry.hint
        )
