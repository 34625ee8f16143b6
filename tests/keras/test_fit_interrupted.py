"""Ctrl-C in ``fit`` leaves the model as the last finished step left it. (Interrupts at any moment: tests/faults.)"""

import keras
import numpy as np
import pytest

import replicax as rx

# Keras's own Variable does not yet take the `copy` argument of NumPy 2.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)

ROWS, BATCH = 40, 7  # the batches are uneven on two devices
FEATURES = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
LABELS = FEATURES.sum(axis=1, keepdims=True)
STRATEGIES = {
    "one_device": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "sharded_state": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
}


class Interrupting(keras.callbacks.Callback):
    """Raises what Python raises at Ctrl-C, after a batch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise KeyboardInterrupt


def made(strategy, steps_per_execution=1):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse", steps_per_execution=steps_per_execution)
    return model


def trained(model, num_batches, *callbacks):
    rows = num_batches * BATCH
    model.fit(
        FEATURES[:rows], LABELS[:rows], batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(2, marks=pytest.mark.rest)])
def test_interrupted_fit_leaves_the_weights_of_the_last_step(name, steps_per_execution, tmp_path):
    """Plain Keras on JAX leaves arrays that have been deleted."""
    strategy = STRATEGIES[name]()
    model = made(strategy, steps_per_execution)
    with pytest.raises(KeyboardInterrupt):
        trained(model, 5, Interrupting(3))
    expected = trained(made(strategy, steps_per_execution), 4)
    for got, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert int(model.optimizer.iterations) == 4

    assert model.predict(FEATURES, verbose=0).shape == (ROWS, 1)
    assert np.isfinite(model.evaluate(FEATURES, LABELS, verbose=0))
    model.save(tmp_path / "model.keras")
    trained(model, 5)
    assert int(model.optimizer.iterations) == 9


class Interrupted(keras.utils.PyDataset):
    """Batches of which Ctrl-C interrupts the reading, after some."""

    def __init__(self, after=None):
        super().__init__()
        self.left = after

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.left == 0:
            raise KeyboardInterrupt
        if self.left is not None:
            self.left -= 1
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return FEATURES[rows], LABELS[rows]


def test_interrupt_leaves_the_weights_of_the_checkpoint_while_batches_are_read_again(tmp_path):
    """A resumed epoch first reads the batches that it was trained on, and Keras has emptied the variables before."""
    strategy = STRATEGIES["mirrored"]()

    def fit(model, data, *callbacks):
        saving = rx.keras.callbacks.CheckpointCallback(tmp_path / "training", save_freq=2)
        model.fit(data, shuffle=False, verbose=0, callbacks=[saving, *callbacks])

    model = made(strategy)
    with pytest.raises(KeyboardInterrupt):
        fit(model, Interrupted(), Interrupting(2))
    resumed = made(strategy)
    with pytest.raises(KeyboardInterrupt):
        fit(resumed, Interrupted(after=1))  # the first batch builds the model
    expected = trained(made(strategy), 2)
    for got, wanted in zip(resumed.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(got, wanted)
