"""``CheckpointCallback``: a ``fit`` that was interrupted anywhere and run again ends with the bits of one that was not."""

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.keras.callbacks import CheckpointCallback

pytestmark = pytest.mark.timeout(180)

ROWS, BATCH, EPOCHS = 22, 4, 3
BATCHES = 6  # of an epoch; the last one is smaller


def make_model(strategy, steps_per_execution=1):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.layers.Dense(4, "tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=steps_per_execution
        )
    return model


def rows():
    x = np.random.default_rng(1).normal(size=(ROWS, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def bits(model):
    """Weights, moving statistics, states of seeds, slots."""
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


class Died(Exception):
    pass


class Log(keras.callbacks.Callback):
    """Notes what other callbacks see of each batch and epoch, and ends the training after so many batches."""

    def __init__(self, dies_after=None):
        super().__init__()
        self.batches, self.epochs, self.dies_after = [], [], dies_after

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append((self.epoch, batch, float(logs["loss"]), float(logs["mae"])))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((epoch, dict(logs)))


class Dies(keras.callbacks.Callback):
    """After so many batches; CheckpointCallback has saved then, since it is called before."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_begin(self, batch, logs=None):
        if not self.left:
            raise Died
        self.left -= 1


class Sequence(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.x, self.y = rows()

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part] + np.random.normal(size=(1,)).astype("float32"), self.y[part]


class ShufflesItself(Sequence):
    """As many do: what it has shuffled is its state."""

    def __init__(self):
        super().__init__()
        self.order = list(range(BATCHES))

    def on_epoch_end(self):
        np.random.shuffle(self.order)

    def __getitem__(self, index):
        return super().__getitem__(self.order[index])

    def get_state(self):
        return list(self.order)

    def set_state(self, state):
        self.order = list(state)


def generator():
    x, y = rows()
    while True:
        for start in range(0, ROWS, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]


def dataset():
    return rx.data.from_arrays(rows()).shuffle(seed=3).batch(BATCH)


FEEDS = {
    "arrays": lambda strategy: {"x": rows()[0], "y": rows()[1], "batch_size": BATCH},
    "arrays_split": lambda strategy: {
        "x": rows()[0],
        "y": rows()[1],
        "batch_size": 3,
        "validation_split": 0.2,
    },
    # Passes of 6 batches through the data, in epochs of 4.
    "arrays_by_steps": lambda strategy: {
        "x": rows()[0],
        "y": rows()[1],
        "batch_size": BATCH,
        "steps_per_epoch": 4,
    },
    "py_dataset": lambda strategy: {"x": Sequence()},
    "py_dataset_with_state": lambda strategy: {"x": ShufflesItself(), "shuffle": False},
    "rx_data": lambda strategy: {"x": dataset()},
    "distributed": lambda strategy: {
        "x": strategy.experimental_distribute_dataset(dataset().repeat()),
        "steps_per_epoch": 5,
    },
    "generator": lambda strategy: {"x": generator(), "steps_per_epoch": 5},
}


def fit(strategy, feed, callbacks, **options):
    model = make_model(strategy, options.pop("steps_per_execution", 1))
    given = {"epochs": EPOCHS, "verbose": 0, **FEEDS[feed](strategy), **options}
    return model, model.fit(callbacks=callbacks, **given)


@pytest.fixture(scope="module")
def mirrored():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def one_device():
    return rx.OneDeviceStrategy("cpu:0")


@pytest.fixture(autouse=True)
def no_warning_of_ends(recwarn):
    """Keras warns where data end within an epoch, which is meant here."""


def assert_goes_on(strategy, feed, folder, dies_after, save_freq=1, **options):
    """Run, die, and run again in other surroundings: all is as without the death."""
    log = Log()
    expected, history = fit(strategy, feed, [log], **options)
    with pytest.raises(Died):
        fit(strategy, feed, [CheckpointCallback(folder, save_freq), Dies(dies_after)], **options)
    np.random.seed(99)
    again = Log()
    callback = CheckpointCallback(folder, save_freq)
    np.random.random(7)
    model, resumed = fit(strategy, feed, [callback, again], **options)
    assert callback.restored_from is not None
    for got, wanted in zip(bits(model), bits(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert resumed.history == history.history
    assert resumed.epoch == history.epoch == list(range(EPOCHS))
    assert 0 < len(again.batches) < len(log.batches)
    assert again.batches == log.batches[-len(again.batches) :]
    assert again.epochs == log.epochs[-len(again.epochs) :]
    return again, log


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("feed", FEEDS)
def test_goes_on_in_the_middle_of_an_epoch(mirrored, feed, tmp_path):
    again, log = assert_goes_on(mirrored, feed, tmp_path, dies_after=8)
    assert len(again.batches) == len(log.batches) - 8
