"""``fit`` that gets SIGTERM: a callback saves after a batch, and the checkpoint has the model's state at that time."""

import os
import signal
import time

import keras
import numpy as np
import pytest

import replicax as rx

pytestmark = pytest.mark.timeout(180)
PATIENCE_S = 60


class SaveIfPreempted(keras.callbacks.Callback):
    def __init__(self, handler, tell_after=None):
        super().__init__()
        self.handler, self.tell_after = handler, tell_after
        self.watcher = rx.experimental.PreemptionWatcher()

    def on_train_batch_end(self, batch, logs=None):
        if self.handler.total_run_calls + 1 == self.tell_after:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_S
            while self.watcher.preemption_message is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        self.handler.save_checkpoint_if_preempted()

    def on_train_end(self, logs=None):
        self.watcher.close()


def model_and_handler(folder):
    keras.utils.set_random_seed(0)
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
        model.build((None, 2))
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    checkpoint = rx.Checkpoint(model=model, optimizer=model.optimizer)
    return model, rx.experimental.PreemptionCheckpointHandler(None, checkpoint, folder)


def weights(model):
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


def test_fit_is_saved_between_batches_and_resumes_bit_identically(tmp_path):
    rows = np.random.default_rng(0).standard_normal((32, 2)).astype(np.float32)
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model, handler = model_and_handler(tmp_path / "never")
    model.fit(rows, rows[:, :1], callbacks=[SaveIfPreempted(handler)], **fit)
    assert handler.total_run_calls == 8
    handler.close()
    uninterrupted = weights(model)

    model, handler = model_and_handler(tmp_path)
    with pytest.raises(SystemExit):
        model.fit(rows, rows[:, :1], callbacks=[SaveIfPreempted(handler, tell_after=5)], **fit)
    handler.close()

    model, handler = model_and_handler(tmp_path)
    assert handler.total_run_calls == int(model.optimizer.iterations) == 5
    rest = rows[4 * 5 :]
    model.fit(rest, rest[:, :1], callbacks=[SaveIfPreempted(handler)], **fit)
    handler.close()
    for got, wanted in zip(weights(model), uninterrupted, strict=True):
        np.testing.assert_array_equal(got, wanted)
