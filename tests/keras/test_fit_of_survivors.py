"""``fit``, ``evaluate`` and ``predict`` of a strategy whose workers go on after a death: the numbers of one process with
as many devices, and the same bits whoever computes which replica."""

import collections
import contextlib
import re

import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
from replicax._src.keras import fit_preparation
from replicax._src.tracing import profile_names
from surviving_members import Members, strategy_of

R, ROWS, CLASSES = 3, 97, 3
TOLERANCE = 3e-6


def rows(num_rows=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(num_rows, 6)).astype("float32"), rng.integers(0, CLASSES, num_rows).astype(
        "int32"
    )


def compiled(body, optimizer=None, policy=None, **options):
    model = keras.Sequential([keras.Input((6,)), *body])
    model.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def mlp(**options):
    return compiled([layers.Dense(8, activation="relu"), layers.Dense(CLASSES)], **options)


def normalised():
    norm = [layers.Dense(8), layers.BatchNormalization(momentum=0.7), layers.ReLU()]
    more = [layers.Dense(6), layers.BatchNormalization(momentum=0.7), layers.Dense(CLASSES)]
    return compiled([*norm, *more])


def dropped():
    return compiled([layers.Dense(16, activation="relu"), layers.Dropout(0.4), layers.Dense(CLASSES)])


def half():
    return compiled([layers.Dense(8, dtype="mixed_bfloat16"), layers.Dense(CLASSES, dtype="float32")])


def fitted(model, **options):
    x, y = rows()
    return model.fit(x, y, **{"batch_size": 32, "epochs": 2, "verbose": 0, **options}).history


def from_dataset(model, **options):
    data = rx.data.from_arrays(rows()).shuffle(ROWS, seed=3).batch(32)
    return model.fit(data, epochs=2, verbose=0, **options).history


def on_batches(model):
    x, y = rows()
    logs = [model.train_on_batch(x[i : i + 40], y[i : i + 40], return_dict=True) for i in (0, 40, 60)]
    return {"loss": [float(each["loss"]) for each in logs]}


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


def with_callbacks(model):
    seen = Seen()
    slower = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.optimizer.learning_rate.assign(0.03)
    )
    history = fitted(model, callbacks=[seen, slower], validation_data=rows(50))
    return {**history, "seen": seen.losses}


PROGRAMS = {
    "mlp": (mlp, fitted),
    "normalised": (normalised, fitted),
    "dropped": (dropped, fitted),
    "half": (half, fitted),
    "clipped": (lambda: mlp(optimizer=keras.optimizers.SGD(0.3, global_clipnorm=0.2)), fitted),
    "accumulated": (lambda: mlp(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)), fitted),
    "weighed": (mlp, lambda model: fitted(model, class_weight={0: 2.0, 1: 0.5, 2: 1.0})),
    "dataset": (mlp, from_dataset),
    "several_steps": (lambda: mlp(steps_per_execution=3), fitted),
    "validated": (mlp, lambda model: fitted(model, validation_split=0.3, validation_freq=1)),
    "callbacks": (mlp, with_callbacks),
    "batches": (mlp, on_batches),
}


def trained(strategy, build, train):
    """The history, the evaluation, predictions and weights."""
    keras.utils.set_random_seed(1)
    x, y = rows()
    with strategy.scope():
        model = build()
    history = train(model)
    evaluation = model.evaluate(x, y, batch_size=40, verbose=0)
    weights = [np.array(weight.value) for weight in model.weights]
    return history, evaluation, model.predict(x, batch_size=40, verbose=0), weights


def assert_close(got, expected, tolerance):
    for (name, values), (other, others) in zip(got[0].items(), expected[0].items(), strict=True):
        assert name == other
        np.testing.assert_allclose(values, others, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got[1], expected[1], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got[2], expected[2], atol=4 * tolerance)
    largest = max(np.max(np.abs(weight)) for weight in expected[3])
    for weight, other in zip(got[3], expected[3], strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=tolerance * largest)


def same_bits(got, expected):
    assert got[:2] == expected[:2]
    assert all(
        a.tobytes() == b.tobytes()
        for a, b in zip([got[2], *got[3]], [expected[2], *expected[3]], strict=True)
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_devices_of_one_process(name, monkeypatch):
    build, train = PROGRAMS[name]
    strategy = strategy_of(Members(R), monkeypatch)
    expected = trained(rx.MirroredStrategy(R), build, train)
    assert_close(trained(strategy, build, train), expected, 1e-2 if name == "half" else TOLERANCE)
    assert any(num_rounds for _, num_rounds in strategy.topology.survivors.steps), "rows are split"


HALVES, ALONE = [[0, 2], [1]], [[0, 1, 2]]
DEATHS = [[[0], [1], [2]], [[0], [1], [2], None], HALVES, [*HALVES, None], ALONE]


@pytest.mark.parametrize(
    "name",
    [
        "normalised",
        pytest.param("clipped", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.rest) for name in ("dropped", "half", "dataset")),
    ],
)
def test_no_bit_depends_on_who_computes_a_replica_nor_on_cut_steps(name, monkeypatch):
    build, train = PROGRAMS[name]
    undisturbed, members = Members(R), Members(R, DEATHS)
    expected = trained(strategy_of(undisturbed, monkeypatch), build, train)
    same_bits(trained(strategy_of(members, monkeypatch), build, train), expected)
    assert members.num_cuts == 2
    assert members.steps == undisturbed.steps


def test_programs_are_compared_once_for_each_form_of_batch(monkeypatch):
    strategy = strategy_of(Members(R), monkeypatch)
    trained(strategy, mlp, fitted)
    digests = [text for _, text in strategy.topology.peers.agreed]
    assert len(set(digests)) == 6  # 32 rows and 1, 40 and 17, in training, evaluation and predictions


def test_trace_of_the_profiler_counts_each_step_once(monkeypatch):
    counted = collections.Counter()

    class Names:
        @contextlib.contextmanager
        def launch(self, name, topology):
            counted[name] += 1
            yield

    monkeypatch.setattr(profile_names, "current", Names())
    strategy = strategy_of(Members(R), monkeypatch)
    with strategy.scope():
        model = mlp()
    fitted(model, batch_size=49, epochs=1)
    assert counted == {f"{type(model).__name__}.train_step": 2}


def test_values_that_steps_have_made_are_not_compared_again(monkeypatch):
    strategy = strategy_of(Members(R), monkeypatch)
    with strategy.scope():
        model = mlp()
    compared, gather = [], strategy.topology.peers.gather

    def noted(topic, value, what, **options):
        compared.extend([name for name, _ in value] if topic == "values" else [])
        return gather(topic, value, what, **options)

    monkeypatch.setattr(strategy.topology.peers, "gather", noted)
    fitted(model)
    compared.clear()
    fitted(model, validation_data=rows(50))
    assert not [name for name in compared if "dense" in name], "neither by fit nor by its validation"


def shown(output):
    """The epochs, and the last state of each bar."""
    lines = [re.sub(r"\x1b\[[\d;]*m|\x08", "", line).rpartition("\r")[2] for line in output.split("\n")]
    return [found.group() for line in lines if (found := re.match(r"(Epoch )?\d/\d", line))]


@pytest.mark.parametrize(
    ("chief_from", "expected"),
    [
        (0, ["Epoch 1/3", "4/4", "Epoch 2/3", "4/4", "Epoch 3/3", "4/4", "4/4"]),
        (6, ["Epoch 2/3", "4/4", "Epoch 3/3", "4/4", "4/4"]),  # in the middle of the second epoch
        (13, ["4/4"]),  # in evaluate
        (99, []),
    ],
)
def test_process_that_becomes_chief_shows_the_progress_from_there(chief_from, expected, monkeypatch, capsys):
    x, y = rows()
    strategy = strategy_of(Members(R), monkeypatch)
    monkeypatch.setattr(fit_preparation, "start_together", lambda *_: None)  # there is no chief to ask
    peers = strategy.topology.peers
    peers.is_leader = chief_from == 0
    num_batches = 0

    def count(batch, logs):
        nonlocal num_batches
        num_batches += 1
        peers.is_leader |= num_batches == chief_from

    counts = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    counts.on_test_batch_end = count
    with strategy.scope():
        model = mlp()
    model.fit(x, y, batch_size=32, epochs=3, callbacks=counts)
    model.evaluate(x, y, batch_size=32, callbacks=[counts])
    assert shown(capsys.readouterr().out) == expected


def test_chief_alone_shows_the_progress_bar_of_the_user(monkeypatch, capsys):
    strategy = strategy_of(Members(R), monkeypatch)
    monkeypatch.setattr(fit_preparation, "start_together", lambda *_: None)
    with strategy.scope():
        model = mlp()
    strategy.topology.peers.is_leader = False
    fitted(model, verbose="auto", callbacks=[keras.callbacks.ProgbarLogger()])
    assert not capsys.readouterr().out
    strategy.topology.peers.is_leader = True
    fitted(model, verbose="auto", callbacks=[keras.callbacks.ProgbarLogger()])
    assert "Epoch 2/2" in capsys.readouterr().out
