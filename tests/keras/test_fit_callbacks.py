"""Under a strategy, Keras's callbacks see the same as on one device, and may do the same.

Each scenario is a function of the strategy, which is None on one device: plain Keras, the oracle.
"""

import contextlib
import csv
import functools
import itertools
import os
import re
import tempfile

import jax
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx

# Keras's own Variable does not yet take the `copy` argument of NumPy 2.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.rest,
]

ROWS, BATCH = 21, 7  # three batches, which neither two nor three devices share evenly


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.long), 3])
def any_strategy(request, strategy):
    return strategy if request.param == 3 else rx.MirroredStrategy(["cpu:0", "cpu:1"])


@functools.cache
def on_one_device(scenario):
    return scenario(None)


def assert_as_on_one_device(strategy, scenario):
    """A scenario returns a pytree of keys and texts that must be equal, and numbers that must be equal up to rounding."""
    expected = on_one_device(scenario)
    assert_equal(scenario(strategy), expected)
    return expected


def assert_equal(got, expected, where="result"):
    assert type(got) is type(expected), f"{where}: {got!r} instead of {expected!r}"
    if isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected:
            assert_equal(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{where}: {got!r} instead of {expected!r}"
        for index, pair in enumerate(zip(got, expected)):
            assert_equal(*pair, f"{where}[{index}]")
    elif isinstance(expected, (float, np.ndarray)):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6, err_msg=where)
    else:
        assert got == expected, where


def features(num_rows=ROWS, seed=1):
    return np.random.default_rng(seed).normal(size=(num_rows, 4)).astype("float32")


def targets(num_rows=ROWS, seed=2):
    return np.random.default_rng(seed).normal(size=(num_rows, 1)).astype("float32")


def validation_data():
    return features(7, seed=3), targets(7, seed=4)


def scope_of(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def make_model(strategy, learning_rate=0.05, **options):
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(5, activation="tanh", name="hidden"),
                layers.Dense(1, name="output"),
            ]
        )
        optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9, **options)
        model.compile(optimizer, loss="mse", metrics=["mae"])
    return model


def train(model, callbacks=(), **options):
    keras.utils.set_random_seed(5)  # the order of the rows
    options = {"epochs": 2, "batch_size": BATCH, "verbose": 0, **options}
    return model.fit(features(), targets(), callbacks=list(callbacks), **options)


def weights_of(model):
    return [np.asarray(variable.value) for variable in model.variables]


def state_of(model):
    return weights_of(model), [np.asarray(variable.value) for variable in model.optimizer.variables]


# --- what callbacks are told --------------------------------------------------------------------------

EVENTS = ["on_epoch_begin", "on_epoch_end"] + [
    f"on_{phase}_{event}"
    for phase in ("train", "test", "predict")
    for event in ("begin", "end", "batch_begin", "batch_end")
]


class Recorder(keras.callbacks.Callback):
    """Records every event with its arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []


def recording(event):
    def record(self, index=None, logs=None):
        logs = {key: np.asarray(v) if key == "outputs" else v for key, v in (logs or {}).items()}
        self.seen.append((event, index if isinstance(index, int) else None, logs))

    return record


for name in EVENTS:
    setattr(Recorder, name, recording(name))


def every_event(strategy):
    model, recorder = make_model(strategy), Recorder()
    train(model, [recorder], validation_data=validation_data(), validation_batch_size=4)
    model.evaluate(features(9), targets(9), batch_size=4, verbose=0, callbacks=[recorder])
    model.predict(features(9), batch_size=4, verbose=0, callbacks=[recorder])
    return recorder.seen


def test_every_event_has_the_order_keys_and_values_of_one_device(any_strategy):
    seen = assert_as_on_one_device(any_strategy, every_event)
    assert {event for event, _, _ in seen} == set(EVENTS)
    ends = [logs for event, _, logs in seen if event == "on_train_batch_end"]
    assert len(ends) == 6
    assert all(list(logs) == ["loss", "mae"] and type(logs["loss"]) is float for logs in ends)


def events_of_several_steps_per_execution(strategy):
    model, recorder = make_model(strategy), Recorder()
    with scope_of(strategy):
        model.compile("sgd", loss="mse", metrics=["mae"], steps_per_execution=2)
    train(model, [recorder], validation_data=validation_data(), validation_batch_size=3)
    return recorder.seen


def test_events_with_several_steps_per_execution(strategy):
    assert_as_on_one_device(strategy, events_of_several_steps_per_execution)


def what_the_history_says(strategy):
    model = make_model(strategy)
    history = train(model, validation_data=validation_data(), validation_freq=2)
    assert history is model.history
    assert history.model is model
    return history.history, history.epoch, history.params


@pytest.mark.quick
def test_history(strategy):
    logs, epochs, params = assert_as_on_one_device(strategy, what_the_history_says)
    assert list(logs) == ["loss", "mae", "val_loss", "val_mae"]
    assert (epochs, params["steps"]) == ([0, 1], 3)


def iterations_seen(strategy):
    model, seen = make_model(strategy), []
    counts = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(int(model.optimizer.iterations.value)),
        on_epoch_end=lambda epoch, logs: seen.append(int(model.optimizer.iterations.value)),
    )

    class Syncs(keras.callbacks.Callback):
        """Reading ``self.model`` brings the variables up to date."""

        def on_train_batch_end(self, batch, logs=None):
            assert self.model is model

    train(model, [Syncs(), counts])
    return seen


@pytest.mark.quick
def test_the_optimizer_counts_steps_not_replicas(strategy):
    assert assert_as_on_one_device(strategy, iterations_seen) == [1, 2, 3, 3, 4, 5, 6, 6]


# --- stopping -----------------------------------------------------------------------------------------


class StopsTraining(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.stop_training = True


def stopped_in_a_batch(strategy):
    model, recorder = make_model(strategy), Recorder()
    history = train(model, [StopsTraining(), recorder], epochs=5)
    return history.history, [seen[:2] for seen in recorder.seen], state_of(model)


def test_stop_training_in_a_batch(strategy):
    history, events, _ = assert_as_on_one_device(strategy, stopped_in_a_batch)
    assert len(history["loss"]) == 1
    assert ("on_train_batch_end", 1) in events
    assert ("on_train_batch_end", 2) not in events


class StopsOthers(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        self.model.stop_evaluating = True

    def on_predict_batch_end(self, batch, logs=None):
        self.model.stop_predicting = True


def stopped_evaluation_and_prediction(strategy):
    model, stop = make_model(strategy), StopsOthers()
    logs = model.evaluate(features(), targets(), batch_size=5, verbose=0, callbacks=[stop], return_dict=True)
    predictions = model.predict(features(), batch_size=5, verbose=0, callbacks=[stop])
    return logs, predictions, weights_of(model)


def test_stop_evaluating_and_stop_predicting(strategy):
    _, predictions, _ = assert_as_on_one_device(strategy, stopped_evaluation_and_prediction)
    assert predictions.shape == (5, 1)


# --- callbacks that steer -----------------------------------------------------------------------------


def steered(make_callback, learning_rate=0.05, **options):
    """A scenario: four epochs with validation and one of Keras's callbacks."""

    def scenario(strategy):
        model = make_model(strategy, learning_rate, **options)
        history = train(model, [make_callback()], epochs=4, validation_data=validation_data())
        return history.history, state_of(model)

    return scenario


STEERED = {
    "learning_rate_scheduler": steered(
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate)
    ),
    "reduce_on_plateau": steered(
        lambda: keras.callbacks.ReduceLROnPlateau(
            monitor="val_loss", factor=0.1, patience=1, min_delta=10.0, min_lr=1e-6
        )
    ),
    "early_stopping": steered(
        lambda: keras.callbacks.EarlyStopping(
            monitor="val_loss", patience=2, restore_best_weights=True, min_delta=10.0
        )
    ),
    "averaged_weights": steered(
        lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True), use_ema=True, ema_momentum=0.5
    ),
}


@pytest.mark.parametrize("name", STEERED)
def test_callbacks_that_steer(strategy, name):
    history, _ = assert_as_on_one_device(strategy, STEERED[name])
    if name == "learning_rate_scheduler":
        np.testing.assert_allclose(history["learning_rate"], [0.05, 0.025, 0.0125, 0.00625], rtol=1e-6)
    if name == "reduce_on_plateau":
        np.testing.assert_allclose(history["learning_rate"], [0.05, 0.05, 5e-3, 5e-4], rtol=1e-6)
    if name == "early_stopping":
        assert len(history["loss"]) == 3


@pytest.mark.quick
def test_early_stopping_restores_the_weights_of_the_best_epoch(strategy):
    """The best epoch is the first one, because nothing can improve by 10; the weights are those after one epoch."""
    _, (weights, _) = STEERED["early_stopping"](strategy)
    model = make_model(None)
    train(model, epochs=1)
    assert_equal(weights, weights_of(model))


class ChangesWeights(keras.callbacks.Callback):
    """In the middle of an epoch, from every place where Keras allows it."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            self.model.get_layer("output").bias.assign([0.5])

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])
        if batch == 1:
            self.model.optimizer.learning_rate = 0.01
        if batch == 2:
            self.model.optimizer.learning_rate.assign(0.02)

    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[0].kernel.assign_add(np.full((4, 5), 0.25, "float32"))


def changed_in_the_middle(strategy):
    model, recorder = make_model(strategy), Recorder()
    train(model, [ChangesWeights(), recorder], validation_data=validation_data())
    return recorder.seen, state_of(model)


def test_callbacks_that_change_weights_and_the_learning_rate_in_the_middle(any_strategy):
    changed, _ = assert_as_on_one_device(any_strategy, changed_in_the_middle)
    untouched = [logs for event, _, logs in on_one_device(every_event) if event == "on_train_batch_end"]
    last = [logs for event, _, logs in changed if event == "on_train_batch_end"][-1]
    assert abs(last["loss"] - untouched[-1]["loss"]) > 1e-3, "the callback changed nothing"


class UsesTheModel(keras.callbacks.Callback):
    """Evaluates and predicts with the model in training, between epochs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.model.evaluate(*validation_data(), verbose=0, batch_size=4, return_dict=True))
        self.seen.append(self.model.predict(features(5), verbose=0))
        self.seen.append(np.asarray(self.model(features(5))))


def used_between_epochs(strategy):
    model, user = make_model(strategy), UsesTheModel()
    history = train(model, [user])
    return user.seen, history.history, state_of(model)


def test_callbacks_that_evaluate_predict_and_call_the_model(strategy):
    assert_as_on_one_device(strategy, used_between_epochs)


# --- NaN ----------------------------------------------------------------------------------------------


def trained_into_nan(strategy):
    model, recorder = make_model(strategy), Recorder()
    y = targets()
    y[16] = np.nan
    nan_stop = keras.callbacks.TerminateOnNaN()
    history = model.fit(
        features(), y, batch_size=BATCH, epochs=3, verbose=0, shuffle=False, callbacks=[nan_stop, recorder]
    )
    return history.history, recorder.seen, state_of(model)


def test_terminate_on_nan(strategy, capsys):
    expected = on_one_device(trained_into_nan)
    capsys.readouterr()
    assert_equal(trained_into_nan(strategy), expected)
    assert capsys.readouterr().out.strip() == "Batch 2: Invalid loss, terminating training"
    assert np.isnan(expected[0]["loss"]).all()
    assert len(expected[0]["loss"]) == 1


# --- files --------------------------------------------------------------------------------------------


def read_checkpoints(folder):
    """File name → the state in it."""
    found = {}
    for file in sorted(os.listdir(folder)):
        path = os.path.join(folder, file)
        if file.endswith(".keras"):
            model = keras.saving.load_model(path)
        else:
            model = make_model(None)
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        found[file] = state_of(model)
    return found


def checkpointed(file, **options):
    def scenario(strategy):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, file)
            checkpoint = keras.callbacks.ModelCheckpoint(path, **options)
            train(make_model(strategy), [checkpoint], validation_data=validation_data())
            return read_checkpoints(folder)

    return scenario


CHECKPOINTED = {
    "weights_each_epoch": checkpointed("{epoch:02d}-{loss:.2f}.weights.h5", save_weights_only=True),
    "weights_every_two_batches": checkpointed(
        "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=2
    ),
    "best_model": checkpointed("{epoch}-{val_mae:.2f}.keras", save_best_only=True, monitor="val_mae"),
    "model_every_four_batches": checkpointed("{epoch}-{batch}.keras", save_freq=4),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_model_checkpoints_have_the_names_and_weights_of_one_device(strategy, name):
    files = assert_as_on_one_device(strategy, CHECKPOINTED[name])
    if name == "weights_every_two_batches":
        assert list(files) == ["1-2.weights.h5", "2-1.weights.h5", "2-3.weights.h5"]
    assert files


def logged_to_csv(strategy):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "log.csv")
        model = make_model(strategy)
        train(model, [keras.callbacks.CSVLogger(path)], validation_data=validation_data())
        train(model, [keras.callbacks.CSVLogger(path, append=True)], validation_data=validation_data())
        with open(path, newline="") as file:
            header, *lines = csv.reader(file)
    return header, [[float(cell) for cell in line] for line in lines]


def test_csv_logger(strategy):
    header, lines = assert_as_on_one_device(strategy, logged_to_csv)
    assert header == ["epoch", "loss", "mae", "val_loss", "val_mae"]
    assert len(lines) == 4


class Interrupted(Exception):
    pass


def raising_at(step, error):
    """A callback that raises an error at the end of a given step, counted over all epochs."""
    steps = iter(range(1, 1000))

    def on_train_batch_end(batch, logs):
        if next(steps) == step:
            raise error

    return keras.callbacks.LambdaCallback(on_train_batch_end=on_train_batch_end)


@pytest.mark.parametrize("moves", ["stays", "to_one_device", "from_one_device"])
def test_a_training_that_was_interrupted_is_resumed_from_its_backup(strategy, tmp_path, moves):
    """The backup is restored in a new model, from one device onto replicas and the other way round."""
    first = None if moves == "from_one_device" else strategy
    second = None if moves == "to_one_device" else strategy
    backup = functools.partial(keras.callbacks.BackupAndRestore, str(tmp_path / "backup"))
    with pytest.raises(Interrupted):
        train(make_model(first), [backup(), raising_at(5, Interrupted())], epochs=3, shuffle=False)
    assert (tmp_path / "backup").exists()
    resumed = make_model(second)
    history = train(resumed, [backup()], epochs=3, shuffle=False)
    assert history.epoch == [1, 2]
    assert not (tmp_path / "backup").exists()
    expected = make_model(None)
    losses = train(expected, epochs=3, shuffle=False).history["loss"]
    assert_equal(history.history["loss"], losses[1:])
    assert_equal(state_of(resumed), state_of(expected))


def test_backups_in_the_middle_of_an_epoch(strategy, tmp_path):
    folder = str(tmp_path / "backup")
    model = make_model(strategy)
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)
    with pytest.raises(Interrupted):
        train(model, [backup, raising_at(5, Interrupted())], shuffle=False)
    saved = make_model(None)
    saved.optimizer.build(saved.trainable_variables)
    saved.load_weights(os.path.join(folder, "latest.weights.h5"))
    expected = make_model(None)
    with pytest.raises(Interrupted):
        train(expected, [raising_at(4, Interrupted())], shuffle=False)
    assert_equal(state_of(saved), state_of(expected))


# --- reading weights ----------------------------------------------------------------------------------


class ReadsWeights(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.kept = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(np.asarray(self.model.weights[0].value))
        self.kept.append([variable.value for variable in self.model.variables])
        self.kept.append([variable.value for variable in self.model.optimizer.variables])


def weights_read(strategy, reader=None):
    model, at_epoch_end = make_model(strategy), []
    reader = reader or ReadsWeights()
    reads_at_epoch_end = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: at_epoch_end.append(model.get_weights())
    )
    train(model, [reader, reads_at_epoch_end])
    return reader.seen, at_epoch_end, state_of(model)


def test_callbacks_that_read_weights_at_batch_and_epoch_ends(any_strategy):
    seen, at_epoch_end, _ = assert_as_on_one_device(any_strategy, weights_read)
    assert (len(seen), len(at_epoch_end)) == (6, 2)
    assert all(not np.allclose(before, after, atol=1e-5) for before, after in itertools.pairwise(seen))


def test_arrays_that_a_callback_keeps_stay_readable(strategy):
    """Their memory is not reused by the next step."""
    reader = ReadsWeights()
    weights_read(strategy, reader)
    for value, kept in zip(reader.seen, reader.kept[::2]):
        np.testing.assert_array_equal(value, kept[0])
    for array in jax.tree.leaves(reader.kept):
        assert isinstance(array, jax.Array)
        assert not array.is_deleted()
        np.asarray(array)


def test_arrays_that_a_user_kept_before_the_training_stay_readable(strategy):
    model = make_model(strategy)
    train(model, epochs=1)
    kept = [variable.value for variable in [*model.variables, *model.optimizer.variables]]
    values = [np.array(value) for value in kept]
    train(model, epochs=1)
    model.train_on_batch(features(8), targets(8))
    for array, value in zip(kept, values):
        np.testing.assert_array_equal(array, value)


# --- what is printed ----------------------------------------------------------------------------------


def without_times_and_numbers(text):
    """The text with ``#`` for numbers and ``T`` for durations, without colours and empty lines."""
    text = re.sub(r"\x1b\[\d*m|\x08", "", text)
    text = re.sub(r"\d+(us|ms|s)\b", "T", text)
    text = re.sub(r"-?\d+\.\d+(e-?\d+)?|\bnan\b", "#", text)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def models(strategy):
    """(the replicas' output, one device's): the output depends on neither weights nor history."""
    return make_model(strategy), make_model(None)


def printed(model, capsys, verbose):
    capsys.readouterr()
    train(model, verbose=verbose, validation_data=validation_data())
    model.evaluate(*validation_data(), verbose=verbose)
    model.predict(features(), batch_size=BATCH, verbose=verbose)
    captured = capsys.readouterr()
    assert captured.err == ""
    return without_times_and_numbers(captured.out)


def test_verbose_2_prints_one_line_per_epoch_as_on_one_device(models, capsys):
    lines, expected = (printed(model, capsys, verbose=2) for model in models)
    assert lines == expected
    assert lines[:2] == ["Epoch 1/2", "3/3 - T - T/step - loss: # - mae: # - val_loss: # - val_mae: #"]
    assert sum(line.startswith("Epoch") for line in lines) == 2
    assert len(lines) == 6


def test_verbose_1_prints_the_progress_bar_of_one_device(models, capsys):
    """The bars of single batches are ignored, because they depend on the clock."""

    def of_epochs(lines):
        return [line for line in lines if not re.match(r"\d+/\d+ ", line) or "val_loss" in line]

    def texts(lines):
        return {re.sub("[━]+", "━", line) for line in lines}

    lines, expected = (printed(model, capsys, verbose=1) for model in models)
    assert of_epochs(lines) == of_epochs(expected)
    assert sum("val_loss" in line for line in lines) == 2
    assert lines[-1] == expected[-1]
    of_batches = {f"{n}/3 ━ T T/step - loss: # - mae: #" for n in (1, 2, 3)}
    assert texts(lines) <= texts(expected) | of_batches | {f"{n}/3 ━ T T/step" for n in (1, 2, 3)}


def test_verbose_0_prints_nothing(models, capfd):
    model, _ = models
    capfd.readouterr()
    train(model, verbose=0)
    model.evaluate(*validation_data(), verbose=0)
    model.predict(features(), verbose=0)
    assert capfd.readouterr() == ("", "")


# --- trainings that end with an error -----------------------------------------------------------------


def interrupted_by_a_callback(strategy):
    model = make_model(strategy)
    with pytest.raises(KeyboardInterrupt):
        train(model, [raising_at(5, KeyboardInterrupt())], epochs=3)
    after = state_of(model), int(model.optimizer.iterations.value)
    again = train(model, validation_data=validation_data()).history
    return after, again, state_of(model), model.predict(features(), verbose=0)


@pytest.mark.quick
def test_a_keyboard_interrupt_in_a_callback_leaves_the_weights_of_the_steps_done(strategy):
    (_, num_steps), *_ = assert_as_on_one_device(strategy, interrupted_by_a_callback)
    assert num_steps == 5


@pytest.mark.quick
def test_an_interrupt_while_keras_empties_the_variables_loses_nothing(strategy, monkeypatch):
    model = make_model(strategy)
    train(model)
    before = state_of(model)

    def empty_and_interrupt(*args, **groups):
        keras.Model._purge_model_variables(model, *args, **groups)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_purge_model_variables", empty_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model)
    for after, expected in zip(state_of(model), before, strict=True):
        for got, given in zip(after, expected, strict=True):
            np.testing.assert_array_equal(got, given)


# Keras says of a generator without `steps_per_epoch` that its data ran out.
ends = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")


def batches(num_batches):
    for start in range(0, BATCH * num_batches, BATCH):
        yield features(64)[start : start + BATCH], targets(64)[start : start + BATCH]


def ending_with_an_error(num_batches):
    yield from batches(num_batches)
    raise OSError("shard 7 is gone")


def trained_twice(strategy, first_data, error=None):
    model = make_model(strategy)
    with error or contextlib.nullcontext():
        model.fit(first_data, shuffle=False, verbose=0)
    after = state_of(model), int(model.optimizer.iterations.value)
    again = model.fit(batches(3), shuffle=False, verbose=0).history
    return after, again, state_of(model)


@ends
def test_an_error_of_the_data_leaves_the_weights_of_the_steps_done(strategy):
    """Keras 3.12 without a strategy reads a batch ahead, and leaves out the step before the error."""
    error = pytest.raises(OSError, match="shard 7 is gone")
    interrupted = trained_twice(strategy, ending_with_an_error(4), error)
    assert_equal(interrupted, trained_twice(None, batches(4)))
    (_, num_steps), _, _ = interrupted
    assert num_steps == 4


def test_a_generator_that_raises_at_once(strategy):
    model = make_model(strategy)
    before = state_of(model)
    with pytest.raises(OSError, match="shard 7 is gone"):
        model.fit(ending_with_an_error(0), shuffle=False, verbose=0)
    assert_equal(state_of(model), before)


class Broken(keras.utils.PyDataset):
    """A dataset whose first batch cannot be read, from the given epoch on."""

    def __init__(self, epoch, with_targets=True):
        super().__init__()
        self.epochs_left, self.with_targets = epoch, with_targets

    @property
    def num_batches(self):
        return 2

    def __getitem__(self, index):
        if self.epochs_left <= 0:
            raise OSError("shard 7 is gone")
        return (features(8), targets(8)) if self.with_targets else (features(8),)

    def on_epoch_end(self):
        self.epochs_left -= 1


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_unreadable_first_batch_does_not_change_a_trained_model(strategy, call):
    model = make_model(strategy)
    train(model, epochs=1)
    before = state_of(model)
    with pytest.raises(OSError, match="shard 7 is gone"):
        getattr(model, call)(Broken(epoch=0, with_targets=call != "predict"), verbose=0)
    assert_equal(state_of(model), before)
    train(model, epochs=1)


def test_data_whose_first_batch_cannot_be_read_in_the_second_epoch(strategy):
    """Keras calls ``on_epoch_end`` once before the first epoch."""
    model, expected = make_model(strategy), make_model(None)
    with pytest.raises(OSError, match="shard 7 is gone"):
        model.fit(Broken(epoch=2), epochs=3, shuffle=False, verbose=0)
    for _ in range(2):
        expected.train_on_batch(features(8), targets(8))
    assert_equal(state_of(model), state_of(expected))


def raises_when_traced(y_true, y_pred):
    raise Interrupted("in the loss")


@pytest.mark.parametrize(
    ("state", "call"),
    [("new", "fit"), ("new", "predict")]
    + [("trained", call) for call in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch")],
)
def test_a_first_step_that_fails_leaves_the_model_usable(strategy, state, call):
    """A batch of wrong width: on one device Keras's loop would have lost the weights."""
    model, expected = make_model(strategy), make_model(None)
    if state == "trained":
        train(model, epochs=1)
        train(expected, epochs=1)
    before = state_of(model)
    wrong = np.ones((8, 3), "float32")
    args = (wrong,) if call == "predict" else (wrong, targets(8))
    options = {"verbose": 0} if call in ("fit", "evaluate", "predict") else {}
    with pytest.raises((ValueError, RuntimeError), match="incompatible"):
        getattr(model, call)(*args, **options)
    assert_equal(state_of(model), before)
    history = train(model, epochs=1, shuffle=False).history
    assert_equal(history, train(expected, epochs=1, shuffle=False).history)
    assert_equal(state_of(model), state_of(expected))


def test_a_loss_that_raises_while_it_is_traced(strategy):
    model, expected = make_model(strategy), make_model(None)
    model.compile(keras.optimizers.SGD(0.1), loss=raises_when_traced)
    before = weights_of(model)
    with pytest.raises(Interrupted, match="in the loss"):
        train(model)
    assert_equal(weights_of(model), before)
    for one in (model, expected):
        one.compile(keras.optimizers.SGD(0.1), loss="mse")
        train(one, shuffle=False)
    assert_equal(state_of(model), state_of(expected))


@ends
def test_a_later_batch_of_wrong_width_leaves_the_weights_of_the_steps_done(strategy):
    def some_are_wrong():
        yield from batches(2)
        yield np.ones((8, 3), "float32"), targets(8)

    model, expected = make_model(strategy), make_model(None)
    with pytest.raises(ValueError, match="incompatible"):
        model.fit(some_are_wrong(), shuffle=False, verbose=0)
    expected.fit(batches(2), shuffle=False, verbose=0)
    assert_equal(state_of(model), state_of(expected))
    for one in (model, expected):
        one.fit(batches(1), shuffle=False, verbose=0)
    assert_equal(state_of(model), state_of(expected))


@ends
@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_failed_evaluation_or_prediction_keeps_the_weights(strategy, call):
    model = make_model(strategy)
    train(model)
    before = state_of(model)

    def rows():
        yield from batches(2) if call == "evaluate" else ((x,) for x, _ in batches(2))
        raise OSError("shard 7 is gone")

    def raises(batch, logs):
        raise Interrupted

    with pytest.raises(OSError, match="shard 7 is gone"):
        getattr(model, call)(rows(), verbose=0)
    assert_equal(state_of(model), before)
    callback = keras.callbacks.LambdaCallback()
    setattr(callback, "on_test_batch_end" if call == "evaluate" else "on_predict_batch_end", raises)
    args = (features(), targets()) if call == "evaluate" else (features(),)
    with pytest.raises(Interrupted):
        getattr(model, call)(*args, verbose=0, callbacks=[callback])
    assert_equal(state_of(model), before)
    train(model)
    expected = make_model(None)
    train(expected)
    train(expected)
    assert_equal(state_of(model), state_of(expected))


def test_failed_validation_keeps_the_weights_of_the_epoch(strategy):
    model, expected = make_model(strategy), make_model(None)

    def raises(batch, logs):
        raise Interrupted

    callback = keras.callbacks.LambdaCallback()
    callback.on_test_batch_end = raises
    with pytest.raises(Interrupted):
        train(model, [callback], validation_data=validation_data())
    train(expected, epochs=1)
    assert_equal(state_of(model), state_of(expected))
