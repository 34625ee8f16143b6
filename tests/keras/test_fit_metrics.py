"""Every metric class of Keras gives the same under a strategy as on one device.

One model with an output of each kind has all of them, with sample weights; it is evaluated once on one device and once
on three. An AUC or an F1 score is not a mean of the replicas' own.
"""

import inspect

import keras
import numpy as np
import pytest
from keras import layers, metrics

import replicax as rx
from fit_models import CLASSES, ROWS, features, labels

NEEDS = {
    "FBetaScore": {"beta": 2.0},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 2], "sparse_y_pred": False},
    "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [1]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "MeanMetricWrapper": {"fn": metrics.mean_squared_error},
    "PrecisionAtRecall": {"recall": 0.6},
    "RecallAtPrecision": {"precision": 0.6},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}
# The output of the model that fits each metric. "chosen" is the class itself, as a number.
METRICS_OF = {
    "binary": [
        "AUC",
        "BinaryAccuracy",
        "BinaryCrossentropy",
        "BinaryIoU",
        "FalseNegatives",
        "FalsePositives",
        "Hinge",
        "Precision",
        "PrecisionAtRecall",
        "Recall",
        "RecallAtPrecision",
        "SensitivityAtSpecificity",
        "SpecificityAtSensitivity",
        "SquaredHinge",
        "TrueNegatives",
        "TruePositives",
    ],
    "one_hot": [
        "CategoricalAccuracy",
        "CategoricalCrossentropy",
        "CategoricalHinge",
        "F1Score",
        "FBetaScore",
        "KLDivergence",
        "OneHotIoU",
        "OneHotMeanIoU",
        "TopKCategoricalAccuracy",
    ],
    "sparse": [
        "IoU",
        "MeanIoU",
        "SparseCategoricalAccuracy",
        "SparseCategoricalCrossentropy",
        "SparseTopKCategoricalAccuracy",
    ],
    "chosen": ["Accuracy"],
    "amount": [
        "ConcordanceCorrelation",
        "CosineSimilarity",
        "LogCoshError",
        "Mean",
        "MeanAbsoluteError",
        "MeanAbsolutePercentageError",
        "MeanMetricWrapper",
        "MeanSquaredError",
        "MeanSquaredLogarithmicError",
        "PearsonCorrelation",
        "Poisson",
        "R2Score",
        "RootMeanSquaredError",
        "Sum",
    ],
}
ALL = [name for names in METRICS_OF.values() for name in names]
pytestmark = [
    pytest.mark.rest,
    # Keras's own warnings, which it gives on one device too.
    pytest.mark.filterwarnings("ignore:You are passing weight as `float`"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64"),
]


def of_predictions(reduction):
    """``Mean`` and ``Sum`` take values instead of targets with predictions: here they take the predictions."""

    class OfPredictions(reduction):
        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(y_pred, sample_weight)

    return OfPredictions


def metric(name):
    made = getattr(metrics, name)
    if name in ("Mean", "Sum"):
        made = of_predictions(made)
    return made(name=name, **NEEDS.get(name, {}))


def rows():
    kinds = labels()
    targets = {
        "binary": (kinds[:, None] > 0).astype("float32"),
        "one_hot": np.eye(CLASSES, dtype="float32")[kinds],
        "sparse": kinds,
        "chosen": kinds[:, None].astype("float32"),
        "amount": np.abs(features(2)) + 0.1,
    }
    return features(6), targets, np.linspace(0.5, 2.0, ROWS, dtype="float32")


def metered():
    x = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh")(x)
    classes = layers.Dense(CLASSES, activation="softmax", name="one_hot")(hidden)
    chosen = layers.Lambda(
        lambda p: keras.ops.cast(keras.ops.argmax(p, -1, keepdims=True), "float32"), name="chosen"
    )
    outputs = {
        "binary": layers.Dense(1, activation="sigmoid", name="binary")(hidden),
        "one_hot": classes,
        "sparse": layers.Identity(name="sparse")(classes),
        "chosen": chosen(classes),
        "amount": layers.Dense(2, activation="softplus", name="amount")(hidden),
    }
    model = keras.Model(x, outputs)
    model.compile(
        keras.optimizers.SGD(0.1),
        {"binary": "binary_crossentropy", "one_hot": "categorical_crossentropy", "amount": "mse"},
        weighted_metrics={output: [metric(name) for name in names] for output, names in METRICS_OF.items()},
    )
    return model


def measured(build):
    """The result of ``evaluate`` for the model before any training: ``fit`` updates metrics in the same way.

    All batches have 65 rows, which are 22, 22 and 21 on three devices: programs with so many metrics compile slowly.
    """
    keras.utils.set_random_seed(7)
    x, y, weights = keras.tree.map_structure(lambda values: values[: 3 * 65], rows())
    weights = dict.fromkeys(y, weights)
    return build().evaluate(x, y, batch_size=65, sample_weight=weights, verbose=0, return_dict=True)


@pytest.fixture(scope="module")
def on_one_device():
    return measured(metered)


@pytest.fixture(scope="module")
def on_three_devices():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])

    def build():
        with strategy.scope():
            return metered()

    return measured(build)


@pytest.mark.quick
def test_every_metric_of_keras_is_tested():
    classes = {name for name, value in vars(metrics).items() if inspect.isclass(value)}
    assert classes - {"Metric"} == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_metric_equals_one_device(on_one_device, on_three_devices, name):
    (output,) = (output for output, names in METRICS_OF.items() if name in names)
    expected = np.asarray(on_one_device[f"{output}_{name}"])
    assert np.all(np.isfinite(expected))
    assert np.any(expected != 0)
    np.testing.assert_allclose(on_three_devices[f"{output}_{name}"], expected, rtol=1e-5)


def test_losses_equal_one_device(on_one_device, on_three_devices):
    assert on_one_device.keys() == on_three_devices.keys()
    for name in on_one_device:
        if name.endswith("loss"):
            np.testing.assert_allclose(on_three_devices[name], on_one_device[name], rtol=1e-5)
