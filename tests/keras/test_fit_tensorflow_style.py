"""Models whose own steps are in TensorFlow's style, ``train_step(self, data)``, give the numbers of plain Keras.

The oracle is plain Keras: the same layers and seeds in a model with Keras's own steps, made and trained outside every
scope. 199 rows in batches of 64 leave a last batch of 7; in batches of 66 one row remains, which is fewer than
replicas.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

import replicax as rx
from checks import assert_close, assert_logs_equal, assert_weights_equal, not_with_keras_3_12
from replicax._src.keras.phases import PREDICT, TEST, TRAIN
from replicax._src.keras.replica_steps import is_replica_style
from replicax.errors import KerasLossError

ROWS, CLASSES = 199, 3
STRATEGIES = {
    "default": lambda: rx.get_strategy(),
    "one_device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "central_2": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:0"),
    "mirrored_2": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_3": lambda: rx.MirroredStrategy([f"cpu:{i}" for i in range(3)]),
    "mirrored_5": lambda: rx.MirroredStrategy([f"cpu:{i}" for i in range(5)]),
}
pytestmark = [pytest.mark.usefixtures("a_scope_was_entered"), pytest.mark.rest]


@pytest.fixture(scope="module")
def a_scope_was_entered():
    """From then on, steps in TensorFlow's style are recognised in models made outside too."""
    with strategy_of("mirrored_2").scope():
        pass


@functools.cache
def strategy_of(name):
    return STRATEGIES[name]()


def scope_of(name):
    """None means plain Keras without a scope; so does "outside", where steps in our style are recognised too."""
    return contextlib.nullcontext() if name in (None, "outside") else strategy_of(name).scope()


# --- the steps ----------------------------------------------------------------------------------------


class ByHand(keras.Model):
    """Code as guides to TensorFlow write it."""

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with rx.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.total_loss(x, y, y_pred, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return self.logs(x, y, y_pred, sample_weight, loss)

    def test_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self.compute_loss(x, y, y_pred, sample_weight, training=False)
        return self.logs(x, y, y_pred, sample_weight, loss)

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self(x, training=False)

    def total_loss(self, x, y, y_pred, sample_weight):
        return self.compute_loss(x, y, y_pred, sample_weight)

    def logs(self, x, y, y_pred, sample_weight, loss):
        """``compute_metrics`` returns ``self.get_metrics_result()``."""
        self.metrics[0].update_state(loss, sample_weight=num_rows(y_pred))
        return self.compute_metrics(x, y, y_pred, sample_weight)


class ByMetrics(ByHand):
    """Updates its metrics and returns their results one by one."""

    def logs(self, x, y, y_pred, sample_weight, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=num_rows(y_pred))
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}


class BySuper(keras.Model):
    """Keras's own steps, with hooks before and after them."""

    def train_step(self, data):
        return super().train_step(data)

    def test_step(self, data):
        return super().test_step(data)

    def predict_step(self, data):
        return super().predict_step(data)


class OnlyTrainStep(keras.Model):
    """Its other steps are Keras's, which see the global batch."""

    train_step, total_loss, logs = ByHand.train_step, ByHand.total_loss, ByHand.logs


class OfRows(ByHand):
    """The user computes its loss row by row, and adds the model's further losses by hand."""

    rows_loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def total_loss(self, x, y, y_pred, sample_weight):
        return rx.nn.compute_average_loss(self.rows_loss(y, y_pred), sample_weight) + sum(self.losses)

    def logs(self, x, y, y_pred, sample_weight, loss):
        return self.get_metrics_result()


class OfRowsAndScaled(OfRows):
    """Losses that were scaled as in ``strategy.run`` are equal."""

    def total_loss(self, x, y, y_pred, sample_weight):
        own = rx.nn.compute_average_loss(self.rows_loss(y, y_pred), sample_weight)
        return own + rx.nn.scale_regularization_loss(self.losses)


def num_rows(tree):
    return len(keras.tree.flatten(tree)[0])


# --- what is trained ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """``build(model_class)`` returns a compiled model; ``rows()`` returns the arguments of ``fit`` that are rows."""

    build: Callable[..., keras.Model]
    rows: Callable[[], dict]
    rtol: float = 1e-5  # of losses, metrics and predictions
    atol: float = 1e-6  # of predictions
    weight_rtol: float = 1e-4
    weight_atol: float = 1e-5


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def features(*shape):
    return np.random.default_rng(1).normal(size=(ROWS, *shape)).astype("float32")


def labels():
    return np.random.default_rng(2).integers(0, CLASSES, size=ROWS).astype("int32")


def weights(*shape):
    """Some weights are 0, and their sums differ between replicas."""
    values = np.random.default_rng(5).uniform(0, 2, size=(ROWS, *shape)).astype("float32")
    return np.where(values < 0.4, 0, values).astype("float32")


def tokens():
    """[rows, 4] ids, with 0 after the end of a row: every number of tokens from 1 to 4 occurs."""
    ids = np.random.default_rng(3).integers(1, 9, size=(ROWS, 4)).astype("int32")
    return np.where(np.arange(4) <= np.arange(ROWS)[:, None] % 4, ids, 0).astype("int32")


def spread(y_true, y_pred):
    """A scalar that is not a mean over rows."""
    return ops.std(y_pred - y_true)


def outputs(model_class):
    """One output for each kind of loss, so that the logs show which one is wrong."""
    x = keras.Input((4,))
    hidden = layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l1")(x)
    model = model_class(
        x,
        {
            "mean": layers.Dense(CLASSES, name="mean")(hidden),
            "sum": layers.Dense(2, name="sum")(hidden),
            "also_mean": layers.Dense(2, name="also_mean")(hidden),
            "weighted": layers.Dense(2, name="weighted")(hidden),
            "scalar": layers.Dense(2, name="scalar")(hidden),
            "dice": layers.Dense(CLASSES, "softmax", name="dice")(hidden),
        },
    )
    model.compile(
        sgd(),
        {
            "mean": losses.SparseCategoricalCrossentropy(from_logits=True),
            "sum": losses.MeanSquaredError(reduction="sum"),
            "also_mean": losses.MeanAbsoluteError(reduction="mean"),
            "weighted": losses.Huber(reduction="mean_with_sample_weight"),
            "scalar": spread,
            "dice": losses.Dice(),
        },
        loss_weights={
            "mean": 0.5,
            "sum": 0.01,
            "also_mean": 0.4,
            "weighted": 0.8,
            "scalar": 0.3,
            "dice": 0.6,
        },
        metrics={"mean": ["accuracy"], "sum": [keras.metrics.RootMeanSquaredError(name="rmse")]},
        weighted_metrics={"also_mean": ["mae"]},
    )
    return model


def rows_of_outputs():
    numbers = features(2)
    targets = {
        "mean": labels(),
        "sum": numbers,
        "also_mean": numbers**2,
        "weighted": 2 * numbers,
        "scalar": numbers,
        "dice": np.eye(CLASSES, dtype="float32")[labels()],
    }
    return {"x": features(4), "y": targets}


def weighted_rows_of_outputs():
    rows = rows_of_outputs()
    return {**rows, "sample_weight": {name: np.roll(weights(), i) for i, name in enumerate(rows["y"])}}


def masked(model_class, states_of=None):
    """Losses per time step are means over unmasked entries, whose number differs between replicas."""
    ids = keras.Input((4,), dtype="int32")
    states = (states_of or layers.Dense(3, "tanh"))(layers.Embedding(9, 3, mask_zero=True)(ids))
    kinds = ("mean", "sum", "weighted")
    model = model_class(ids, {kind: layers.Dense(1, name=kind)(states) for kind in kinds})
    model.compile(
        sgd(),
        {
            "mean": losses.MeanSquaredError(),
            "sum": losses.MeanSquaredError(reduction="sum"),
            "weighted": losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
        },
        loss_weights={"mean": 1.0, "sum": 0.01, "weighted": 0.5},
        metrics={"mean": ["mae"]},
        weighted_metrics={"weighted": ["mse"]},
    )
    return model


def masked_states(model_class):
    """The mask passes through a layer with states, which compiles slowly."""
    return masked(model_class, layers.GRU(3, return_sequences=True))


def rows_of_masked():
    kinds = ("mean", "sum", "weighted")
    return {
        "x": tokens(),
        "y": dict.fromkeys(kinds, features(4, 1)),
        "sample_weight": dict.fromkeys(kinds, weights(4)),
    }


class AddsLoss(layers.Layer):
    """Adds a mean over the rows."""

    def call(self, x):
        self.add_loss(0.3 * ops.mean(ops.square(x)))
        return x


def classifier(model_class, optimizer=None, dtype=None, **options):
    x = keras.Input((4,))
    hidden = layers.Dense(5, "tanh", dtype=dtype, kernel_regularizer="l2", activity_regularizer="l1")(x)
    model = model_class(x, layers.Dense(CLASSES, dtype=dtype)(AddsLoss(dtype=dtype)(hidden)))
    model.compile(
        optimizer or sgd(),
        losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def rows_of_classifier():
    return {"x": features(4), "y": labels()}


def optimized_by(make_optimizer, **options):
    return lambda model_class: classifier(model_class, make_optimizer(), **options)


def accumulating():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)


def loss_scaled():
    return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0, dynamic_growth_steps=2)


SUBJECTS = {
    "outputs": Subject(outputs, rows_of_outputs),
    "weighted_outputs": Subject(outputs, weighted_rows_of_outputs),
    "masked": Subject(masked, rows_of_masked),
    "masked_states": Subject(masked_states, rows_of_masked),
    "classifier": Subject(classifier, rows_of_classifier),
    "accumulating": Subject(optimized_by(accumulating), rows_of_classifier),
    "loss_scaled": Subject(optimized_by(loss_scaled), rows_of_classifier),
    # float16 has 11 bits: sums in another order are rounded to a neighbouring number.
    "mixed_float16": Subject(
        optimized_by(loss_scaled, dtype="mixed_float16"),
        rows_of_classifier,
        rtol=2e-3,
        atol=4e-3,
        weight_rtol=2e-3,
        weight_atol=1e-3,
    ),
}


@dataclass
class Outcome:
    """The visible results of a training, on the host; empty if nothing was evaluated or predicted."""

    history: dict
    evaluated: dict
    predictions: Any
    weights: list  # (path, value), of the model and the optimizer


def on_host(tree):
    return keras.tree.map_structure(np.asarray, tree)


def weights_of(model):
    # Keras without a strategy does not count the rows of the micro-batches that it accumulates.
    state = [v for v in model.optimizer.variables if not v.path.endswith("accumulated_count")]
    return [(v.path, np.asarray(v.value)) for v in [*model.variables, *state]]


def built(subject, model_class, strategy=None):
    keras.utils.set_random_seed(7)
    with scope_of(strategy):
        return subject.build(model_class)


def trained(subject, model_class, strategy, feed, phases):
    size, batch = feed
    model = built(subject, model_class, strategy)
    rows = keras.tree.map_structure(lambda value: value[:size], subject.rows())
    history = model.fit(**rows, batch_size=batch, epochs=2, verbose=0).history
    outcome = Outcome(history, {}, {}, weights_of(model))
    if TEST in phases:
        outcome.evaluated = model.evaluate(**rows, batch_size=batch, verbose=0, return_dict=True)
    if PREDICT in phases:
        outcome.predictions = on_host(model.predict(rows["x"], batch_size=batch, verbose=0))
    return outcome


@functools.cache
def on_one_device(subject, feed, phases):
    return trained(SUBJECTS[subject], keras.Model, None, feed, phases)


def loss_logs(logs):
    return {name: value for name, value in logs.items() if name.endswith("loss")}


# The number of rows, and of rows in a batch. Slow compilations have batches of one size, and do not run in every
# phase.
LAST_OF_7, LAST_OF_1, ALL_OF_7, ALL_OF_2 = (199, 64), (199, 66), (21, 7), (6, 2)
ALL = (TRAIN, TEST, PREDICT)
CASES = [
    ("outputs", BySuper, "outside", LAST_OF_7, ALL),
    ("outputs", ByHand, "default", LAST_OF_7, ALL),
    ("outputs", ByHand, "one_device", LAST_OF_7, (TRAIN,)),
    ("outputs", ByHand, "central_2", LAST_OF_7, (TRAIN,)),
    ("outputs", BySuper, "mirrored_2", LAST_OF_7, (TRAIN,)),
    ("outputs", ByHand, "mirrored_3", LAST_OF_7, ALL),
    ("outputs", BySuper, "mirrored_3", LAST_OF_7, ALL),
    ("outputs", BySuper, "mirrored_3", ALL_OF_7, ALL),
    ("outputs", ByHand, "mirrored_5", ALL_OF_2, ALL),
    ("weighted_outputs", ByHand, "mirrored_3", ALL_OF_7, (TRAIN, TEST)),
    ("weighted_outputs", BySuper, "mirrored_3", ALL_OF_7, (TRAIN, TEST)),
    ("masked", ByHand, "mirrored_3", ALL_OF_7, (TRAIN, TEST)),
    ("masked", BySuper, "mirrored_3", ALL_OF_2, (TRAIN,)),
    ("masked_states", ByHand, "mirrored_3", ALL_OF_7, (TRAIN, TEST)),
    ("classifier", ByMetrics, "mirrored_5", LAST_OF_1, ALL),
    ("classifier", ByMetrics, "central_2", LAST_OF_1, (TRAIN,)),
    ("classifier", OnlyTrainStep, "mirrored_3", LAST_OF_7, (TRAIN, TEST)),
    ("accumulating", ByHand, "mirrored_3", ALL_OF_7, (TRAIN,)),
    ("loss_scaled", ByHand, "central_2", ALL_OF_7, (TRAIN,)),
    ("mixed_float16", BySuper, "mirrored_3", ALL_OF_7, (TRAIN,)),
]


# A slow compilation whose steps another case also has.
LONG = {
    ("masked", BySuper, "mirrored_3"),
    ("mixed_float16", BySuper, "mirrored_3"),
    ("weighted_outputs", ByHand, "mirrored_3"),
    ("weighted_outputs", BySuper, "mirrored_3"),
    ("masked_states", ByHand, "mirrored_3"),
    ("outputs", BySuper, "outside"),
    ("outputs", BySuper, "mirrored_3", LAST_OF_7),
    ("outputs", ByHand, "default"),
    ("outputs", ByHand, "mirrored_3"),
    ("outputs", ByHand, "mirrored_5"),
    ("outputs", ByHand, "central_2"),
    ("outputs", ByHand, "one_device"),
    ("outputs", BySuper, "mirrored_2"),
    ("classifier", OnlyTrainStep, "mirrored_3"),
    ("classifier", ByMetrics, "central_2"),
}


def case(subject, steps, strategy, feed, phases):
    rows, batch = feed
    return pytest.param(
        *(subject, steps, strategy, feed, phases),
        id=f"{subject}-{steps.__name__}-{strategy}-{batch}_of_{rows}",
        marks=[pytest.mark.long] * bool({(subject, steps, strategy), (subject, steps, strategy, feed)} & LONG)
        + [not_with_keras_3_12("leaves nested logs as they are")] * (steps is ByMetrics),
    )


@pytest.mark.parametrize(
    ("subject", "steps", "strategy", "feed", "phases"), [case(*values) for values in CASES]
)
def test_training_equals_one_device(subject, steps, strategy, feed, phases):
    expected = on_one_device(subject, feed, phases)
    got = trained(SUBJECTS[subject], steps, strategy, feed, phases)
    rtol = SUBJECTS[subject].rtol
    if subject.startswith("masked"):  # Keras's step on JAX loses the mask before it updates the metrics
        assert_logs_equal(loss_logs(got.history), loss_logs(expected.history), rtol)
    else:
        assert_logs_equal(got.history, expected.history, rtol)
    assert_logs_equal(got.evaluated, expected.evaluated, rtol)
    assert_close(got.predictions, expected.predictions, rtol, SUBJECTS[subject].atol, "predictions")
    assert_weights_equal(got.weights, expected.weights, SUBJECTS[subject])


# --- seven rows at a time, which are 3, 2 and 2 on three replicas -------------------------------------

BATCH, BATCHES = 7, 3
SPLIT = (slice(0, 3), slice(3, 5), slice(5, 7))
CLASSIFIER = SUBJECTS["classifier"]


def some(rows=BATCH * BATCHES, start=0):
    return {name: value[start : start + rows] for name, value in rows_of_classifier().items()}


@functools.cache
def three_batches_on_one_device():
    """The weights before, between and after the batches, and the logs of each."""
    model = built(CLASSIFIER, keras.Model)
    states, logs = [weights_of(model)], []
    for i in range(BATCHES):
        model.reset_metrics()
        logs.append(model.train_on_batch(**some(BATCH, i * BATCH), return_dict=True))
        states.append(weights_of(model))
    return states, logs


def fitted(model_class, *callbacks, strategy="mirrored_3", **options):
    """A model fitted to three batches, in their order, and its logs."""
    subject = Subject(functools.partial(classifier, **options), rows_of_classifier)
    model = built(subject, model_class, strategy)
    history = model.fit(
        **some(), batch_size=BATCH, shuffle=False, callbacks=list(callbacks), verbose=0
    ).history
    return model, {name: value for name, (value,) in history.items()}


def assert_as_on_one_device(model, logs=None):
    states, each = three_batches_on_one_device()
    assert_weights_equal(weights_of(model), states[-1], CLASSIFIER)
    if logs is not None:
        expected = {name: np.mean([log[name] for log in each]) for name in each[0]}
        assert_logs_equal(logs, expected, CLASSIFIER.rtol)


@pytest.mark.parametrize("steps", [OfRows, OfRowsAndScaled])
def test_a_loss_by_rows_and_the_models_losses_added_by_hand(steps):
    assert_as_on_one_device(fitted(steps)[0])


class MeansOfItsOwn(keras.Model):
    """A ``compute_loss`` as in the docstring of Keras's, with a mean and a spread over the rows."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        distance = ops.mean(ops.square(y_pred - ops.one_hot(y, CLASSES)))
        return distance + 0.1 * ops.std(x) * ops.std(y_pred) + sum(self.losses)


class MeansOfItsOwnAndOfKeras(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        own = losses.MeanSquaredError()(ops.one_hot(y, CLASSES), y_pred)
        return loss + own + 0.1 * ops.std(y_pred)


SHORT_LOSSES = {(MeansOfItsOwn, 7, BySuper), (MeansOfItsOwnAndOfKeras, 2, ByHand)}


@pytest.mark.parametrize(
    ("own", "rows", "steps"),
    [
        pytest.param(own, rows, steps, marks=[pytest.mark.long] * ((own, rows, steps) not in SHORT_LOSSES))
        for own in (MeansOfItsOwn, MeansOfItsOwnAndOfKeras)
        for rows in (7, 2)
        for steps in (ByHand, BySuper)
    ],
)
def test_a_compute_loss_of_the_users_sees_the_rows_of_all_replicas(own, steps, rows):
    class InReplicas(steps, own):
        pass

    expected, got = built(CLASSIFIER, own), built(CLASSIFIER, InReplicas, "mirrored_3")
    for batch in (some(rows), some(rows, rows)):
        logs = got.train_on_batch(**batch, return_dict=True)
        assert_logs_equal(logs, expected.train_on_batch(**batch, return_dict=True), CLASSIFIER.rtol)
    assert_weights_equal(weights_of(got), weights_of(expected), CLASSIFIER)
    assert "compute_loss" not in vars(got)


def sum_over_rows(model_class):
    x = keras.Input((2,))
    model = model_class(x, layers.Dense(1)(x))
    model.compile(loss_scaled(), losses.MeanSquaredError(reduction="sum"))
    return model


@pytest.mark.quick
def test_a_scaled_sum_over_uneven_replicas_trains_as_on_one_device():
    subject = Subject(sum_over_rows, rows_of_classifier)
    expected, got = built(subject, keras.Model), built(subject, BySuper, "mirrored_3")
    for model in (expected, got):
        model.train_on_batch(features(2)[:7], features(1)[:7])
    assert_weights_equal(weights_of(got), weights_of(expected), subject)


@pytest.mark.quick
def test_mean_loss_of_keras_raises():
    class Mean(ByHand):
        def total_loss(self, x, y, y_pred, sample_weight):
            return losses.SparseCategoricalCrossentropy(from_logits=True)(y, y_pred)

    model = built(CLASSIFIER, Mean, "mirrored_3")
    with pytest.raises(KerasLossError, match="compute_average_loss"):
        model.fit(**some(), batch_size=BATCH, verbose=0)


@not_with_keras_3_12("leaves nested logs as they are")
@pytest.mark.quick
def test_logs_of_varying_values_are_the_mean_over_rows():
    """This also holds if some replicas have no row, and their mean is nan."""

    class LocalLogs(ByHand):
        def train_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"mean": ops.mean(x), "by_column": {"first": ops.mean(x[:, 0])}, "rows": len(x) * 1.0}

        def test_step(self, data):
            return self.train_step(data)

    model = built(CLASSIFIER, LocalLogs, "mirrored_3")
    x, y = rows_of_classifier().values()
    for rows, mean_size in ((7, (9 + 4 + 4) / 7), (2, 1.0)):
        expected = {"mean": x[:rows].mean(), "first": x[:rows, 0].mean(), "rows": mean_size}
        assert_logs_equal(model.train_on_batch(x[:rows], y[:rows], return_dict=True), expected, 1e-5)
        assert_logs_equal(model.test_on_batch(x[:rows], y[:rows], return_dict=True), expected, 1e-5)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_predictions_are_in_the_order_of_the_rows(steps_per_execution):
    class Numbers(keras.Model):
        def predict_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"number": x[:, 0], "pair": (x, self(x)[:, :1] * 0 + x)}

    subject = Subject(
        functools.partial(classifier, steps_per_execution=steps_per_execution), rows_of_classifier
    )
    model = built(subject, Numbers, "mirrored_5")
    x = np.arange(31, dtype="float32")[:, None] * np.ones(4, "float32")
    predicted = model.predict(x, batch_size=7, verbose=0)  # the last batch has 3 rows
    assert_close(predicted, {"number": x[:, 0], "pair": (x, x)}, rtol=0)
    assert_close(model.predict_on_batch(x[:2]), {"number": x[:2, 0], "pair": (x[:2], x[:2])}, rtol=0)


def test_three_steps_in_one_execution():
    ends = []
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    model, logs = fitted(ByHand, seen, steps_per_execution=3)
    assert_as_on_one_device(model, logs)
    assert ends == [2]


@pytest.mark.long
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}], ids=str)
def test_values_in_a_step_that_is_not_compiled_are_concrete(options):
    seen = []

    class Looking(ByHand):
        def logs(self, x, y, y_pred, sample_weight, loss):
            seen.append((np.asarray(x), float(loss)))
            return super().logs(x, y, y_pred, sample_weight, loss)

    model, logs = fitted(Looking, strategy="mirrored_2", **options)
    assert_as_on_one_device(model, logs)
    x = some()["x"]
    batches = [x[i : i + BATCH].tolist() for i in range(0, len(x), BATCH)]
    assert [rows.tolist() for rows, _ in seen] == batches  # of all replicas
    first = three_batches_on_one_device()[1][0]["loss"]
    np.testing.assert_allclose(seen[0][1], first, rtol=1e-5)


def test_callbacks_read_the_weights_of_each_batch():
    states = []

    class Reading(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            states.append(weights_of(self.model))

    fitted(ByHand, Reading())
    expected = three_batches_on_one_device()[0][1:]
    assert len(states) == len(expected)
    for got, right in zip(states, expected):
        assert_weights_equal(got, right, CLASSIFIER)


def test_statistics_of_batch_normalisation_are_averaged_by_rows():
    def normalised(model_class):
        x = keras.Input((4,))
        model = model_class(x, layers.Dense(CLASSES)(layers.BatchNormalization(momentum=0.5)(x)))
        model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = built(Subject(normalised, rows_of_classifier), ByHand, "mirrored_3")
    rows = some(BATCH)
    model.train_on_batch(**rows)
    parts = [rows["x"][part] for part in SPLIT]
    mean = sum(len(part) * part.mean(axis=0) for part in parts) / BATCH
    variance = sum(len(part) * part.var(axis=0) for part in parts) / BATCH
    np.testing.assert_allclose(model.layers[1].moving_mean.value, 0.5 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.layers[1].moving_variance.value, 0.5 + 0.5 * variance, rtol=1e-5)


def test_an_interrupted_training_continues():
    class Interrupting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    model, rows = built(CLASSIFIER, ByHand, "mirrored_3"), some()
    with pytest.raises(KeyboardInterrupt):
        model.fit(**rows, batch_size=BATCH, shuffle=False, callbacks=[Interrupting()], verbose=0)
    assert_weights_equal(weights_of(model), three_batches_on_one_device()[0][2], CLASSIFIER)
    model.fit(**some(BATCH, 2 * BATCH), batch_size=BATCH, verbose=0)
    assert_as_on_one_device(model)


class Spoiled(ByHand):
    """Its step fails on request, after the weights have been changed."""

    is_bad = staticmethod(lambda: False)

    def train_step(self, data):
        logs = super().train_step(data)
        if self.is_bad():
            raise ZeroDivisionError("in the step")
        return logs


@pytest.mark.parametrize("run_eagerly", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_step_that_fails_changes_nothing_and_training_continues(run_eagerly):
    subject = Subject(functools.partial(classifier, run_eagerly=run_eagerly), rows_of_classifier)
    model = built(subject, Spoiled, "mirrored_2")
    model.train_on_batch(**some(BATCH))
    model.is_bad = lambda: True
    with pytest.raises(ZeroDivisionError, match="in the step"):
        # A compiled step no longer fails; for 5 rows it has not been compiled.
        model.fit(**some(BATCH if run_eagerly else 5), batch_size=BATCH, verbose=0)
    model.is_bad = lambda: False
    assert_weights_equal(weights_of(model), three_batches_on_one_device()[0][1], CLASSIFIER)
    model.fit(**some(2 * BATCH, BATCH), batch_size=BATCH, shuffle=False, verbose=0)
    assert_as_on_one_device(model)


@pytest.mark.parametrize(("strategy", "replicas"), [("mirrored_3", 3), ("default", 1)])
@pytest.mark.quick
def test_a_step_is_a_replica_function(strategy, replicas):
    seen = []

    class Asking(ByHand):
        def test_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            replica = rx.get_replica_context()
            seen.append((len(x), replica.num_replicas_in_sync, rx.get_strategy() is strategy_of(strategy)))
            total = replica.all_reduce("sum", ops.sum(x, axis=0))
            return {"total": ops.sum(total), "mean_id": replica.replica_id_in_sync_group * 1.0}

    model = built(CLASSIFIER, Asking, strategy)
    rows = some(BATCH)
    logs = model.test_on_batch(**rows, return_dict=True)
    ids = {3: (0 * 3 + 1 * 2 + 2 * 2) / 7, 1: 0.0}
    assert_logs_equal(logs, {"total": rows["x"].sum(), "mean_id": ids[replicas]}, 1e-5)
    assert {size for size, _, _ in seen} == ({2, 3} if replicas == 3 else {7})
    assert {(count, is_own) for _, count, is_own in seen} == {(replicas, True)}


# --- how a step is recognised -------------------------------------------------------------------------


def decorated(step):
    @functools.wraps(step)
    def inner(*args, **kwargs):
        return step(*args, **kwargs)

    return inner


SIGNATURES = {
    "data": (lambda self, data: None, True),
    "state_and_data": (lambda self, state, data: None, False),
    "any_arguments": (lambda self, *args: None, False),
    "data_and_more": (lambda self, data, *args: None, False),
    "keyword_with_default": (lambda self, data, *, verbose=False: None, True),
    "positional_with_default": (lambda self, data, verbose=False: None, True),
    "state_data_and_default": (lambda self, state, data, verbose=False: None, False),
    "any_keywords": (lambda self, data, **kwargs: None, True),
    "positional_only": (lambda self, data, /: None, True),
    "nothing": (lambda self: None, False),
    "static": (staticmethod(lambda data: None), True),
    "wrapped": (decorated(lambda self, data: None), True),
    "wrapped_with_state": (decorated(lambda self, state, data: None), False),
}


@pytest.mark.parametrize("phase", [TRAIN, TEST, PREDICT], ids=lambda phase: phase.name)
@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.quick
def test_the_signature_says_whether_a_step_is_in_tensorflows_style(name, phase):
    step, expected = SIGNATURES[name]
    model = type("Model", (keras.Model,), {phase.step_name: step})()
    assert is_replica_style(model, phase) is expected
    for other in {TRAIN, TEST, PREDICT} - {phase}:
        assert not is_replica_style(model, other)


def test_a_step_that_was_set_on_the_model_is_recognised():
    model = keras.Model()
    assert not is_replica_style(model, TRAIN)
    object.__setattr__(model, "train_step", lambda data: {})
    assert is_replica_style(model, TRAIN)
    assert not is_replica_style(model, TEST)


# --- a model of several networks ----------------------------------------------------------------------------


class Gan(keras.Model):
    """A model without ``call``: its step calls the networks."""

    def __init__(self, has_inputs, is_built):
        super().__init__(name="gan")
        before = [keras.Input((2,))] if has_inputs else []
        self.generator = keras.Sequential([*before, layers.Dense(2)], name="generator")
        self.built = is_built

    def train_step(self, data):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(ops.mean(ops.square(self.generator(data)), axis=-1))
        variables = self.generator.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"total": loss}


@pytest.mark.quick
@pytest.mark.parametrize("has_inputs", [True, False])
@pytest.mark.parametrize("strategy", ["outside", "mirrored_2"])
def test_a_model_without_call_is_built_by_its_step(has_inputs, strategy):
    x = np.ones((8, 2), np.float32)
    weights = []
    for is_built in (True, False):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            model = Gan(has_inputs, is_built)
            model.generator.build((None, 2)) if is_built else None
            model.compile("sgd")
        assert model.fit(x, batch_size=4, verbose=0).history["total"][0] > 0
        weights.append([np.asarray(v.value) for v in model.generator.weights])
    for got, expected in zip(*weights, strict=True):
        np.testing.assert_array_equal(got, expected)


class ArrayGan(Gan):
    def train_step(self, state, data):
        return {}, state


def test_keras_error_for_a_model_that_it_cannot_build_names_what_is_not_built():
    with strategy_of("mirrored_2").scope():
        model = ArrayGan(has_inputs=False, is_built=False)
        model.compile("sgd")
    with pytest.raises(RuntimeError) as caught:
        model.fit(np.ones((8, 2), np.float32), batch_size=4, verbose=0)
    (note,) = caught.value.__notes__
    assert "Write self.built = True" in note
    assert note.endswith("Not built yet: gan, generator.")


class OfFour(keras.Model):
    """A model whose step takes four arrays, which Keras cannot tell apart."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y, scale, shift = data
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(ops.mean(ops.square(self(x) * scale + shift - y), axis=-1))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"total": loss}


@pytest.mark.quick
@pytest.mark.parametrize("strategy", ["outside", "mirrored_2"])
def test_a_step_gets_its_data_as_it_is(strategy):
    """In TensorFlow, too, a step that unpacks its data itself may take any number of arrays."""
    rng = np.random.default_rng(0)
    arrays = tuple(rng.normal(size=(8, 2)).astype(np.float32) for _ in range(4))
    losses = []
    for is_built in (True, False):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            model = OfFour()
            model.compile(keras.optimizers.Adam(0.1))
        if is_built:
            model(arrays[0])
        batches = (tuple(array[i : i + 4] for array in arrays) for i in (0, 4))
        losses += model.fit(batches, steps_per_epoch=2, verbose=0, shuffle=False).history["total"]
        assert model.optimizer.iterations.value == 2
        assert len(model.optimizer.variables) == 2 + 2 * 2
    assert losses[0] == losses[1]
