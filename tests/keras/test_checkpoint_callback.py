"""``CheckpointCallback``: a ``fit`` that was interrupted anywhere and run again ends bit-identically to an
uninterrupted one."""

import contextlib
import errno
import re
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.checkpoint import writing
from replicax.checkpoint import CheckpointWriteError
from replicax.errors import ContextError, InvalidArgumentError, UnsupportedError
from replicax.keras.callbacks import CheckpointCallback

pytestmark = [pytest.mark.timeout(180), pytest.mark.rest]

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
    """Weights, moving statistics, states of seeds, bindings."""
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


class Died(Exception):
    pass


class Log(keras.callbacks.Callback):
    """Records what other callbacks see of each batch and epoch, and ends the training after a number of batches."""

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
    """The end comes after a number of batches; CheckpointCallback has saved then, because it is called earlier."""

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
    """Many datasets do this: the shuffled order is their state."""

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
# Each kind of data keeps its position: a generator, a PyDataset with its state, and rx.data. Arrays are in
# test_resumes_from_a_continuous_save, distributed data in test_resumes_at_the_end_of_an_epoch.
LONG_FEEDS = {"arrays", "arrays_by_steps", "arrays_split", "py_dataset", "distributed"}


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
    """Keras warns if data end within an epoch, which is intended here."""


def assert_goes_on(strategy, feed, folder, dies_after, save_freq=1, **options):
    """The training runs, dies, and runs again in another environment, and the result is that without the death."""
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
@pytest.mark.parametrize(
    "feed", [pytest.param(feed, marks=[pytest.mark.long] * (feed in LONG_FEEDS)) for feed in FEEDS]
)
def test_resumes_in_the_middle_of_an_epoch(mirrored, feed, tmp_path):
    again, log = assert_goes_on(mirrored, feed, tmp_path, dies_after=8)
    assert len(again.batches) == len(log.batches) - 8


def tensorflow_style(strategy):
    """Its logs are not those of the metrics, and its replicas have separate sums."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
            self.noise = keras.layers.Dropout(0.3)
            self.mean = keras.metrics.Mean("mean_loss")

        def call(self, x, training=False):
            return self.out(self.noise(self.hidden(x), training=training))

        def train_step(self, data):
            x, y = data
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss((self(x, training=True) - y)[:, 0] ** 2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            self.mean.update_state(loss)
            return {"loss": loss, "mae": self.mean.result()}

    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = Own()
        model.compile("adam")
    return model


STRATEGIES = {
    "one_device": lambda: rx.OneDeviceStrategy("cpu:0"),
    "default": rx.get_strategy,
    "sharded_state": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    "central_storage": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize(
    "name",
    [
        "sharded_state",
        *(pytest.param(name, marks=pytest.mark.long) for name in STRATEGIES if name != "sharded_state"),
    ],
)
def test_under_other_strategies(name, tmp_path):
    assert_goes_on(STRATEGIES[name](), "arrays", tmp_path, dies_after=8)


@pytest.mark.long
def test_a_step_of_tensorflow_style(mirrored, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "make_model", lambda strategy, steps: tensorflow_style(strategy))
    assert_goes_on(mirrored, "arrays", tmp_path, dies_after=8)


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize(
    ("feed", "steps"),
    [
        pytest.param("arrays", 6, marks=pytest.mark.long),
        pytest.param("rx_data", 6, marks=pytest.mark.quick),
        pytest.param("arrays_by_steps", 4, marks=pytest.mark.long),
        ("distributed", 5),
    ],
)
def test_resumes_at_the_end_of_an_epoch(mirrored, feed, steps, tmp_path):
    """A pass through the data may be in its middle."""
    again, log = assert_goes_on(mirrored, feed, tmp_path, dies_after=steps + 1, save_freq="epoch")
    assert len(again.batches) == len(log.batches) - steps


def test_pass_ends_with_a_resumed_epoch(one_device, tmp_path):
    """Keras counts the elements of a pass that it has taken, and starts the next pass after all of them; here it had
    taken fewer."""
    again, _ = assert_goes_on(one_device, "arrays", tmp_path, dies_after=4, steps_per_epoch=3)
    assert [(epoch, batch) for epoch, batch, *_ in again.batches] == [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("died_after", [6, pytest.param(1, marks=pytest.mark.long)])
def test_interrupted_before_the_last_batch_has_become_an_epoch(mirrored, died_after, tmp_path):
    """The state is saved after the last batch of an epoch, and the process is killed before the epoch's end: only
    validation is left."""

    class DiesInValidation(Dies):
        def on_test_begin(self, logs=None):
            raise Died

    x, y = rows()
    options = {"validation_data": (x, y)}
    _, history = fit(mirrored, "arrays", [], **options)
    with pytest.raises(Died):
        fit(
            mirrored,
            "arrays",
            [CheckpointCallback(tmp_path, 1), DiesInValidation(99 if died_after == 6 else 1)],
            **options,
        )
    log = Log()
    _, resumed = fit(mirrored, "arrays", [CheckpointCallback(tmp_path, 1), log], **options)
    assert resumed.history == history.history
    assert len(log.batches) == BATCHES * EPOCHS - died_after


@pytest.mark.long
def test_several_steps_in_one_call(mirrored, tmp_path):
    again, log = assert_goes_on(
        mirrored, "arrays", tmp_path, dies_after=4, save_freq=4, steps_per_execution=2
    )
    assert len(again.batches) == len(log.batches) - 4


class SlowDisk(keras.callbacks.Callback):
    """Writes of checkpoints end only at the ends of these batches of the training."""

    def __init__(self, monkeypatch, batches):
        super().__init__()
        self.batches, self.num_batches, self.saving = batches, 0, None
        self._released, write_pieces = threading.Semaphore(0), writing.write_pieces

        def write(*args):
            assert self._released.acquire(timeout=60)
            return write_pieces(*args)

        monkeypatch.setattr(writing, "write_pieces", write)

    def on_train_batch_end(self, batch, logs=None):
        self.num_batches += 1
        if self.num_batches in self.batches:
            self._released.release()
            self.saving.manager._background.wait(60, keeps_failure=True)

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == EPOCHS:  # the running save, and that of the last epoch's end
            self._released.release(2)


@pytest.mark.quick
def test_continuous_saves_begin_after_the_first_batch_after_the_last_one_is_durable(
    one_device, tmp_path, monkeypatch
):
    disk, began = SlowDisk(monkeypatch, {3, 4, 8}), []
    disk.saving = CheckpointCallback(tmp_path, "continuous")
    save = rx.CheckpointManager.save

    def noted(manager, *args, **how):
        path = save(manager, *args, **how)
        if path is not None:
            began.append(disk.num_batches)
        return path

    monkeypatch.setattr(rx.CheckpointManager, "save", noted)
    fit(one_device, "arrays", [disk.saving, disk])
    assert began == [1, 3, 4, 8, BATCHES * EPOCHS]


def test_resumes_from_a_continuous_save(mirrored, tmp_path):
    assert_goes_on(mirrored, "arrays", tmp_path, dies_after=8, save_freq="continuous")


def test_fit_goes_on_while_the_disk_is_full(one_device, tmp_path, monkeypatch, caplog):
    """The best epochs are saved besides, and the last one when the disk has room again."""
    write_pieces = writing.write_pieces
    saving = CheckpointCallback(tmp_path, "continuous", monitor="loss", mode="min")
    log = Log()

    def write(*args):
        if 3 <= len(log.batches) < BATCHES * EPOCHS - 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_pieces(*args)

    monkeypatch.setattr(writing, "write_pieces", write)
    model, history = fit(one_device, "arrays", [log, saving])
    assert len(history.epoch) == EPOCHS
    assert caplog.text.count("its disk is full") == 1
    assert saving.manager.best_checkpoint is not None
    again = CheckpointCallback(tmp_path, "continuous")
    resumed, _ = fit(one_device, "arrays", [again])
    assert again.restored_from == saving.manager.latest_checkpoint
    for got, wanted in zip(bits(resumed), bits(model), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_fit_that_ends_while_the_disk_is_full_says_so(one_device, tmp_path, monkeypatch):
    def write(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "write_pieces", write)
    log = Log()
    with pytest.raises(CheckpointWriteError, match="its disk is full"):
        fit(one_device, "arrays", [log, CheckpointCallback(tmp_path, "continuous")])
    assert len(log.epochs) == EPOCHS


class OutsideOfScopes:
    """In place of a strategy: the model belongs to Keras."""

    scope = contextlib.nullcontext


def test_several_steps_in_one_call_outside_of_scopes(tmp_path):
    """Keras 3.16 stacks their batches."""
    again, log = assert_goes_on(
        OutsideOfScopes(), "arrays", tmp_path, dies_after=4, save_freq=4, steps_per_execution=2
    )
    assert len(again.batches) == len(log.batches) - 4


class Scaled(keras.callbacks.Callback):
    """A callback with its own state, which influences the computation."""

    def __init__(self):
        super().__init__()
        self.num_epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.num_epochs += 1
        self.model.optimizer.learning_rate = 0.01 / self.num_epochs

    def get_state(self):
        return self.num_epochs

    def set_state(self, state):
        self.num_epochs = state


class Stopping(keras.callbacks.EarlyStopping):
    """Keras's own callback, with the two methods that keep its patience."""

    def get_state(self):
        return {"wait": self.wait, "best": self.best, "best_epoch": self.best_epoch}

    def set_state(self, state):
        vars(self).update(state)


class Plateau(keras.callbacks.ReduceLROnPlateau):
    def get_state(self):
        return {"wait": self.wait, "best": self.best, "cooldown": self.cooldown_counter}

    def set_state(self, state):
        self.wait, self.best, self.cooldown_counter = state["wait"], state["best"], state["cooldown"]


def test_callbacks_with_get_state_and_set_state_resume(one_device, tmp_path):
    """Their counts, and their actions at the end of an epoch, in any order of the callbacks."""
    options = {"epochs": 8}

    def callbacks(*further):
        plateau = Plateau("loss", factor=0.5, patience=1, min_delta=0.1)
        return [*further, plateau, Stopping("loss", patience=2, min_delta=10), Scaled()]

    expected, history = fit(one_device, "arrays", callbacks(), **options)
    for dies_after in (9, 8):
        with pytest.raises(Died):
            fit(one_device, "arrays", callbacks(CheckpointCallback(tmp_path, 1), Dies(dies_after)), **options)
    model, resumed = fit(one_device, "arrays", callbacks(CheckpointCallback(tmp_path, 1)), **options)
    assert resumed.history == history.history
    assert len(history.epoch) == 3  # it was stopped early
    for got, wanted in zip(bits(model), bits(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
    _, again = fit(one_device, "arrays", callbacks(CheckpointCallback(tmp_path, 1)), **options)
    assert again.history == history.history  # and nothing was trained


RESTARTS = {
    # The list in the documentation: a callback, its values at the end without an interruption, and after a resume in
    # the third of three epochs.
    "early_stopping": (
        lambda folder: keras.callbacks.EarlyStopping("loss", patience=9, min_delta=100),
        lambda one: (one.wait, one.best_epoch),
        (2, 0),
        (0, 2),
    ),
    "reduce_lr_on_plateau": (
        lambda folder: keras.callbacks.ReduceLROnPlateau("loss", patience=9, min_delta=100),
        lambda one: one.wait,
        2,
        0,
    ),
    "model_checkpoint": (
        # It writes the third epoch, which is worse than the first: the value of the first is lost.
        lambda folder: keras.callbacks.ModelCheckpoint(
            f"{folder}/{{epoch}}.weights.h5", "loss", mode="max", save_best_only=True, save_weights_only=True
        ),
        lambda one: sorted(path.name for path in Path(one.filepath).parent.glob("*.h5")),
        ["1.weights.h5"],
        ["1.weights.h5", "3.weights.h5"],
    ),
    "csv_logger": (
        lambda folder: keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        lambda one: Path(one.filename).read_text().count("\n"),
        1 + EPOCHS,
        1 + 1,
    ),
    "csv_logger_that_appends": (
        lambda folder: keras.callbacks.CSVLogger(f"{folder}/log.csv", append=True),
        lambda one: Path(one.filename).read_text().count("\n"),
        1 + EPOCHS,
        1 + EPOCHS,
    ),
    "learning_rate_scheduler": (
        lambda folder: keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1)),
        lambda one: round(float(one.model.optimizer.learning_rate), 6),
        round(0.01 / 3, 6),
        round(0.01 / 3, 6),
    ),
}


# The first counts like EarlyStopping; test_a_learning_rate_is_computed_once_for_each_epoch has the second.
LONG_RESTARTS = {"reduce_lr_on_plateau", "learning_rate_scheduler"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG_RESTARTS)) for name in RESTARTS]
)
def test_restart_values_of_keras_callbacks(one_device, tmp_path, name):
    make, look, uninterrupted, resumed = RESTARTS[name]
    folders = [tmp_path / part for part in ("whole", "parts")]
    for folder in folders:
        folder.mkdir()
    whole, first, second = make(folders[0]), make(folders[1]), make(folders[1])
    fit(one_device, "arrays", [whole])
    with pytest.raises(Died):
        fit(one_device, "arrays", [first, CheckpointCallback(tmp_path / "saved", 1), Dies(2 * BATCHES + 1)])
    fit(one_device, "arrays", [second, CheckpointCallback(tmp_path / "saved", 1)])
    assert (look(whole), look(second)) == (uninterrupted, resumed)


def test_a_backup_of_keras_yields_to_the_checkpoint(one_device, tmp_path):
    """Both restore when fit starts: BackupAndRestore restores the start of the epoch, CheckpointCallback the middle,
    and the latter wins."""

    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)

    expected, history = fit(one_device, "arrays", [])
    with pytest.raises(Died):
        fit(one_device, "arrays", [backup(), CheckpointCallback(tmp_path / "saved", 1), Dies(BATCHES + 2)])
    model, resumed = fit(one_device, "arrays", [backup(), CheckpointCallback(tmp_path / "saved", 1)])
    assert resumed.history == history.history
    for got, wanted in zip(bits(model), bits(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)


def averaged(one_device, callbacks):
    with one_device.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5), "mse")
    x, y = rows()
    history = model.fit(x, y, batch_size=11, epochs=3, verbose=0, validation_data=(x, y), callbacks=callbacks)
    return bits(model), history.history


def test_averaged_weights_in_validation_resume(one_device, tmp_path):
    expected, history = averaged(one_device, [keras.callbacks.SwapEMAWeights()])
    for dies_after in (2, 3):  # after an epoch, in the middle of the second one
        folder = tmp_path / str(dies_after)
        with pytest.raises(Died):
            averaged(
                one_device,
                [keras.callbacks.SwapEMAWeights(), CheckpointCallback(folder, 1), Dies(dies_after)],
            )
        got, resumed = averaged(one_device, [keras.callbacks.SwapEMAWeights(), CheckpointCallback(folder, 1)])
        assert resumed == history
        for here, wanted in zip(got, expected, strict=True):
            np.testing.assert_array_equal(here, wanted)


def test_swap_on_epoch_raises(one_device, tmp_path):
    """The checkpoint at an epoch's end would contain the averages in place of the training weights."""
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    with pytest.raises(UnsupportedError, match="swap_on_epoch"):
        averaged(one_device, [swap, CheckpointCallback(tmp_path)])


def test_a_learning_rate_is_computed_once_for_each_epoch(mirrored, tmp_path):
    """The rate follows from the previous one, and is not computed again when a started epoch resumes."""

    def scheduled():
        return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)

    expected, history = fit(mirrored, "arrays", [scheduled()])
    with pytest.raises(Died):
        fit(mirrored, "arrays", [scheduled(), CheckpointCallback(tmp_path, 1), Dies(BATCHES + 2)])
    model, resumed = fit(mirrored, "arrays", [CheckpointCallback(tmp_path, 1), scheduled()])
    assert resumed.history == history.history
    for got, wanted in zip(bits(model), bits(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_learning_rate_set_at_a_resumed_epoch_takes_effect(one_device, tmp_path):
    """A later callback sets it, like callbacks in a CallbackList."""
    with pytest.raises(Died):
        fit(one_device, "arrays", [CheckpointCallback(tmp_path), Dies(BATCHES)])
    model = make_model(one_device)

    def lower(logs=None):
        model.optimizer.learning_rate = 1e-6

    doubling = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: model.optimizer.learning_rate.assign(
            model.optimizer.learning_rate * 2
        )
    )
    callbacks = [doubling, CheckpointCallback(tmp_path), keras.callbacks.LambdaCallback(on_train_begin=lower)]
    listed = keras.callbacks.CallbackList(callbacks, add_history=True, model=model, epochs=EPOCHS)
    model.fit(callbacks=listed, epochs=EPOCHS, verbose=0, **FEEDS["arrays"](one_device))
    assert float(model.optimizer.learning_rate) == pytest.approx(1e-6 * 2**2)


def test_finished_training_and_longer_training(one_device, tmp_path, caplog):
    expected, history = fit(one_device, "arrays", [], epochs=4)
    fit(one_device, "arrays", [CheckpointCallback(tmp_path)], epochs=2)
    log = Log()
    _, ended = fit(one_device, "arrays", [CheckpointCallback(tmp_path), log], epochs=2)
    assert log.batches == []
    assert ended.history == {name: values[:2] for name, values in history.history.items()}
    assert "has ended after 2 epoch(s)" in caplog.text
    model, longer = fit(one_device, "arrays", [CheckpointCallback(tmp_path)], epochs=4)
    assert longer.history == history.history
    for got, wanted in zip(bits(model), bits(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_newest_and_the_best_are_kept(one_device, tmp_path):
    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_accuracy"] = [0.5, 0.9, 0.7, 0.6][epoch]

    callback = CheckpointCallback(tmp_path, max_to_keep=1, monitor="val_accuracy")
    fit(one_device, "arrays", [callback, Worse()], epochs=4)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["ckpt-2", "ckpt-4"]
    assert callback.manager.best_checkpoint == str(tmp_path / "ckpt-2")


def test_epochs_without_validation_are_not_compared(one_device, tmp_path):
    x, y = rows()
    options = {"epochs": 4, "validation_freq": [2, 3]}
    callback = CheckpointCallback(tmp_path, max_to_keep=1, monitor="val_loss", mode="max")
    _, history = fit(one_device, "arrays", [callback], validation_data=(x, y), **options)
    first, second = history.history["val_loss"]
    assert first > second
    assert callback.manager.best_checkpoint == str(tmp_path / "ckpt-2")
    wrong = CheckpointCallback(tmp_path / "wrong", monitor="val_los")
    with pytest.raises(InvalidArgumentError, match=r"no such name; they have .*'val_loss'"):
        fit(one_device, "arrays", [wrong], validation_data=(x, y), **options)


def test_a_manager_of_the_user(one_device, tmp_path):
    own = rx.Variable(3.0)
    manager = rx.CheckpointManager(rx.Checkpoint(own=own), tmp_path, max_to_keep=None)
    with pytest.raises(Died):
        fit(one_device, "arrays", [CheckpointCallback(manager, 2), Dies(7)])
    own.assign(0.0)
    again = rx.CheckpointManager(rx.Checkpoint(own=own), tmp_path)
    callback = CheckpointCallback(again, 2)
    fit(one_device, "arrays", [callback])
    assert float(own) == 3.0
    assert callback.restored_from == str(tmp_path / "ckpt-3")


def test_local_checkpoints(one_device, tmp_path):
    """fit resumes from a local checkpoint, and the end of the training is in the shared directory."""

    class Waits(keras.callbacks.Callback):
        """A local save is put off while another one is still being written."""

        def __init__(self, saving):
            super().__init__()
            self.saving = saving

        def on_train_batch_begin(self, batch, logs=None):
            self.saving.manager.wait()

    def run(*callbacks):
        saving = CheckpointCallback(tmp_path / "shared", 6, local_directory=tmp_path / "local", local_every=2)
        model, history = fit(one_device, "arrays", [saving, Waits(saving), *callbacks])
        return model, saving.restored_from, history.history

    expected, history = fit(one_device, "arrays", [])
    with pytest.raises(Died):
        run(Dies(7))
    for tier in ("local", "shared"):
        model, restored_from, resumed = run()
        assert restored_from.startswith(str(tmp_path / tier))
        assert resumed == history.history
        for got, wanted in zip(bits(model), bits(expected), strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_of_unknown_length_that_were_all_read_before(mirrored, tmp_path):
    """The process ends after the last batch of an epoch, but before the epoch's end: no batch is left afterwards."""
    x = np.ones((6, 4, 3), np.float32)

    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise Died

    def fitted(*callbacks):
        with mirrored.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        data = ((batch, batch[:, :1]) for batch in x)
        return model.fit(data, callbacks=[*callbacks, CheckpointCallback(tmp_path, save_freq=6)], verbose=0)

    with pytest.raises(Died):
        fitted(Ends())
    assert fitted().epoch == [0]


def test_a_fit_of_the_model_in_a_callback(mirrored, tmp_path):
    class Again(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.fit(*data, callbacks=[CheckpointCallback(tmp_path / "inner")], verbose=0)

    data = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    with mirrored.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(*data, callbacks=[Again(), CheckpointCallback(tmp_path / "outer")], verbose=0)
    assert rx.checkpoint.latest_checkpoint(tmp_path / "inner") is not None
    assert "_symbolic_build" not in vars(model)


# --- told to end ------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import conftest
sys.path.insert(0, {here!r})
import test_checkpoint_callback as test

class IsTold(test.keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if (self.params["epoch"], batch) == (1, 2):
            watcher = test.rx.experimental.PreemptionWatcher()  # after the callback that saves, and told after it
            os.kill(os.getpid(), signal.SIGTERM)
            while watcher.preemption_message is None:  # by a thread
                time.sleep(0.001)

    def on_epoch_begin(self, epoch, logs=None):
        self.params["epoch"] = epoch

strategy = test.rx.MirroredStrategy(["cpu:0", "cpu:1"])
test.fit(strategy, "arrays", [test.CheckpointCallback({folder!r}), IsTold()])
"""


@pytest.mark.long
def test_preempted_process_saves_and_another_resumes(mirrored, tmp_path):
    here = Path(__file__).parent
    program = PROGRAM.format(tests=str(here.parent), here=str(here), folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert ended.returncode == 42, ended.stderr[-3000:]
    log, again = Log(), Log()
    expected, history = fit(mirrored, "arrays", [log])
    model, resumed = fit(mirrored, "arrays", [CheckpointCallback(tmp_path), again])
    assert again.batches[0][:2] in [(1, 3), (1, 4)]
    assert again.batches == log.batches[-len(again.batches) :]
    assert resumed.history == history.history
    for got, wanted in zip(bits(model), bits(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)


# --- what is wrong ------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_unsupported_options_raise(tmp_path):
    manager = rx.CheckpointManager(rx.Checkpoint(), tmp_path)
    continuous = rx.CheckpointManager(rx.Checkpoint(), tmp_path, continuous=True)
    for arguments, said in (
        (
            {"save_freq": "continuous", "local_directory": tmp_path, "local_every": 2},
            "Remove local_directory",
        ),
        ({"save_freq": "continuous", "directory": manager}, "continuous=False, and save_freq='continuous'"),
        ({"directory": continuous}, "continuous=True, and save_freq='epoch'"),
        ({"directory": continuous, "save_freq": 2}, "continuous=True, and save_freq=2"),
        ({"save_freq": 0}, "a number of batches of at least 1; got 0"),
        ({"save_freq": "batch"}, "got 'batch'"),
        ({"mode": "best"}, "'auto', 'min' or 'max'; got 'best'"),
        ({"termination_config": 3}, "TerminationConfig, got 3"),
        ({"directory": manager, "monitor": "loss"}, "leave max_to_keep, monitor"),
        ({"directory": manager, "local_directory": tmp_path}, "leave max_to_keep, monitor"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(said)):
            CheckpointCallback(**{"directory": tmp_path, **arguments})
    with pytest.raises(ContextError, match="works only as a callback"):
        CheckpointCallback(tmp_path).on_train_begin()


def test_other_fit_than_the_saved_one(one_device, tmp_path):
    with pytest.raises(Died):
        fit(one_device, "arrays", [CheckpointCallback(tmp_path, 1), Dies(5)])
    for options, said in (
        (
            {"steps_per_execution": 2},
            "after batch 5 of an epoch, and the model now takes steps_per_execution=2",
        ),
        ({"initial_epoch": 1}, "initial_epoch=1, and the checkpoint"),
        ({"batch_size": 11}, "data have ended before batch 5"),
    ):
        model = make_model(one_device, options.pop("steps_per_execution", 1))
        given = {**FEEDS["arrays"](one_device), "verbose": 0, "epochs": EPOCHS, **options}
        before = dict(vars(model))
        with pytest.raises(InvalidArgumentError, match=re.escape(said)):
            model.fit(callbacks=[CheckpointCallback(tmp_path, 1), Log()], **given)
        assert model._initial_epoch == before["_initial_epoch"]
    with pytest.raises(InvalidArgumentError, match="2 CheckpointCallbacks"):
        fit(one_device, "arrays", [CheckpointCallback(tmp_path), CheckpointCallback(tmp_path)])
    with pytest.raises(InvalidArgumentError, match="have no such name"):
        fit(one_device, "arrays", [CheckpointCallback(tmp_path / "other", monitor="val_loss")])
