"""Keras training with sharded state: the numbers of one device, and less memory on each.

The oracle is plain Keras, made and trained outside every scope. 199 rows in batches of 64: the last batch has 7, and
64 rows do not divide by 6.
"""

import contextlib
import functools
import math

import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
from checks import assert_close, assert_logs_equal
from replicax._src.tracing import gathers

pytestmark = pytest.mark.rest

ROWS, BATCH = 199, 64
CPUS = [f"cpu:{i}" for i in range(8)]

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
    "adamw_clipped": lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.5),
    "averaged_and_accumulated": lambda: keras.optimizers.Adam(
        1e-2, use_ema=True, ema_overwrite_frequency=3, gradient_accumulation_steps=2
    ),
    "loss_scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2)),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "muon": lambda: keras.optimizers.Muon(1e-2),
    "lamb": lambda: keras.optimizers.Lamb(1e-2),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, centered=True, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(1e-2),
    "nadam": lambda: keras.optimizers.Nadam(1e-2),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-2),
    "lion": lambda: keras.optimizers.Lion(1e-3),
}


def rows():
    random = np.random.default_rng(5)
    features = random.normal(size=(ROWS, 12)).astype(np.float32)
    return features, random.integers(0, 4, ROWS).astype(np.int32)


def network():
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(24, kernel_regularizer="l2", use_bias=False),
            layers.BatchNormalization(momentum=0.7),
            layers.ReLU(),
            layers.Dropout(0.3),
            layers.Dense(5),  # a bias that nothing divides
        ]
    )


def trained(optimizer, strategy=None, **options):
    keras.utils.set_random_seed(7)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = network()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss, **options)
    history = model.fit(*rows(), batch_size=BATCH, epochs=2, verbose=0).history
    return model, history, values_of(model)


def values_of(model):
    return [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]


@functools.cache
def on_one_device(optimizer):
    # Outside of a strategy, Keras gives small batches of different sizes the same weight (docs/reference/keras_fit.md).
    return trained(optimizer, rx.OneDeviceStrategy("cpu:0") if "accumulated" in optimizer else None)


def assert_same_training(history, values, optimizer):
    _, expected, expected_values = on_one_device(optimizer)
    assert_logs_equal(history, expected, 1e-5)
    assert_close(values, expected_values, 1e-4, 1e-5, "weights")


def bytes_on(device, variables):
    """The bytes of some variables that a device really holds."""
    shards = [s for v in variables for s in v.value.addressable_shards if s.device.id == device]
    return sum(shard.data.nbytes for shard in shards)


def bytes_divided(variables, count):
    """The bytes that a device should hold: a ``count``-th of each variable with a divisible dim."""
    sizes = [(math.prod(v.shape) * np.dtype(v.dtype).itemsize, v.shape) for v in variables]
    return sum(n // count if any(d % count == 0 for d in shape) else n for n, shape in sizes)


def assert_divided(model, devices, count, state):
    """Each device holds the computed share: a ``count``-th of sharded variables, and full copies of all others."""
    trainable, others = model.trainable_variables, model.non_trainable_variables
    for device in devices:
        assert bytes_on(device, model.optimizer.variables) == bytes_divided(model.optimizer.variables, count)
        assert bytes_on(device, trainable) == bytes_divided(trainable, count if state == "all" else 1)
        assert bytes_on(device, others) == bytes_divided(others, 1)


BRIEF = ("adamw_clipped", "optimizer")


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        pytest.param(name, state, marks=() if (name, state) == BRIEF else pytest.mark.long)
        for name in OPTIMIZERS
        for state in ("optimizer", "all")
    ],
)
@pytest.mark.quick
def test_training_equals_one_device_and_shards_memory(optimizer, state, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)  # each gathers what it needs
    strategy = rx.MirroredStrategy(CPUS[:4], shard_state=state)
    model, history, values = trained(optimizer, strategy)
    assert_same_training(history, values, optimizer)
    # At the end Keras assigns the optimizer's averages to the variables, in their layout.
    assert_divided(model, range(4), 4, "all" if model.optimizer.use_ema else state)


def test_each_group_has_the_full_state(monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    strategy = rx.MirroredStrategy(CPUS[:4], shard_state="all", shard_size=2)
    model, _, values = trained("adamw_clipped", strategy, steps_per_execution=4)
    expected_values = on_one_device("adamw_clipped")[2]
    assert_close(values, expected_values, 1e-4, 1e-5, "weights")
    assert_divided(model, range(4), 2, "all")
    kernel = model.layers[0].kernel.value
    pieces = {s.device.id: np.asarray(s.data) for s in kernel.addressable_shards}
    np.testing.assert_array_equal(pieces[0], pieces[2])
    np.testing.assert_array_equal(np.concatenate([pieces[0], pieces[1]], axis=1), kernel)


def test_evaluation_and_predictions_are_those_of_one_device():
    features, labels = rows()
    options = {"batch_size": BATCH, "verbose": 0}

    def evaluated_and_predicted():
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((12,)), layers.Dense(24, "relu"), layers.Dense(5)])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model, model.evaluate(features, labels, **options), model.predict(features, **options)

    _, *expected = evaluated_and_predicted()
    with rx.MirroredStrategy(CPUS[:4], shard_state="all").scope():
        model, *got = evaluated_and_predicted()
    assert_close(got, expected, 1e-5, 1e-6)
    assert bytes_on(3, model.variables) == bytes_divided(model.variables, 4)


def test_variables_are_created_in_shards_with_the_values_of_one_device():
    def made():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((12,)), layers.Dense(24, kernel_initializer="orthogonal")])
        optimizer = keras.optimizers.SGD(momentum=0.9)
        optimizer.build(model.trainable_variables)
        return [v for v in [*model.variables, *optimizer.variables] if v.shape]

    expected = [np.asarray(v.value) for v in made()]
    with rx.MirroredStrategy(CPUS[:4], shard_state="all").scope():
        variables = made()
    assert_close([np.asarray(v.value) for v in variables], expected, 0)
    for device in range(4):
        assert bytes_on(device, variables) == bytes_divided(variables, 4) == bytes_divided(variables, 1) / 4
    assert keras.distribution.distribution() is None


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword"
)  # of Keras, where it saves
def test_loaded_weights_stay_sharded(tmp_path):
    path = tmp_path / "all.weights.h5"
    with rx.MirroredStrategy(CPUS[:4], shard_state="all").scope():
        model = keras.Sequential([keras.Input((12,)), layers.Dense(24), layers.Dense(5)])
    values = [np.asarray(v.value) + 1 for v in model.variables]
    for variable, value in zip(model.variables, values):
        variable.assign(value)
    model.save_weights(path)
    for variable in model.variables:
        variable.assign(0 * variable.value)
    model.load_weights(path)
    assert_close([np.asarray(v.value) for v in model.variables], values, 0)
    kernels = [model.layers[0].kernel, model.layers[1].kernel]
    assert bytes_on(3, kernels) == bytes_divided(kernels, 4)
