"""The comparison with one device, of replicas of several devices."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import tpu_strategy
from split_models import LABELS, ROWS, model_of


@pytest.fixture(scope="module")
def strategy():
    """Two replicas of two devices."""
    return tpu_strategy(num_replicas=2, num_logical_devices=2)


def assert_equal_to_one_device(fn, batch, strategy):
    report = rx.testing.check_against_one_device(fn, batch, strategy)
    report.raise_if_different()
    assert report.num_compared


def made(strategy, *shapes):
    """Variables of these shapes."""
    with strategy.scope():
        return [rx.Variable(np.cos(np.arange(np.prod(s), dtype=np.float32)).reshape(s)) for s in shapes]


@pytest.mark.parametrize(
    ("num_replicas", "num_logical", "num_rows", "mark"),
    [
        (4, 2, 11, lambda split, h: split(h, [1, 2])),
        (2, 2, 16, lambda split, h: jax.vmap(lambda row: split(row, [2]))(h)),
        (1, 8, 11, lambda split, h: split(h.reshape(-1, 2, 4), [1, 2, 4]).reshape(h.shape)),
    ],
    ids=["columns", "each_row", "two_dims"],
)
def test_marks_change_no_number(num_replicas, num_logical, num_rows, mark):
    strategy = tpu_strategy(num_replicas, num_logical)
    w1, w2 = made(strategy, (8, 8), (8, 4))

    def layer(h):
        return mark(strategy.experimental_split_to_logical_devices, h)

    def step(x):
        def loss(w1, w2):
            h, _ = jax.lax.scan(lambda h, _: (layer(jnp.tanh(h @ w1)), None), x, None, length=3)
            h = jax.lax.cond(jnp.sum(w1) > 99, lambda h: h, lambda h: layer(h * 2), h)
            logits = strategy.experimental_replicate_to_logical_devices(h @ w1) @ w2
            return rx.nn.compute_average_loss(jnp.sum(logits**2, axis=1))

        value, gradients = rx.value_and_grad(loss, argnums=(0, 1))(w1.value, w2.value)
        gradients = rx.get_replica_context().all_reduce("SUM", gradients)
        w1.assign_sub(0.1 * gradients[0])
        w2.assign_sub(0.1 * gradients[1])
        return value

    assert_equal_to_one_device(step, ROWS[:num_rows], strategy)


@pytest.mark.rest
def test_custom_loop_with_an_optimizer_of_keras():
    strategy = tpu_strategy(num_replicas=2, num_logical_devices=2)
    model = model_of(strategy, with_statistics=False)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(batch):
        rows, labels = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(losses(labels, model(rows, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    assert_equal_to_one_device(step, (ROWS[:11], LABELS[:11]), strategy)
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays((ROWS, LABELS)).batch(8))
    train = rx.function(lambda batch: strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None))
    assert [float(train(batch)) for batch in dataset][-1] > 0
    divided = [v for v in [*model.variables, *model.optimizer.variables] if v.shape == (8, 16)]
    assert {shard.data.shape for v in divided for shard in v.value.addressable_shards} == {(8, 8)}


@pytest.mark.parametrize("num_rows", [4, 3])
def test_images_split_along_their_height(num_rows):
    """Devices exchange the rows of pixels at the boundary; with an odd number of images replicas have different
    numbers."""
    strategy = tpu_strategy(num_replicas=2, num_logical_devices=2)
    kernel = np.cos(np.arange(27, dtype=np.float32)).reshape(3, 3, 1, 3)
    images = np.random.default_rng(2).normal(size=(num_rows, 8, 6, 1)).astype(np.float32)

    def step(x):
        x = strategy.experimental_split_to_logical_devices(x, [1, 2, 1, 1])
        dims = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))
        x = jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims))
        return jnp.sum(x, axis=(1, 2))

    assert_equal_to_one_device(step, images, strategy)
