"""Callbacks of replicax in a ``fit`` on parameter servers: checkpoints at the ends of epochs, files for TensorBoard."""

import keras
import numpy as np
import pytest

import replicax as rx
from event_files import scalars_in, summaries_in
from in_memory_servers import in_memory_strategy
from replicax.errors import UnsupportedError
from replicax.keras.callbacks import CheckpointCallback

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

X = np.random.default_rng(1).normal(size=(22, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Died(Exception):
    pass


class DiesInSecondEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise Died


def fit(strategy, callbacks, **options):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [
            keras.layers.Dense(4, "tanh", name="hidden"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.Adam(0.125), "mse", metrics=["mae"])
    given = {"batch_size": 4, "epochs": 3, "verbose": 0, **options}
    return model.fit(X, Y, callbacks=callbacks, **given).history


@pytest.mark.rest
def test_checkpoints_are_saved_at_the_ends_of_epochs(tmp_path):
    with in_memory_strategy(workers=1) as strategy:
        history = fit(strategy, [])
    with in_memory_strategy(workers=1) as strategy, pytest.raises(Died):
        fit(strategy, [CheckpointCallback(tmp_path), DiesInSecondEpoch()])
    with in_memory_strategy(workers=1) as strategy:
        callback = CheckpointCallback(tmp_path)
        resumed = fit(strategy, [callback])
        assert callback.restored_from == str(tmp_path / "ckpt-1")
        assert resumed == history
        with pytest.raises(UnsupportedError, match="with parameter servers"):
            fit(strategy, [CheckpointCallback(tmp_path, 5)])
        with pytest.raises(UnsupportedError, match=r"save_freq='continuous'\): with parameter servers"):
            fit(strategy, [CheckpointCallback(tmp_path, "continuous")])


def test_epochs_are_written_as_fit_returned_them(tmp_path):
    with in_memory_strategy(2, 1) as strategy:
        callback = rx.keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)
        history = fit(strategy, [callback], epochs=2, batch_size=11, validation_data=(X, Y))
    train, validation = scalars_in(tmp_path / "train"), scalars_in(tmp_path / "validation")
    assert train.keys() == {"epoch_loss", "epoch_mae", "epoch_learning_rate"}
    for metric in ("loss", "mae"):
        for epoch in range(2):
            assert train[f"epoch_{metric}"][epoch] == pytest.approx(history[metric][epoch])
            assert validation[f"epoch_{metric}"][epoch] == pytest.approx(history[f"val_{metric}"][epoch])
        of_steps = validation[f"evaluation_{metric}_vs_iterations"]
        assert list(of_steps) == [2, 4], "of the optimizer's steps"
    assert train["epoch_learning_rate"] == {0: 0.125, 1: 0.125}
    tables = {n: v for plugin, n, step, v in summaries_in(tmp_path / "train") if plugin == "histograms"}
    assert any(n.endswith("hidden/kernel/histogram") for n in tables)
