"""Keras Tuner and Optuna on a strategy: a study survives failing trials, each trial frees its memory, pages are true."""

import gc
from pathlib import Path

import jax
import keras
import keras_tuner
import numpy as np
import optuna
import pytest

import replicax as rx
from checks import path_of_programs, xla_flags
from page_listings import check_listings

# Keras Tuner's own: names of threading, and a new optimizer for the weights of the best model.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "currentThread",
        "getName",
        "Skipping variable loading for optimizer",
        "__array__ implementation",
    )
]
ROOT = Path(__file__).parents[2]
ROWS = 101  # batches of 32 leave 5
FEATURES = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
LABELS = FEATURES.sum(axis=1, keepdims=True)
STRATEGIES = {
    "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one_device": lambda: rx.OneDeviceStrategy("cpu:0"),
}


@pytest.fixture(autouse=True)
def no_records():
    """pytest keeps the log records of Optuna, whose tracebacks would keep the models of failed trials."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    yield
    optuna.logging.set_verbosity(before)


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


def make_model(units, rate=0.05):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(rate), "mse")
    return model


def fit(model, *callbacks):
    return model.fit(FEATURES, LABELS, batch_size=32, epochs=2, verbose=0, callbacks=list(callbacks)).history[
        "loss"
    ][-1]


class FailsInTheMiddle(keras.callbacks.Callback):
    """Ends ``fit`` as a device without memory does: after some steps, which have donated the variables."""

    def on_train_batch_end(self, batch, logs=None):
        if self.params["epochs"] and batch == 1:
            raise MemoryError("RESOURCE_EXHAUSTED")


class LiveBytes(keras.callbacks.Callback):
    """Notes how much the arrays of this process take when each training begins."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __deepcopy__(self, memo):
        return self  # Keras Tuner copies the callbacks for each trial

    def on_train_begin(self, logs=None):
        gc.collect()
        self.noted.append(sum(array.nbytes for array in jax.live_arrays()))


@pytest.mark.parametrize("page", ["keras_tuner", "optuna"])
def test_page_prints_what_it_says(page, tmp_path):
    environment = {
        "PYTHONPATH": path_of_programs(ROOT / "src"),
        "XLA_FLAGS": xla_flags(),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    check_listings((ROOT / "docs" / "how_to" / f"{page}.md").read_text(), tmp_path, environment)


def test_optuna_study_survives_a_trial_that_fails_in_the_middle(strategy):
    def objective(trial):
        with strategy.scope():
            model = make_model(4)
        return fit(model, *([FailsInTheMiddle()] if trial.number == 1 else []))

    study = optuna.create_study()
    study.optimize(objective, n_trials=3, catch=(MemoryError,))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    first, _, last = study.trials
    assert last.value == first.value  # bit for bit


def test_optuna_trials_free_their_memory(strategy):
    live = LiveBytes()

    def objective(trial):
        with strategy.scope():
            model = make_model(256)
        return fit(model, live, *([FailsInTheMiddle()] if trial.number % 2 else []))

    study = optuna.create_study()
    study.optimize(objective, n_trials=5, catch=(MemoryError,), gc_after_trial=True)
    assert len(live.noted) == 5
    assert max(live.noted[1:]) <= live.noted[1]


def search(strategy, folder, live, make=make_model, callbacks=()):
    def build(hp):
        model = make(hp.Choice("units", [256, 257]))
        hp.Float("unused", 0.0, 1.0)  # so that no two trials are alike
        return model

    tuner = keras_tuner.RandomSearch(
        build,
        objective=keras_tuner.Objective("loss", "min"),
        max_trials=5,
        seed=1,
        directory=folder,
        distribution_strategy=strategy,
    )
    tuner.search(FEATURES, LABELS, batch_size=32, epochs=2, verbose=0, callbacks=[live, *callbacks])
    return tuner


def test_keras_tuner_builds_in_the_strategys_scope_and_scores_as_one_device_does(tmp_path):
    scores = {
        name: [trial.score for trial in search(make(), tmp_path / name, LiveBytes()).oracle.trials.values()]
        for name, make in STRATEGIES.items()
    }
    np.testing.assert_allclose(scores["mirrored"], scores["one_device"], rtol=1e-4)
    assert len(scores["mirrored"]) == 5


def test_keras_tuner_trials_free_their_memory_and_survive_one_that_fails(strategy, tmp_path):
    live = LiveBytes()

    class FailsOnce(FailsInTheMiddle):
        times = 0

        def __deepcopy__(self, memo):
            return self

        def on_train_begin(self, logs=None):
            FailsOnce.times += 1

        def on_train_batch_end(self, batch, logs=None):
            if FailsOnce.times == 2:
                super().on_train_batch_end(batch, logs)

    tuner = search(strategy, tmp_path, live, callbacks=[FailsOnce()])
    statuses = [trial.status for trial in tuner.oracle.trials.values()]
    assert statuses.count("COMPLETED") == 4
    assert len(set(statuses)) == 2
    of_one_model = max(live.noted) - min(live.noted)
    assert of_one_model < 2000, live.noted  # 256 or 257 units, not the models of earlier trials


def test_best_model_of_a_tuner_predicts_on_the_strategy(strategy, tmp_path):
    tuner = search(strategy, tmp_path, LiveBytes())
    (model,) = tuner.get_best_models()
    assert model.predict(FEATURES, verbose=0).shape == (ROWS, 1)
