"""``fit``, ``evaluate`` and ``predict`` with data from TensorFlow and torch, compared with Keras on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from keras import layers
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import replicax as rx

pytestmark = [
    # A warning of torch itself.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # Keras's own Variable does not yet take the `copy` argument of NumPy 2.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

ROWS, BATCH = 21, 7  # three batches, of 3, 2 and 2 rows on the replicas


@pytest.fixture(scope="module")
def three():
    return rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


def features():
    return np.random.default_rng(1).normal(size=(ROWS, 4)).astype("float32")


def targets():
    return np.random.default_rng(2).normal(size=(ROWS, 1)).astype("float32")


def weights():
    return np.linspace(0, 2, ROWS, dtype="float32")


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(1)])
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        "mse",
        metrics=["mae"],
        weighted_metrics=[keras.metrics.MeanSquaredError()],
    )
    return model


class Stream(IterableDataset):
    """Batches whose number is not known beforehand."""

    def __iter__(self):
        for start in range(0, ROWS, BATCH):
            rows = slice(start, start + BATCH)
            yield torch.from_numpy(features()[rows]), torch.from_numpy(targets()[rows])


def tf_rows(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays)


def torch_rows(*arrays, **options):
    return DataLoader(TensorDataset(*map(torch.from_numpy, arrays)), batch_size=BATCH, **options)


def of_unknown_length():
    return tf.data.Dataset.from_generator(
        lambda: (
            (features()[start : start + BATCH], targets()[start : start + BATCH])
            for start in range(0, ROWS, BATCH)
        ),
        output_signature=(tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None, 1), tf.float32)),
    )


# name: (x of fit and evaluate, x of predict, options of fit)
DATA = {
    "tf_data": lambda: (tf_rows(features(), targets()).batch(BATCH), tf_rows(features()).batch(BATCH), {}),
    "tf_data_weighted": lambda: (
        tf_rows(features(), targets(), weights()).batch(BATCH),
        tf_rows(features()).batch(BATCH),
        {},
    ),
    "tf_data_shuffled_and_prefetched": lambda: (
        tf_rows(features(), targets()).shuffle(ROWS, seed=3).batch(BATCH).prefetch(2),
        tf_rows(features()).batch(BATCH),
        {},
    ),
    "tf_data_repeated": lambda: (
        tf_rows(features(), targets()).repeat().batch(BATCH),
        tf_rows(features()).batch(BATCH),
        {"steps_per_epoch": 4},
    ),
    "tf_data_of_unknown_length": lambda: (of_unknown_length(), tf_rows(features()).batch(BATCH), {}),
    "torch": lambda: (torch_rows(features(), targets()), torch_rows(features()), {}),
    "torch_weighted": lambda: (
        torch_rows(features(), targets(), weights()),
        torch_rows(features()),
        {},
    ),
    "torch_iterable": lambda: (
        DataLoader(Stream(), batch_size=None),
        torch_rows(features()),
        {},
    ),
}


def trained(model, name):
    data, inputs, options = DATA[name]()
    steps = options.get("steps_per_epoch")
    keras.utils.set_random_seed(5)
    tf.random.set_seed(5)
    history = model.fit(
        data, epochs=2, shuffle=False, validation_data=DATA["tf_data"]()[0], verbose=0, **options
    ).history
    evaluated = model.evaluate(data, steps=steps, verbose=0, return_dict=True)
    predicted = model.predict(inputs, verbose=0)
    return history, evaluated, predicted, [np.asarray(variable.value) for variable in model.variables]


# Warnings of Keras and TensorFlow for datasets of unknown length.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("name", DATA)
def test_datasets_of_other_libraries_equal_one_device(three, name):
    expected = trained(make_model(), name)
    with three.scope():
        model = make_model()
    history, evaluated, predicted, values = trained(model, name)
    assert list(history) == list(expected[0])
    for key in history:
        np.testing.assert_allclose(history[key], expected[0][key], rtol=2e-5, err_msg=key)
    assert list(evaluated) == list(expected[1])
    for key in evaluated:
        np.testing.assert_allclose(evaluated[key], expected[1][key], rtol=2e-5, err_msg=key)
    np.testing.assert_allclose(predicted, expected[2], rtol=1e-4, atol=1e-5)
    for value, other in zip(values, expected[3], strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
    assert {len(variable.value.sharding.device_set) for variable in model.variables} == {3}


@pytest.mark.parametrize(
    "make", [lambda: DATA["tf_data"]()[0], lambda: DATA["torch"]()[0]], ids=["tf_data", "torch"]
)
def test_distributed_datasets_of_other_libraries(three, make):
    """Given to Keras through ``experimental_distribute_dataset``."""
    with three.scope():
        model = make_model()
    dataset = three.experimental_distribute_dataset(make())
    history = model.fit(dataset, epochs=2, verbose=0).history
    expected = make_model()
    reference = expected.fit(
        features(), targets(), batch_size=BATCH, shuffle=False, epochs=2, verbose=0
    ).history
    for key in reference:
        np.testing.assert_allclose(history[key], reference[key], rtol=2e-5, err_msg=key)
    got = model.evaluate(dataset, verbose=0)
    np.testing.assert_allclose(
        got, expected.evaluate(features(), targets(), batch_size=BATCH, verbose=0), rtol=2e-5
    )


# --- TensorBoard --------------------------------------------------------------------------------------


def events(folder):
    """(run, step, tag) → value of everything that was written, except speeds."""
    found = {}
    for path in sorted(folder.rglob("*tfevents*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if "per_second" not in value.tag and value.tag != "keras":
                    key = (path.parent.name, event.step, value.tag)
                    found[key] = tf.make_ndarray(value.tensor)
    return found


# TensorFlow's summaries have not followed NumPy's and Python's changes.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Model failed to serialize as JSON:UserWarning")
def test_tensorboard_is_written_as_on_one_device(three, tmp_path):
    """The scalars of batches and epochs, and the histograms of the weights, under the same names and steps."""
    with three.scope():
        model = make_model()
    written = []
    for one, name in ((model, "replicas"), (make_model(), "one_device")):
        board = keras.callbacks.TensorBoard(
            str(tmp_path / name), histogram_freq=1, write_images=True, update_freq=1
        )
        rows = {"batch_size": BATCH, "shuffle": False, "validation_data": (features(), targets())}
        one.fit(features(), targets(), epochs=2, callbacks=[board], verbose=0, **rows)
        written.append(events(tmp_path / name))
    got, expected = written

    def unnumbered(events):
        """Layers of the second model have other numbers in their names."""
        counted = {}
        for (run, step, tag), value in events.items():
            parts = [part.rstrip("0123456789").rstrip("_") for part in tag.split("/")]
            counted.setdefault((run, step, "/".join(parts)), []).append(value)
        return counted

    got, expected = unnumbered(got), unnumbered(expected)
    assert list(got) == list(expected)
    assert {("train", 0, "epoch_loss"), ("validation", 1, "epoch_mae"), ("train", 5, "batch_loss")} <= set(
        got
    )
    assert any("histogram" in tag for _, _, tag in got)
    for key, values in expected.items():
        assert len(got[key]) == len(values), key
        for value, other in zip(got[key], values):
            if other.dtype.kind == "f" and "histogram" not in key[2]:
                np.testing.assert_allclose(value, other, rtol=2e-5, err_msg=str(key))
            assert value.shape == other.shape, key
