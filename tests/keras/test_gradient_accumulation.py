"""Keras's ``gradient_accumulation_steps``: n micro-batches of unequal counts equal one large batch on one device."""

import functools

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message

CPUS = [f"cpu:{i}" for i in range(4)]
ROWS, TOKENS = 29, 6
RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(1, TOKENS + 1, size=(ROWS, 1))
IDS = np.where(np.arange(TOKENS) < LENGTHS, RANDOM.integers(1, 9, size=(ROWS, TOKENS)), 0).astype(np.int32)
Y = RANDOM.normal(size=(ROWS, TOKENS, 1)).astype(np.float32)
WEIGHTS = RANDOM.random(size=(ROWS, TOKENS)).astype(np.float32)


class OwnStep(keras.Sequential):
    """A model with a step in TensorFlow's style."""

    def train_step(self, data):
        x, y, *weight = data
        with rx.GradientTape() as tape:
            loss = self.compute_loss(
                x=x, y=y, y_pred=self(x, training=True), sample_weight=(*weight, None)[0]
            )
            target = self.optimizer.scale_loss(loss)
        self.optimizer.apply_gradients(
            zip(tape.gradient(target, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


def adam(**options):
    return keras.optimizers.Adam(0.05, **options)


def scaled(**options):
    return keras.optimizers.LossScaleOptimizer(adam(**options))


def fixed_scale(**options):
    return adam(loss_scale_factor=8.0, **options)


def fitted(strategy, batch_size, number, *, make=adam, cls=keras.Sequential, masked=True, weights=None, epochs=1,
           reduction="sum_over_batch_size", **options):  # fmt: skip
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [
            keras.layers.Embedding(9, 4, mask_zero=masked),
            keras.layers.Dense(1, kernel_regularizer="l2"),
        ]
        model = cls([keras.Input((TOKENS,), dtype="int32"), *layers])
        optimizer = make(gradient_accumulation_steps=number) if number else make()
        model.compile(optimizer, keras.losses.MeanSquaredError(reduction=reduction), **options)
    model.fit(IDS, Y, sample_weight=weights, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return [np.asarray(v.value) for v in model.weights]


@functools.cache
def on_one_device(masked, is_weighted, reduction):
    weights = WEIGHTS if is_weighted else None
    return fitted(
        rx.OneDeviceStrategy("cpu:0"), ROWS, None, masked=masked, weights=weights, reduction=reduction
    )


def assert_equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        # The first step of Adam divides each gradient by its own size.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("masked", "is_weighted", "reduction"),
    [
        (True, False, "sum_over_batch_size"),
        pytest.param(False, False, "sum_over_batch_size", marks=pytest.mark.rest),
        pytest.param(False, True, "sum_over_batch_size", marks=pytest.mark.rest),
        pytest.param(False, True, "mean_with_sample_weight", marks=pytest.mark.long),
        pytest.param(True, True, "mean_with_sample_weight", marks=pytest.mark.rest),
    ],
)
def test_fit_with_masks_weights_and_a_ragged_last_batch(masked, is_weighted, reduction):
    got = fitted(
        rx.MirroredStrategy(CPUS), 8, 4, masked=masked, weights=WEIGHTS if is_weighted else None, reduction=reduction
    )  # 8, 8, 8 and 5 rows  # fmt: skip
    assert_equal(got, on_one_device(masked, is_weighted, reduction))


def test_optimizer_that_is_built_outside_the_scope_weighs_small_batches_too():
    def made(number, strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((TOKENS,)), keras.layers.Dense(TOKENS)])
            model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=number), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    rows, targets = IDS.astype(np.float32), Y[..., 0]
    small, large = made(4, rx.MirroredStrategy(CPUS[:2])), made(None, rx.OneDeviceStrategy("cpu:0"))
    small.fit(rows, targets, batch_size=8, shuffle=False, verbose=0)  # 8, 8, 8 and 5 rows
    large.fit(rows, targets, batch_size=ROWS, verbose=0)
    assert_equal(*([np.asarray(v.value) for v in model.weights] for model in (small, large)))


@pytest.mark.parametrize(
    ("num_replicas", "strategy_options", "options"),
    [
        (1, {}, {}),
        (2, {"shard_state": "all"}, {}),
        (2, {}, {"steps_per_execution": 3}),
        (2, {}, {"make": scaled}),
        pytest.param(2, {"shard_state": "optimizer"}, {"make": scaled}, marks=pytest.mark.long),
        pytest.param(1, {}, {"make": fixed_scale}, marks=pytest.mark.rest),
        pytest.param(2, {}, {"run_eagerly": True}, marks=pytest.mark.rest),
        (4, {}, {"cls": OwnStep}),
        pytest.param(2, {}, {"cls": OwnStep, "make": scaled}, marks=pytest.mark.long),
    ],
)
def test_ways_to_train(num_replicas, strategy_options, options):
    strategy = rx.MirroredStrategy(CPUS[:num_replicas], **strategy_options)
    if options.get("cls") is OwnStep and num_replicas > 1:
        options = {**options, "masked": True}
    got = fitted(strategy, 8, 4, **options)
    assert_equal(got, on_one_device(True, False, "sum_over_batch_size"))


def test_without_the_weights_the_numbers_differ(monkeypatch):
    """The case is one that Keras alone gets wrong."""
    from replicax._src.keras import accumulation

    monkeypatch.setattr(accumulation, "weighed", lambda optimizer, gradients, variables: list(gradients))
    got = fitted(rx.MirroredStrategy(CPUS[:1]), 8, 4)
    expected = on_one_device(True, False, "sum_over_batch_size")
    assert max(np.abs(one - other).max() for one, other in zip(got, expected, strict=True)) > 1e-3


def looped(strategy, sizes, number, step_of):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((TOKENS,)), keras.layers.Dense(1)])
        optimizer = adam(gradient_accumulation_steps=number) if number else adam()
    step, start = step_of(model, optimizer), 0
    for size in sizes:
        rows = rx.data.from_arrays((IDS[start : start + size].astype("f"), Y[start : start + size, 0, 0]))
        (batch,) = strategy.experimental_distribute_dataset(rows.batch(size))
        strategy.run(step, args=(batch,))
        start += size
    return [np.asarray(v.value) for v in model.weights]


def of_average_loss(model, optimizer):
    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((model(x)[:, 0] - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return step


def of_accumulate(model, optimizer):
    @rx.experimental.accumulate(2)
    def gradients_of(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = jnp.sum((model(x)[:, 0] - y) ** 2)
        return tape.gradient(loss, model.trainable_variables), len(x)

    return lambda batch: optimizer.apply(gradients_of(batch), model.trainable_variables)


@pytest.mark.parametrize("step_of", [of_average_loss, of_accumulate])
def test_a_loop_with_uneven_micro_batches(step_of):
    expected = looped(rx.OneDeviceStrategy("cpu:0"), [ROWS], None, of_average_loss)
    assert_equal(looped(rx.MirroredStrategy(CPUS), [13, 8, 3, 5], 4, step_of), expected)


def test_two_accumulations_start_afresh():
    expected = looped(rx.OneDeviceStrategy("cpu:0"), [18, 11], None, of_average_loss)
    assert_equal(looped(rx.MirroredStrategy(CPUS[:2]), [13, 5, 2, 9], 2, of_average_loss), expected)


def test_several_losses_with_masks_have_no_single_count():
    keras.utils.set_random_seed(0)
    with rx.MirroredStrategy(CPUS[:1]).scope():
        ids = keras.Input((TOKENS,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(ids)
        model = keras.Model(ids, [keras.layers.Dense(1)(hidden), keras.layers.Dense(1)(hidden)])
        model.compile(adam(gradient_accumulation_steps=2), ["mse", "mae"])
    message(
        rx.errors.KerasLossError,
        lambda: model.fit(IDS, [Y, Y], batch_size=8, verbose=0),
        "rx.experimental.accumulate",
    )


def test_several_losses_of_all_rows_keep_their_proportions():
    def trained(strategy, batch_size, number):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            ids = keras.Input((TOKENS,), dtype="int32")
            hidden = keras.layers.Embedding(9, 4)(ids)
            outputs = [keras.layers.Dense(1)(hidden), keras.layers.Dense(1)(hidden[:, 0])]
            model = keras.Model(ids, outputs)
            model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=number), ["mse", "mae"])
        model.fit(IDS, [Y, Y[:, 0]], batch_size=batch_size, shuffle=False, verbose=0)
        return [np.asarray(v.value) for v in model.weights]

    assert_equal(
        trained(rx.MirroredStrategy(CPUS[:2]), 8, 4), trained(rx.OneDeviceStrategy("cpu:0"), ROWS, None)
    )


def test_an_incomplete_accumulation_goes_on_in_the_next_fit():
    initial = fitted(rx.MirroredStrategy(CPUS[:2]), 8, 4, epochs=0)
    assert_equal(fitted(rx.MirroredStrategy(CPUS[:2]), 8, 5), initial)  # 4 batches, and no update
    changed = fitted(rx.MirroredStrategy(CPUS[:2]), 8, 5, epochs=2)
    assert max(np.abs(one - other).max() for one, other in zip(changed, initial, strict=True)) > 0.01


def test_optimizers_made_outside_of_a_scope_are_keras_own():
    optimizer = adam(gradient_accumulation_steps=2)
    optimizer.build([keras.Variable(np.zeros(2, "f"))])
    assert not any("accumulated_count" in v.path for v in optimizer.variables)
