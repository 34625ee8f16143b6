"""Labels outside the range of their classes are named in steps that are checked, and cost nothing elsewhere."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax.errors import LabelError

CHECKED = rx.RunOptions(check_finite=True)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def batch_of(labels):
    labels = np.asarray(labels, np.int32)
    return np.random.default_rng(0).normal(size=(len(labels), 3)).astype(np.float32), labels


def distributed(strategy, labels):
    (batch,) = strategy.experimental_distribute_dataset([batch_of(labels)])
    return batch


def make_step(strategy, loss_of=LOSS):
    with strategy.scope():
        weights = rx.Variable(np.eye(3, 2, dtype=np.float32), name="weights")

    def by_tape(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(loss_of(y, x @ weights))
        weights.assign_sub(rx.get_replica_context().all_reduce("sum", tape.gradient(loss, weights)))
        return loss

    return weights, by_tape


RIGHT = [0, 1, 1, 0, 1, 0]


def test_labels_outside_the_range_raise_in_a_checked_step_and_change_nothing(strategy):
    weights, step = make_step(strategy)
    before = weights.numpy()
    for labels in ([*RIGHT, 2, 1], [*RIGHT, 0, -1], [*RIGHT, 7]):
        with pytest.raises(LabelError) as caught:
            strategy.run(step, args=(distributed(strategy, labels),), options=CHECKED)
        text = str(caught.value)
        wrong = next(label for label in labels if label not in (0, 1))
        assert f"1 label(s) at {__file__}:" in text
        assert f"outside [0, 2), for example {wrong}" in text
        np.testing.assert_array_equal(weights.numpy(), before)
    strategy.run(step, args=(distributed(strategy, RIGHT),), options=CHECKED)
    assert np.any(weights.numpy() != before), "the next batch is right, and the program is the same"


def grad(x, y):
    return jax.grad(lambda w: rx.nn.compute_average_loss(LOSS(y, x @ w)))(jnp.eye(3, 2))


def in_jit(x, y):
    return jax.jit(grad)(x, y)


def in_scan(x, y):
    return jax.lax.scan(lambda c, _: (c + grad(x, y), None), jnp.zeros((3, 2)), length=2)[0]


def by_function(x, y):
    return keras.losses.sparse_categorical_crossentropy(y, x @ jnp.eye(3, 2), from_logits=True)


def by_metric(x, y):
    return keras.metrics.sparse_categorical_crossentropy(y, x @ jnp.eye(3, 2), from_logits=True)


@pytest.mark.parametrize("step", [grad, in_jit, in_scan, by_function, by_metric])
def test_labels_are_checked_wherever_the_loss_is_computed(strategy, step):
    def run(labels):
        strategy.run(lambda batch: step(*batch), args=(distributed(strategy, labels),), options=CHECKED)

    run([0, 1, 1, 0])
    with pytest.raises(LabelError, match=r"outside \[0, 2\), for example 5"):
        run([0, 1, 1, 5])


def test_checked_function_raises_too(strategy):
    _, step = make_step(strategy)

    @rx.function
    def function(batch):
        return strategy.run(step, args=(batch,), options=CHECKED)

    with pytest.raises(LabelError, match="for example 2"):
        function(distributed(strategy, [0, 1, 1, 2]))


def test_ignored_class_is_no_error(strategy):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None, ignore_class=-1)
    _, step = make_step(strategy, loss)
    strategy.run(step, args=(distributed(strategy, [0, -1, 1, 1]),), options=CHECKED)


def test_step_that_is_not_checked_has_no_callback(strategy):
    _, step = make_step(strategy)
    strategy.run(step, args=(distributed(strategy, [0, 1, 1, 2]),))
    program = strategy.parts.runner.last_launcher.program
    assert "debug_callback" not in str(program.variants[0].jaxpr)
