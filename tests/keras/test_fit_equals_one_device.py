"""``fit``, ``evaluate`` and ``predict`` of a model made in a strategy's scope give the numbers of one device.

The oracle is plain Keras: the same model with the same seeds, made and trained outside every scope. 199 rows in
batches of 64 leave a last batch of 7, and divide by none of 3, 5, 6 and 7.
"""

import contextlib
import functools
import random
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
from checks import assert_close, assert_logs_equal, assert_weights_equal, tpu_strategy
from fit_feeds import FEEDS, taken
from fit_models import SUBJECTS

STRATEGIES = {
    "default": lambda: rx.get_strategy(),
    "one_device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "central_2": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:0"),
    **{
        f"mirrored_{size}": lambda size=size: rx.MirroredStrategy([f"cpu:{i}" for i in range(size)])
        for size in range(1, 9)
    },
    "tpu_3x2": lambda: tpu_strategy(num_replicas=3, num_logical_devices=2),
}
# The number of devices on which each keeps its variables.
HOMES = {
    "default": {0},
    "one_device": {1},
    "central_2": {0},
    **{f"mirrored_{size}": set(range(size)) for size in range(1, 9)},
    "tpu_3x2": set(range(6)),
}

# model: {feed: strategies}
CASES = {
    "dense": {
        "arrays": list(STRATEGIES),
        "class_weight": ["mirrored_3"],
        "validation_split": ["mirrored_3", "central_2"],
        "validation_data": ["mirrored_2", "one_device"],
        "steps_per_execution": ["mirrored_2", "mirrored_3"],
        "without_jit": ["mirrored_2"],
        "py_dataset": ["mirrored_3"],
        "grain_iter": ["mirrored_2"],
        "rx_data": ["mirrored_3", "mirrored_5", "default"],
        "distributed_dataset": ["mirrored_3", "mirrored_8", "default", "central_2"],
    },
    "built_by_fit": {"arrays": ["mirrored_3"], "sample_weight": ["mirrored_3"], "rx_data": ["mirrored_3"]},
    "convolution": {
        "arrays": ["mirrored_2"],
        "sample_weight": ["mirrored_2"],
        "grain_map": ["mirrored_2"],
        "few_rows": ["mirrored_3"],
    },
    "lstm": {"arrays": ["mirrored_2"], "distributed_dataset": ["mirrored_2"]},
    "gru_per_time_step": {"arrays": ["mirrored_3"], "validation_split": ["mirrored_3"]},
    "attention": {"arrays": ["mirrored_3"], "generator": ["mirrored_3"]},
    "inputs_and_outputs": {
        "arrays": ["mirrored_2", "mirrored_3", "central_2"],
        "steps_per_execution": ["mirrored_3", "central_2"],
        "steps_per_epoch": ["mirrored_3"],
        "initial_epoch": ["central_2"],
        "few_rows": ["central_2"],
        "py_dataset": ["mirrored_2", "central_2"],
        "grain_map": ["mirrored_3"],
        "generator": ["mirrored_2"],
        "rx_data": ["mirrored_3"],
        "distributed_dataset": ["mirrored_2"],
        "distributed_from_function": ["mirrored_2"],
    },
    "add_loss": {
        "arrays": ["mirrored_3", "default"],
        "initial_epoch": ["mirrored_3"],
        "validation_data": ["mirrored_3"],
        "few_rows": ["mirrored_3", "mirrored_8"],
        "run_eagerly": ["mirrored_3"],
    },
    "custom_train_step": {
        "arrays": ["mirrored_2", "one_device"],
        "grain_iter": ["mirrored_2"],
        "without_jit": ["mirrored_2"],
        "run_eagerly": ["central_2"],
        "rx_data": ["one_device"],
        "py_dataset": ["one_device"],
    },
    "mixed_bfloat16": {"arrays": ["mirrored_2"], "class_weight": ["mirrored_2"]},
    "frozen": {"fit_only": ["mirrored_3"], "steps_per_epoch": ["mirrored_3"]},
    "loss_scaled": {"fit_only": ["mirrored_3", "central_2"], "class_weight": ["mirrored_3"]},
    "accumulating": {"fit_only": ["mirrored_2"], "initial_epoch": ["mirrored_2"]},
    "averaged": {"arrays": ["mirrored_2"], "distributed_from_function": ["mirrored_2"]},
    "clipped": {"in_order": ["mirrored_3"], "steps_per_execution": ["mirrored_3"]},
    "stateful_metrics": {"sample_weight": ["mirrored_3"], "validation_data": ["mirrored_3"]},
    "dice": {"arrays": ["mirrored_2"], "sample_weight": ["mirrored_2"]},
}
# Every model also runs with each row on several devices, and with rows that do not divide.
for _feeds in CASES.values():
    _strategies = _feeds.setdefault("arrays", [])
    if "tpu_3x2" not in _strategies:
        _strategies.append("tpu_3x2")
# Models that compile slowly, or are between others that do not.
LONG = {
    "lstm",
    "gru_per_time_step",
    "attention",
    "mixed_bfloat16",
    "stateful_metrics",
    "run_eagerly",
    "without_jit",
    "mirrored_1",
    "mirrored_4",
    "mirrored_6",
    "mirrored_7",
}
LONG_PAIRS = {
    *((model, "tpu_3x2") for model in CASES if model != "dense"),
    ("dense", "mirrored_8"),
    ("built_by_fit", "sample_weight"),
    ("inputs_and_outputs", "mirrored_3"),
    ("convolution", "few_rows"),
    ("convolution", "sample_weight"),
    ("add_loss", "mirrored_8"),
    ("dice", "sample_weight"),
    ("loss_scaled", "class_weight"),
    ("loss_scaled", "central_2"),
    ("accumulating", "initial_epoch"),
    ("built_by_fit", "rx_data"),
    ("inputs_and_outputs", "few_rows"),
    ("clipped", "steps_per_execution"),
    ("inputs_and_outputs", "distributed_dataset"),
    ("inputs_and_outputs", "distributed_from_function"),
    ("inputs_and_outputs", "initial_epoch"),
    ("inputs_and_outputs", "py_dataset"),
    ("custom_train_step", "grain_iter"),
    ("convolution", "arrays"),
    ("averaged", "arrays"),
}
LONG_CASES = {
    ("dense", "arrays", "default"),
    ("dense", "arrays", "one_device"),
    ("dense", "arrays", "mirrored_2"),
    ("dense", "validation_data", "one_device"),
    ("add_loss", "arrays", "default"),
    ("add_loss", "arrays", "mirrored_3"),
    ("add_loss", "validation_data", "mirrored_3"),
    ("dense", "arrays", "mirrored_5"),
    ("dense", "steps_per_execution", "mirrored_3"),
    ("dense", "validation_split", "central_2"),
    ("dense", "rx_data", "default"),
    ("dense", "rx_data", "mirrored_5"),
    ("dense", "distributed_dataset", "central_2"),
    ("dense", "distributed_dataset", "default"),
    ("custom_train_step", "rx_data", "one_device"),
    ("custom_train_step", "py_dataset", "one_device"),
    ("custom_train_step", "arrays", "one_device"),
    ("inputs_and_outputs", "steps_per_execution", "central_2"),
    ("inputs_and_outputs", "arrays", "central_2"),
}
# Keras's own warnings, which it gives on one device too.
WARNINGS = (
    "ignore:Your input ran out of data",  # at the first end of each dataset of grain
    "ignore:You are passing weight as `float`",  # BinaryIoU with sample weights
    "ignore:Explicitly requested dtype int64",
)
pytestmark = [*map(pytest.mark.filterwarnings, WARNINGS)]


@functools.cache
def strategy_of(name):
    return STRATEGIES[name]()


@dataclass
class Outcome:
    """The visible results of a training, on the host; empty if nothing was evaluated or predicted."""

    history: dict
    evaluated: dict
    predictions: Any
    weights: list  # (path, value), of the model and the optimizer


def seeded():
    """Seeds of the layers, of Keras's shuffling (NumPy's) and of ``PyDataset``'s (Python's)."""
    keras.utils.set_random_seed(7)
    random.seed(7)


def on_host(tree):
    return keras.tree.map_structure(np.asarray, tree)


def weights_of(model):
    return [(v.path, np.asarray(v.value)) for v in [*model.variables, *model.optimizer.variables]]


def in_scope(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def trained(subject, feed, strategy=None, fit_in_scope=False):
    seeded()
    calls = FEEDS[feed](*subject.rows(), strategy)
    with in_scope(strategy):
        model = subject.build(**calls.compile)
    with in_scope(strategy if fit_in_scope else None):
        history = model.fit(**calls.fit, verbose=0).history
        weights = weights_of(model)
        evaluated = model.evaluate(**calls.evaluate, verbose=0, return_dict=True) if calls.evaluate else {}
        predictions = on_host(model.predict(**calls.predict, verbose=0)) if calls.predict else {}
    return Outcome(history, evaluated, predictions, weights), model


@functools.cache
def on_one_device(model, feed):
    assert isinstance(rx.get_strategy(), type(strategy_of("default")))
    # Outside of a strategy, Keras gives small batches of different sizes the same weight (docs/reference/keras_fit.md).
    strategy = strategy_of("one_device") if model == "accumulating" else None
    return trained(SUBJECTS[model], feed, strategy)[0]


def assert_equal_outcomes(got, expected, subject):
    assert_logs_equal(got.history, expected.history, subject.rtol)
    assert_logs_equal(got.evaluated, expected.evaluated, subject.rtol)
    assert_close(got.predictions, expected.predictions, subject.rtol, subject.prediction_atol, "predictions")
    assert_weights_equal(got.weights, expected.weights, subject)


def assert_variables_at_home(model, strategy):
    """The steps have written every variable, on exactly the devices of the strategy."""
    for variable in [*model.variables, *model.optimizer.variables]:
        sharding = variable.value.sharding
        assert {device.id for device in sharding.device_set} == HOMES[strategy], variable.path
        assert sharding.is_fully_replicated, variable.path


# In `make test` most models are trained on arrays.
QUICK_FEEDS = {"arrays", "in_order", "fit_only"}
REST_MODELS = {"accumulating", "clipped", "dice", "inputs_and_outputs"}
REST_STRATEGIES = {"central_2"}


def marks_of(*names):
    is_long = LONG & {*names} or any({*some} <= {*names} for some in LONG_PAIRS | LONG_CASES)
    is_rest = not QUICK_FEEDS & {*names} or bool((REST_MODELS | REST_STRATEGIES) & {*names})
    return [pytest.mark.long] * bool(is_long) + [pytest.mark.rest] * is_rest


def case(*names):
    return pytest.param(*names, id="-".join(names), marks=marks_of(*names))


@pytest.mark.parametrize(
    ("model", "feed", "strategy"),
    [
        case(model, feed, strategy)
        for model, feeds in CASES.items()
        for feed, strategies in feeds.items()
        for strategy in strategies
    ],
)
def test_training_equals_one_device(model, feed, strategy):
    subject = SUBJECTS[model]
    expected = on_one_device(model, feed)
    got, trained_model = trained(subject, feed, strategy_of(strategy))
    assert_equal_outcomes(got, expected, subject)
    assert_variables_at_home(trained_model, strategy)


def test_every_model_feed_and_strategy_is_tested():
    met = {(m, f, s) for m, feeds in CASES.items() for f, names in feeds.items() for s in names}
    models, feeds, strategies = ({case[i] for case in met} for i in range(3))
    assert models == set(SUBJECTS)
    assert feeds == set(FEEDS)
    assert strategies == set(STRATEGIES)
    for model in models:
        assert {s for m, _, s in met if m == model} & {"mirrored_2", "mirrored_3"}, model


def test_fit_within_the_scope_is_the_same():
    expected = on_one_device("dense", "arrays")
    got, model = trained(SUBJECTS["dense"], "arrays", strategy_of("mirrored_3"), fit_in_scope=True)
    assert_equal_outcomes(got, expected, SUBJECTS["dense"])
    assert_variables_at_home(model, "mirrored_3")


def each_batch(subject, strategy=None):
    """One batch at a time: 9 rows, then 1, which is fewer than replicas."""
    seeded()
    x, y = subject.rows()
    with in_scope(strategy):
        model = subject.build()
    seen = []
    for rows in (slice(9), slice(9, 10)):
        some_x, some_y = taken(x, rows), taken(y, rows)
        seen.append(model.train_on_batch(some_x, some_y, return_dict=True))
        seen.append(model.test_on_batch(some_x, some_y, return_dict=True))
        seen.append(on_host(model.predict_on_batch(some_x)))
    return seen, weights_of(model), model


@functools.cache
def each_batch_on_one_device(model):
    return each_batch(SUBJECTS[model])[:2]


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        pytest.param("dense", "mirrored_8", marks=pytest.mark.long),
        ("dense", "mirrored_3"),
        pytest.param("dense", "central_2", marks=pytest.mark.long),
        pytest.param("inputs_and_outputs", "mirrored_3", marks=pytest.mark.long),
        pytest.param("inputs_and_outputs", "one_device", marks=pytest.mark.long),
        pytest.param("add_loss", "mirrored_3", marks=pytest.mark.long),
        pytest.param("custom_train_step", "mirrored_3", marks=pytest.mark.long),
    ],
)
def test_single_batches_equal_one_device(model, strategy):
    subject = SUBJECTS[model]
    expected, expected_weights = each_batch_on_one_device(model)
    got, weights, trained_model = each_batch(subject, strategy_of(strategy))
    for left, right in zip(got, expected, strict=True):
        assert_close(left, right, subject.rtol, subject.prediction_atol)
    assert_weights_equal(weights, expected_weights, subject)
    assert_variables_at_home(trained_model, strategy)


@pytest.mark.parametrize("strategy", ["mirrored_3", pytest.param("central_2", marks=pytest.mark.long)])
def test_each_device_computes_its_slice_of_a_batch(strategy):
    """XLA reports the layout of a layer's outputs at each compilation."""
    seen = []

    class Watched(layers.Layer):
        def call(self, x):
            jax.debug.inspect_array_sharding(x, callback=seen.append)
            return x

    with strategy_of(strategy).scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4), Watched(), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = SUBJECTS["dense"].rows()
    for call in (
        lambda: model.fit(x, y, batch_size=64, verbose=0),
        lambda: model.evaluate(x, y, batch_size=64, verbose=0),
        lambda: model.predict(x, batch_size=64, verbose=0),
    ):
        seen.clear()
        call()
        assert seen
        for sharding in seen:
            assert len(sharding.device_set) == strategy_of(strategy).num_replicas_in_sync
            assert not sharding.is_fully_replicated


def test_model_made_without_a_scope_stays_on_one_device():
    """This also holds if models of strategies were trained in the same process."""
    expected = on_one_device("dense", "arrays")
    trained(SUBJECTS["dense"], "arrays", strategy_of("mirrored_2"))
    got, model = trained(SUBJECTS["dense"], "arrays")
    assert got.history == expected.history
    assert_variables_at_home(model, "default")
