"""Keras models trained with ``strategy.run`` equal one device with the same global batch.

The oracle uses nothing of replicax: Keras's own ``stateless_call`` and ``stateless_apply`` under ``jax.grad``.
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx

STEPS = 3
ROWS = 8


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def dense_features(*shape):
    rng = np.random.default_rng(1)
    return rng.normal(size=(STEPS, ROWS, *shape)).astype("float32")


def token_ids():
    return np.random.default_rng(2).integers(0, 12, size=(STEPS, ROWS, 5)).astype("int32")


def labels():
    return np.random.default_rng(3).integers(0, 3, size=(STEPS, ROWS)).astype("int32")


def mlp():
    return keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="relu"), layers.Dense(3)])


def functional(inputs, outputs_of):
    return keras.Model(inputs, outputs_of(inputs))


def attention(dropout=0.0):
    def outputs_of(x):
        attended = layers.MultiHeadAttention(2, 3, dropout=dropout)(x, x)
        return layers.Dense(3)(layers.Flatten()(layers.LayerNormalization()(attended)))

    return functional(keras.Input((5, 4)), outputs_of)


def sequence(*middle):
    return keras.Sequential([keras.Input((5, 4)), *middle, layers.Dense(3)])


def conv_lstm():
    return keras.Sequential(
        [keras.Input((3, 4, 4, 1)), layers.ConvLSTM2D(2, 3), layers.Flatten(), layers.Dense(3)]
    )


def embedding():
    return keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(12, 4), layers.Flatten(), layers.Dense(3)]
    )


def sgd():
    """Unlike Adam, SGD reveals gradients that are too large by a factor."""
    return keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)


def adam(**options):
    return lambda: keras.optimizers.Adam(0.01, **options)


def adamw():
    return keras.optimizers.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.5, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
    )


# name: (model, optimizer, features of one step and row, None for token ids)
EQUAL = {
    "mlp": (mlp, sgd, (4,)),
    "mlp_built_lazily": (
        lambda: keras.Sequential([layers.Dense(6, activation="relu"), layers.Dense(3)]),
        sgd,
        (4,),
    ),
    "time_distributed": (
        lambda: sequence(layers.TimeDistributed(layers.Dense(3)), layers.Flatten()),
        sgd,
        (5, 4),
    ),
    "embedding": (embedding, sgd, None),
    "lstm_built_lazily": (lambda: keras.Sequential([layers.LSTM(4), layers.Dense(3)]), sgd, (5, 4)),
    "gru_stack": (lambda: sequence(layers.GRU(4, return_sequences=True), layers.GRU(3)), sgd, (5, 4)),
    "bidirectional": (lambda: sequence(layers.Bidirectional(layers.LSTM(3))), sgd, (5, 4)),
    "conv_lstm": (conv_lstm, sgd, (3, 4, 4, 1)),
    "attention": (attention, sgd, (5, 4)),
    "adamw_clipped_ema": (mlp, adamw, (4,)),
    "adam_accumulating_clipped": (mlp, adam(gradient_accumulation_steps=2, clipnorm=0.3), (4,)),
    "adam_clipvalue": (mlp, adam(clipvalue=0.05), (4,)),
    "loss_scaled": (mlp, lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0), (4,)),
}


def batches(shape):
    return list(zip(token_ids() if shape is None else dense_features(*shape), labels()))


def one_device_training(build, make_optimizer, data):
    """Losses of all steps and the final trainable weights, by Keras's stateless functions alone."""
    keras.utils.set_random_seed(0)
    model, optimizer = build(), make_optimizer()
    model.build((None, *data[0][0].shape[1:]))
    optimizer.build(model.trainable_variables)

    def mean_loss(weights, state, bindings, x, y):
        logits, state = model.stateless_call(weights, state, x, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        with keras.StatelessScope(list(zip(optimizer.variables, bindings))):
            return optimizer.scale_loss(jnp.mean(losses)), state

    @jax.jit
    def step(weights, state, bindings, x, y):
        (loss, state), gradients = jax.value_and_grad(mean_loss, has_aux=True)(weights, state, bindings, x, y)
        weights, bindings = optimizer.stateless_apply(bindings, gradients, weights)
        return loss, weights, state, bindings

    weights = [v.value for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]
    bindings = [v.value for v in optimizer.variables]
    losses = []
    for x, y in data:
        loss, weights, state, bindings = step(weights, state, bindings, x, y)
        losses.append(float(loss))
    return losses, [np.asarray(w) for w in weights]


def make_step(model, optimizer):
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x, y):
        with rx.GradientTape() as tape:
            logits = model(x, training=True)
            loss = optimizer.scale_loss(rx.nn.compute_average_loss(loss_object(y, logits)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def replicated_training(strategy, build, make_optimizer, data):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, optimizer = build(), make_optimizer()
    step = make_step(model, optimizer)
    losses = []
    for batch in data:
        (x, y) = next(iter(strategy.experimental_distribute_dataset([batch])))
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)))
    return losses, model, optimizer


def assert_weights_equal(model, expected, atol=1e-5):
    """1e-5: float32 sums in another order, through up to three steps of Adam."""
    assert len(model.trainable_variables) == len(expected)
    for variable, value in zip(model.trainable_variables, expected):
        np.testing.assert_allclose(
            np.asarray(variable.value), value, rtol=1e-5, atol=atol, err_msg=variable.path
        )


# Slow compilations that resemble another case: another recurrent layer, another limit of Adam's gradients.
LONG = {"gru_stack", "conv_lstm", "bidirectional", "adam_clipvalue"}
REST = {"attention", "lstm_built_lazily", "adam_accumulating_clipped"}


def marks_of(name):
    return [pytest.mark.long] * (name in LONG) + [pytest.mark.rest] * (name in REST)


@pytest.mark.rest
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in EQUAL])
def test_three_steps_equal_one_device(strategy, name):
    build, make_optimizer, shape = EQUAL[name]
    data = batches(shape)
    expected_losses, expected_weights = one_device_training(build, make_optimizer, data)
    losses, model, _ = replicated_training(strategy, build, make_optimizer, data)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_weights_equal(model, expected_weights)


@pytest.mark.rest
def test_a_spectrally_normalised_kernel_is_a_leaf_after_its_assignment(strategy):
    """The layer assigns its trainable kernel in ``call``; the gradient is taken at the read after that."""

    def build():
        return keras.Sequential([keras.Input((4,)), layers.SpectralNormalization(layers.Dense(3))])

    x, y = batches((4,))[0]
    keras.utils.set_random_seed(0)
    reference = build()
    state = [v.value for v in reference.non_trainable_variables]
    with keras.StatelessScope([(v, v.value) for v in reference.variables]) as scope:
        reference(x, training=True)
    normalised = [scope.get_current_value(v) for v in reference.trainable_variables]

    def mean_loss(weights):
        logits, _ = reference.stateless_call(weights, state, x, training=False)
        return jnp.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))

    expected = [w - 0.5 * g for w, g in zip(normalised, jax.grad(mean_loss)(normalised))]
    _, model, _ = replicated_training(strategy, build, lambda: keras.optimizers.SGD(0.5), [(x, y)])
    assert_weights_equal(model, expected)


@pytest.mark.rest
def test_batch_normalisation_uses_each_replicas_own_statistics(strategy):
    """Loss, gradients and moving statistics by the per-replica formula, in a CNN."""

    def build():
        return keras.Sequential(
            [
                keras.Input((4, 4, 1)),
                layers.Conv2D(2, 3),
                layers.BatchNormalization(momentum=0.7),
                layers.ReLU(),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )

    x, y = batches((4, 4, 1))[0]
    keras.utils.set_random_seed(0)
    reference = build()
    state = [v.value for v in reference.non_trainable_variables]

    def mean_loss(weights):
        losses, states = [], []
        for half in (slice(0, 4), slice(4, 8)):
            logits, after = reference.stateless_call(weights, state, x[half], training=True)
            losses.append(keras.losses.sparse_categorical_crossentropy(y[half], logits, from_logits=True))
            states.append(after)
        return jnp.mean(jnp.concatenate(losses)), states

    weights = [v.value for v in reference.trainable_variables]
    (expected_loss, states), gradients = jax.value_and_grad(mean_loss, has_aux=True)(weights)
    losses, model, _ = replicated_training(strategy, build, lambda: keras.optimizers.SGD(0.5), [(x, y)])
    np.testing.assert_allclose(losses[0], expected_loss, rtol=1e-5)
    assert_weights_equal(model, [w - 0.5 * g for w, g in zip(weights, gradients)])
    for variable, first, second in zip(model.non_trainable_variables, *states):
        assert not np.allclose(first, second)
        np.testing.assert_allclose(variable.value, (first + second) / 2, rtol=1e-5, err_msg=variable.path)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        pytest.param(
            lambda: sequence(layers.LSTM(3, dropout=0.3, recurrent_dropout=0.2)),
            (5, 4),
            marks=pytest.mark.long,
        ),
        pytest.param(lambda: attention(dropout=0.3), (5, 4), marks=pytest.mark.long),
        (lambda: sequence(layers.Flatten(), layers.Dense(6, "tanh"), layers.Dropout(0.3)), (5, 4)),
    ],
    ids=["lstm", "attention", "dense"],
)
@pytest.mark.rest
def test_models_with_dropout_train(strategy, build, shape):
    """Each replica draws its own masks, so nothing equals one device: each step draws new ones, and the loss falls."""
    x, y = batches(shape)[0]
    losses, model, _ = replicated_training(strategy, build, lambda: keras.optimizers.SGD(0.3), [(x, y)] * 6)
    assert len(set(losses)) == 6
    assert min(losses[3:]) < losses[0]
    for variable in model.variables:
        assert np.all(np.isfinite(variable.value)), variable.path


def mixed_precision_mlp():
    policy = "mixed_float16"
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(6, activation="relu", dtype=policy), layers.Dense(3, dtype=policy)]
    )


def scaled_sgd(initial_scale):
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=initial_scale, dynamic_growth_steps=2
    )


def test_mixed_float16_equals_one_device_and_its_scale_grows(strategy):
    data = batches((4,))
    make_optimizer = lambda: scaled_sgd(128.0)  # noqa: E731
    expected_losses, expected_weights = one_device_training(mixed_precision_mlp, make_optimizer, data)
    losses, model, optimizer = replicated_training(strategy, mixed_precision_mlp, make_optimizer, data)
    assert model.trainable_variables[0].dtype == "float32"
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-3)  # float16 has 11 bits
    assert_weights_equal(model, expected_weights, atol=1e-3)
    assert float(optimizer.dynamic_scale.value) == 256.0


def test_an_overflowing_step_leaves_the_weights_and_halves_the_scale(strategy):
    """One replica's overflow is every replica's: the gradients are summed before the finite check."""
    x, y = batches((4,))[0]
    x = x.copy()
    x[0] = 1e6  # infinite in float16: only the first replica's gradients overflow
    keras.utils.set_random_seed(0)
    before = [np.asarray(v.value) for v in mixed_precision_mlp().trainable_variables]
    _, model, optimizer = replicated_training(
        strategy, mixed_precision_mlp, lambda: scaled_sgd(1024.0), [(x, y)]
    )
    assert_weights_equal(model, before, atol=0)
    assert float(optimizer.dynamic_scale.value) == 512.0
    assert int(optimizer.inner_optimizer.iterations.value) == 0
