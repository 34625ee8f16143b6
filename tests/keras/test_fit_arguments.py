"""Data that Keras on JAX trains on in silence, or refuses with a message about its inside."""

import jax
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.keras import fit_arguments
from replicax.errors import InvalidArgumentError

X = np.ones((4, 2), np.float32)
SPARSE = keras.losses.SparseCategoricalCrossentropy


def model_of(loss, cls=keras.Sequential):
    with rx.MirroredStrategy(2).scope():
        model = cls([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
        model.compile("sgd", loss)
    return model


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(fit_arguments, "_reported", set())


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", SPARSE()], ids=["name", "object"])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_labels_that_no_class_has_are_reported_once_for_a_line(loss, method, caplog):
    model = model_of(loss)
    for _ in range(2):
        getattr(model, method)(X, np.array([0, 1, 2, 3]), verbose=0)
    (told,) = caplog.messages
    assert "has the label 3" in told
    assert "classes 0 to 2" in told
    assert "test_fit_arguments.py" in told


class OwnStep(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, keras.ops.one_hot(y - 1, 3), y_pred, sample_weight, training)


@pytest.mark.parametrize(
    ("make", "labels", "more"),
    [
        pytest.param(lambda: model_of(SPARSE()), [0, 1, 2, 2], {}, id="in range"),
        pytest.param(lambda: model_of(SPARSE(ignore_class=-1)), [0, 1, 2, -1], {}, id="ignored class"),
        pytest.param(
            lambda: model_of(SPARSE()), [0, 1, 2, -1], {"sample_weight": np.array([1, 1, 1, 0])}, id="weights"
        ),
        pytest.param(lambda: model_of("mse"), [[5, 0, 0]] * 4, {}, id="another loss"),
        pytest.param(
            lambda: model_of("categorical_crossentropy", OwnStep), [1, 2, 3, 3], {}, id="a loss of its own"
        ),
    ],
)
def test_other_labels_are_not_reported(make, labels, more, caplog):
    make().fit(X, np.array(labels), verbose=0, **more)
    assert not caplog.messages


@pytest.mark.parametrize("loss", ["categorical_crossentropy", keras.losses.CategoricalCrossentropy()])
def test_integer_labels_for_categorical_crossentropy_name_the_other_loss(loss):
    model = model_of(loss)
    labels = np.array([0, 1, 2, 1])
    message(
        InvalidArgumentError,
        lambda: model.fit(X, labels, verbose=0),
        "(4,)",
        "SparseCategoricalCrossentropy",
        "to_categorical(y, 3)",
    )
    model.fit(X, keras.utils.to_categorical(labels, 3), verbose=0)


@pytest.mark.parametrize("argument", ["x", "y"])
def test_rows_as_python_lists_say_to_make_an_array(argument):
    model = model_of("mse")
    data = {"x": X, "y": np.ones((4, 3)), argument: [[1.0, 2.0, 3.0]] * 4}
    message(InvalidArgumentError, lambda: model.fit(**data, verbose=0), f"np.asarray({argument})")
    message(InvalidArgumentError, lambda: model.predict([[1.0, 2.0]], verbose=0), "np.asarray(x)")
    assert model.predict(X, verbose=0).shape == (4, 3)


def test_a_call_with_an_array_of_one_device_says_to_give_numpy():
    model = model_of("mse")
    model.fit(X, np.ones((4, 3), np.float32), verbose=0)
    rows = jax.device_put(X, jax.devices()[0])
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        model(rows)
    assert "np.asarray(x)" in caught.value.__notes__[0]
    assert model(np.asarray(rows)).shape == (4, 3)
    with pytest.raises(ValueError, match="axis -1") as caught:
        model(X[:, :1])
    assert not getattr(caught.value, "__notes__", [])
