"""The position of a training loop: fit's epochs, passes through datasets, and the time that is left."""

import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.cluster import loop_progress as progress_module
from replicax._src.cluster.counters import Counters, counters
from replicax._src.cluster.figures import job_figures, logs_of, program_name
from replicax._src.cluster.loop_progress import EPOCH, PASS, LoopProgress


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def run(progress, clock, num_batches, s_per_batch=1.0):
    for _ in range(num_batches):
        clock.now += s_per_batch
        progress.note()


def test_time_left_is_that_of_the_remaining_batches_at_the_mean_speed(clock):
    progress = LoopProgress(EPOCH, 3)
    progress.begin_turn(0, 10)
    assert progress.describe()["left_s"] is None
    run(progress, clock, 2, s_per_batch=60.0)  # these compile, and do not count
    assert progress.describe()["left_s"] is None
    run(progress, clock, 4, s_per_batch=2.0)
    told = progress.describe()
    assert (told["batch"], told["share"], told["left_s"]) == (
        6,
        pytest.approx(6 / 30),
        pytest.approx(24 * 2.0),
    )
    clock.now += 4.0  # a validation takes time too
    assert progress.describe()["left_s"] == pytest.approx(24 * 3.0)
    progress.begin_turn(2, 10)
    assert progress.describe()["share"] == pytest.approx(20 / 30)


def test_nothing_is_told_of_what_is_not_known(clock):
    progress = LoopProgress(EPOCH, 3)
    progress.begin_turn(0, None)
    run(progress, clock, 7)
    told = progress.describe()
    assert (told["number"], told["batch"]) == (1, 7)
    assert (told["num_batches"], told["share"], told["left_s"]) == (None, None, None)
    progress.begin_turn(1, None)  # Keras gives the other epochs as many batches as the first
    assert progress.describe()["num_batches"] == 7
    run(progress, clock, 8)
    assert progress.describe()["share"] is None, "it has more than were promised"


def test_pass_has_no_number_of_passes_and_ends_with_its_data(clock):
    progress = LoopProgress(PASS)
    progress.begin_turn(4, 8)
    run(progress, clock, 6)
    told = progress.describe()
    assert (told["number"], told["num_turns"], told["share"], told["left_s"]) == (5, None, 0.75, 2.0)


def length_of(num_batches):
    progress = LoopProgress(PASS)
    progress.begin_turn(0, num_batches)
    return progress


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [
        ([100, 10], 0),  # a validation after an epoch
        ([10, 100], 1),
        ([100, 100], 1),  # the next epoch, of a dataset made anew
        ([100, 10, 100], 2),
        ([None, 10, None], 2),
        ([10, None], 1),
    ],
    ids=str,
)
def test_longest_loop_is_shown(lengths, shown):
    counted = Counters()
    passes = list(map(length_of, lengths))
    for each in passes:
        counted.begin_pass(each)
    assert counted.passes is passes[shown]


@pytest.fixture
def model():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    return model


ROWS = np.arange(24, dtype=np.float32)[:, None] / 24


class Told(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.told = []

    def on_train_batch_end(self, batch, logs=None):
        self.told.append(job_figures())

    def on_test_begin(self, logs=None):
        self.told.append(job_figures())


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_fit_shows_its_epoch_and_its_metrics(model, steps_per_execution):
    model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    seen = Told()
    validation = {"validation_data": (ROWS, ROWS)}
    history = model.fit(ROWS, ROWS, epochs=2, batch_size=4, verbose=0, callbacks=[seen], **validation).history
    progress = [told["progress"] for told in seen.told]
    assert {(each["kind"], each["num_turns"], each["num_batches"]) for each in progress} == {("epoch", 2, 6)}
    each_epoch = [*range(steps_per_execution, 7, steps_per_execution), 6]  # the last is the validation
    expected = [(number, batch) for number in (1, 2) for batch in each_epoch]
    assert [(each["number"], each["batch"]) for each in progress] == expected
    assert progress[-1]["share"] == 1
    told = job_figures()
    assert told["progress"] is None or told["progress"]["kind"] == "pass", "fit has ended"
    assert told["metrics"] == pytest.approx(
        {name: values[-1] for name, values in history.items() if name != "loss"}
    )
    assert list(told["metrics"]) == ["mae", "val_loss", "val_mae"]
    assert told["job"]["strategy"] == "MirroredStrategy"


def test_resumed_fit_shows_the_batch_of_the_checkpoint(model, tmp_path):
    class Stop(Told):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if len(self.told) == 9:
                raise KeyboardInterrupt

    def fit(callback):
        saving = rx.keras.callbacks.CheckpointCallback(str(tmp_path), save_freq=4)
        model.fit(ROWS, ROWS, epochs=2, batch_size=4, verbose=0, callbacks=[callback, saving])

    with pytest.raises(KeyboardInterrupt):
        fit(Stop())
    assert counters.fit is None
    seen = Told()
    fit(seen)
    assert [(told["progress"]["number"], told["progress"]["batch"]) for told in seen.told] == [
        (2, batch) for batch in (3, 4, 5, 6)
    ]


def test_loop_over_a_dataset_shows_its_pass():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(ROWS).batch(4))
    validation = strategy.experimental_distribute_dataset(rx.data.from_arrays(ROWS).batch(8))
    counters.passes = None

    def shown():
        progress = job_figures()["progress"]
        return progress["kind"], progress["number"], progress["batch"], progress["num_batches"]

    told = []
    for _ in range(2):
        for _ in dataset:
            told.append(shown())
        for _ in validation:
            pass
    assert told == [("pass", number, batch, 6) for number in (1, 2) for batch in range(1, 7)]
    assert shown() == ("pass", 2, 6, 6)
    first = iter(dataset)
    strategy.run_steps(lambda x: x.sum(), first, 5)
    assert shown() == ("pass", 3, 5, 6)
    resumed = iter(strategy.experimental_distribute_dataset(rx.data.from_arrays(ROWS).batch(4)))
    resumed.set_state(first.get_state())
    next(resumed)
    assert shown() == ("pass", 3, 6, 6)


def test_older_position_of_a_dataset_leaves_the_pass_unknown():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    iterator = iter(strategy.experimental_distribute_dataset(rx.data.from_arrays(ROWS).batch(4)))
    next(iterator)
    state = iterator.get_state()
    del state["progress"]
    iterator.set_state(state)
    next(iterator)
    assert job_figures()["progress"]["share"] is None


def test_logs_are_numbers_that_json_can_hold_and_not_too_many():
    counted = Counters()
    steps = {
        "loss": 1.0,
        "mae": np.float32(0.5),
        "auc": np.nan,
        "text": "no number",
        "several": {"a": 1, "b": 2},
    }
    counted.logs, counted.epoch_logs = steps, {"mae": 7.0, "val_loss": 0.25}
    assert logs_of(counted) == {"mae": 0.5, "auc": "nan", "a": 1.0, "b": 2.0, "val_loss": 0.25}
    counted.logs = {f"metric {number} {'x' * 1000}": 1.0 for number in range(1000)}
    assert len(logs_of(counted)) == 16
    assert max(map(len, logs_of(counted))) == 64
    counted.logs = {f"{'x' * 100}_accuracy": 1.0, f"{'x' * 100}_loss": 2.0}
    assert list(logs_of(counted).values())[:2] == [1.0, 2.0], "names that differ at their end"


def test_job_is_named_after_its_program():
    class Main:
        __spec__ = None
        __file__ = "/home/me/train.py"

    assert program_name(["train.py"], Main) == "train.py"
    Main.__spec__ = keras.__spec__
    assert program_name(["x"], Main) == "keras"
    Main.__spec__, Main.__file__ = None, "/ray/_private/workers/default_worker.py"
    assert program_name(["default_worker.py"], Main) is None
    assert program_name([""], type("Prompt", (), {"__spec__": None})) is None
