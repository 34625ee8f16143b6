"""A replacement of a dead worker enters a ``fit`` with CheckpointCallback at any boundary, and ends with the bits of the
others: weights, optimizer, history, random states and callbacks."""

import random

import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
from replacements import Admission, strategy_as

# Keras's own Variable does not yet take the `copy` argument of NumPy 2.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)

R, ROWS, BATCH, CLASSES = 2, 50, 12, 3  # five batches, the last one of two rows


def rows(num_rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_rows, 4)).astype("float32"), rng.integers(0, CLASSES, num_rows).astype(
        "int32"
    )


def compiled(**options):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6),
            layers.BatchNormalization(momentum=0.7),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )
    optimizer = keras.optimizers.Adam(0.05, **options.pop("optimizer", {}))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        x, y = rows()
        at = slice(index * BATCH, (index + 1) * BATCH)
        return x[at], y[at]


class Drawing(keras.callbacks.Callback):
    """Draws random numbers where a training may do so."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def get_state(self):
        return self.drawn

    def set_state(self, state):
        self.drawn = list(state)

    def draw(self):
        self.drawn.append([float(np.random.random()), random.random()])

    def on_epoch_begin(self, epoch, logs=None):
        self.draw()

    def on_train_batch_end(self, batch, logs=None):
        self.draw()


def arrays(model, callbacks, **options):
    x, y = rows()
    options = {"batch_size": BATCH, "epochs": 2, **options}
    return model.fit(x, y, verbose=0, callbacks=callbacks, **options)


def dataset(model, callbacks, **options):
    data = rx.data.from_arrays(rows()).shuffle(ROWS, seed=3).batch(BATCH)
    return model.fit(data, **{"epochs": 2, **options}, verbose=0, callbacks=callbacks)


def unknown_length(model, callbacks):
    data = rx.data.from_arrays(rows()).filter(lambda x, y: x[0] > -1).batch(BATCH)
    return model.fit(data, epochs=2, verbose=0, callbacks=callbacks)


def py_dataset(model, callbacks):
    return model.fit(Batches(), epochs=2, shuffle=True, verbose=0, callbacks=callbacks)


PROGRAMS = {
    "arrays": (compiled, arrays),
    "validated": (compiled, lambda m, c: arrays(m, c, validation_data=rows(20, 1), validation_batch_size=8)),
    "split": (compiled, lambda m, c: arrays(m, c, validation_split=0.3, validation_freq=2)),
    "class weights": (compiled, lambda m, c: arrays(m, c, class_weight={0: 2.0, 1: 0.5, 2: 1.0})),
    "several steps": (lambda: compiled(steps_per_execution=3), arrays),
    "a pass of two epochs": (compiled, lambda m, c: dataset(m, c, steps_per_epoch=2)),
    "dataset": (compiled, dataset),
    "unknown length": (compiled, unknown_length),
    "py_dataset": (compiled, py_dataset),
    "averaged": (lambda: compiled(optimizer={"use_ema": True, "ema_momentum": 0.9}), arrays),
    "accumulated": (lambda: compiled(optimizer={"gradient_accumulation_steps": 3}), arrays),
}
# With the first test of arrays, these have each way in which a fit goes through its data.
SHORT = {"several steps", "a pass of two epochs", "unknown length", "py_dataset"}


def plain(value):
    """The value with the bits of arrays in place of these."""
    return [np.asarray(each).tobytes() for each in value] if isinstance(value, list) else value


def outcome(strategy, build, train, others, directory, **saving):
    """The bits of all that a training ends with, and the callback that saves."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
    callbacks = others()
    saver = rx.keras.callbacks.CheckpointCallback(directory, **saving)
    history = train(model, [*callbacks, saver])
    drawn = float(np.random.random()), random.random()
    x, y = rows()
    evaluation = model.evaluate(x, y, batch_size=20, verbose=0)
    values = [np.asarray(v.value).tobytes() for v in [*model.variables, *model.optimizer.variables]]
    states = [
        {name: plain(value) for name, value in vars(one).items() if isinstance(value, (int, float, list))}
        for one in callbacks
    ]
    counts = saver.manager._counts()
    return {
        "history": (history.history, history.epoch),
        "values": values,
        "drawn": drawn,
        "evaluation": evaluation,
        "callbacks": states,
        "counts": counts,
    }


def live_run(monkeypatch, program, others, directory, **saving):
    """The outcome of a live worker's run, its states at all boundaries with their versions, and its peers."""
    admission = Admission()
    strategy, peers = strategy_as(monkeypatch, admission, number=0, num_tasks=R)
    return outcome(strategy, *program, others, directory, **saving), admission, peers


def replaced_run(monkeypatch, program, others, directory, live, at, **saving):
    """The same of the replacement that enters at a boundary of the live worker."""
    admission = Admission(live.gifts[at], is_asked=False)
    version = live.versions[at]
    strategy, peers = strategy_as(monkeypatch, admission, number=1, num_tasks=R, version=version)
    peers.last_entry, peers.counts_of_others = version, live.counts_before
    return outcome(strategy, *program, others, directory, **saving), peers


def check_all(monkeypatch, tmp_path, program, others=lambda: [Drawing()], only=None, **saving):
    """Enters at some boundaries, or at all."""
    expected, admission, peers = live_run(monkeypatch, program, others, tmp_path / "training", **saving)
    num = len(admission.gifts)
    for at in range(num) if only is None else sorted({n % num for n in only}):
        version = admission.versions[at]
        got, replaced = replaced_run(
            monkeypatch, program, others, tmp_path / "training", admission, at, **saving
        )
        has_saved = any(topic == "checkpoint counts" for _, topic, _ in replaced.keys)
        for name in expected.keys() - (set() if has_saved else {"counts"}):
            assert got[name] == expected[name], f"{name}, of boundary {at} of {num}"
        dated = [key for key in peers.keys if key[0] > version]
        own = [key for key in replaced.keys if key[0] > version and key[1] != "checkpoint counts"]
        assert own == dated, f"all-gathers of boundary {at} of {num}"
    return admission


def test_replacement_ends_with_the_bits_of_the_others(monkeypatch, tmp_path):
    """It enters after the last batch of an epoch, before its validation; then in the middle of an epoch."""
    check_all(monkeypatch, tmp_path, PROGRAMS["validated"], only=[4, 7])


@pytest.mark.rest
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in PROGRAMS]
)
def test_replacement_of_any_fit_ends_with_the_bits_of_the_others(name, monkeypatch, tmp_path):
    """It enters in the middle of an epoch, after its last batch, after the epoch, and after the last one."""
    check_all(monkeypatch, tmp_path, PROGRAMS[name], only=[1, -8, -7, -6, -1])


class Counting(keras.callbacks.Callback):
    """Has a state, and no get_state."""

    def __init__(self):
        super().__init__()
        self.num_batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num_batches += 1


def of_keras(folder):
    def callbacks():
        return [
            keras.callbacks.EarlyStopping("loss", patience=2, min_delta=10.0, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0, factor=0.5),
            keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            Drawing(),
        ]  # fmt: skip

    return callbacks


@pytest.mark.rest
def test_callbacks_of_keras_go_on_as_in_the_others(monkeypatch, tmp_path):
    """The EarlyStopping ends the training in all workers after the same epoch."""
    program = compiled, lambda m, c: arrays(m, c, epochs=9, validation_data=rows(20, 1))
    live = check_all(
        monkeypatch, tmp_path, program, of_keras(tmp_path), only=[5, 8, 11, -1]
    )  # a rate is halved before 11
    assert len(live.gifts) == 3 * 6, "it ends after three of nine epochs"


def test_callback_of_the_user_without_a_state_is_named(monkeypatch, tmp_path, caplog):
    others = lambda: [Counting()]  # noqa: E731
    _, live, _ = live_run(monkeypatch, PROGRAMS["arrays"], others, tmp_path / "training")
    caplog.clear()
    got, _ = replaced_run(monkeypatch, PROGRAMS["arrays"], others, tmp_path / "training", live, 3)
    (warning,) = [record.getMessage() for record in caplog.records if "Counting" in record.getMessage()]
    assert "get_state() and set_state(state)" in warning
    assert got["callbacks"] == [{"num_batches": 6}]


@pytest.mark.rest
def test_fit_inside_a_second_fit_is_entered_behind_the_first(monkeypatch, tmp_path):
    """The replacement finds the first training ended, and enters the second one."""

    def twice(model, callbacks):
        first = rx.keras.callbacks.CheckpointCallback(tmp_path / "first")
        arrays(model, [first], epochs=1)
        return arrays(model, callbacks, epochs=2)

    check_all(monkeypatch, tmp_path, (compiled, twice), only=[8])
