"""``SidecarEvaluator``: a process beside the training evaluates the saved checkpoints."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.checkpoint import polling
from replicax._src.keras import sidecar_evaluator
from replicax.errors import InvalidArgumentError
from replicax.keras import SidecarEvaluator

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:__array__ implementation")]

X = np.arange(12.0, dtype=np.float32).reshape(6, 2)
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(polling, "_PAUSE_S", 0.02)
    monkeypatch.setattr(sidecar_evaluator, "_SETTLED_AFTER_S", 0.2)


def make_model(weight):
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(weight))]
    )
    model.compile(keras.optimizers.SGD(0.0), loss="mse")
    return model


class Results(keras.callbacks.Callback):
    """The loss of each evaluation, and the optimizer's count of steps."""

    def __init__(self):
        super().__init__()
        self.losses, self.iterations = [], []

    def on_test_end(self, logs=None):
        self.losses.append(float(logs["loss"]))
        self.iterations.append(int(self.model.optimizer.iterations.numpy()))


def evaluated(directory, **options):
    results = Results()
    model = make_model(0.0)
    dataset = rx.data.from_arrays((X, Y)).batch(6)
    SidecarEvaluator(model, dataset, directory, callbacks=[results], **options).start()
    return results


def loss_of(weight):
    return float(np.mean((X.sum(axis=1) * (weight - 1)) ** 2))


def test_a_checkpoint_of_model_and_optimizer(tmp_path):
    model = make_model(2.0)
    model.fit(X, Y, epochs=2, batch_size=6, verbose=0)
    manager = rx.CheckpointManager(rx.Checkpoint(model=model, optimizer=model.optimizer), tmp_path)
    manager.save()
    manager.wait()
    results = evaluated(tmp_path, max_evaluations=1)
    np.testing.assert_allclose(results.losses, [loss_of(2.0)], rtol=1e-5)
    assert results.iterations == [2]


@pytest.mark.parametrize("name", ["ckpt-3.weights.h5", "ckpt-3.keras"])
def test_the_files_of_model_checkpoint(tmp_path, name):
    model = make_model(3.0)
    model.save(tmp_path / name) if name.endswith(".keras") else model.save_weights(tmp_path / name)
    np.testing.assert_allclose(evaluated(tmp_path, max_evaluations=3).losses, [loss_of(3.0)], rtol=1e-5)


def test_evaluator_waits_for_the_next_checkpoint_and_skips_incomplete_ones(tmp_path):
    (tmp_path / "ckpt-1.weights.h5").write_bytes(b"begun")

    def train():
        # HDF5 lets a reader and a writer of one process share an open file, and its end for one is its end for both.
        # Between processes that cannot happen, so each file gets its name when it is whole.
        time.sleep(0.5)
        for epoch in (2, 3):
            whole = tmp_path.parent / f"{tmp_path.name}-{epoch}.weights.h5"
            make_model(float(epoch)).save_weights(whole)
            whole.rename(tmp_path / f"ckpt-{epoch}.weights.h5")

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        results = evaluated(tmp_path, max_evaluations=3)
        training.result()
    np.testing.assert_allclose(results.losses[-1], loss_of(3.0), rtol=1e-5)
    assert len(results.losses) <= 2


def test_half_written_file_is_read_again(tmp_path):
    whole, half = tmp_path / "whole.weights.h5", tmp_path / "ckpt-4.weights.h5"
    make_model(4.0).save_weights(whole)
    half.write_bytes(whole.read_bytes()[:-2000])
    finish = threading.Timer(0.1, lambda: half.write_bytes(whole.read_bytes()))
    whole.rename(tmp_path / "whole")
    whole = tmp_path / "whole"
    finish.start()
    np.testing.assert_allclose(evaluated(tmp_path, max_evaluations=4).losses[-1], loss_of(4.0), rtol=1e-5)
    finish.join()


def test_a_file_of_another_model_is_an_error(tmp_path):
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    other.save_weights(tmp_path / "ckpt-1.weights.h5")
    with pytest.raises(ValueError, match="shape"):
        evaluated(tmp_path, max_evaluations=1)


def test_names_without_a_number_are_counted(tmp_path):
    make_model(2.0).save_weights(tmp_path / "newest.weights.h5")
    assert len(evaluated(tmp_path, max_evaluations=1).losses) == 1


def test_a_checkpoint_without_a_model(tmp_path):
    rx.Checkpoint(net=make_model(1.0)).save(tmp_path / "ckpt")
    with pytest.raises(InvalidArgumentError, match="no object named 'model'"):
        SidecarEvaluator(make_model(1.0), X, tmp_path).start()


@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_max_evaluations_is_checked(tmp_path, number):
    with pytest.raises(InvalidArgumentError, match="max_evaluations"):
        SidecarEvaluator(make_model(1.0), X, tmp_path, max_evaluations=number)
