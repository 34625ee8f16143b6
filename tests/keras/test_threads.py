"""The steps of a Keras model run in one thread at a time; a callback in that thread may call the model."""

import threading

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.errors import UnsupportedError

pytestmark = pytest.mark.timeout(120)

X, Y = np.ones((16, 2), np.float32), np.ones((16, 1), np.float32)
CALLS = {
    "fit": lambda model, **how: model.fit(X, Y, verbose=0, **how),
    "evaluate": lambda model, **how: model.evaluate(X, Y, verbose=0, **how),
    "predict": lambda model, **how: model.predict(X, verbose=0, **how),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
}


@pytest.fixture
def model():
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


class During(keras.callbacks.Callback):
    """Calls a function in the middle of a loop."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        self.function()

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize("first", ["fit", pytest.param("evaluate", marks=pytest.mark.rest), "predict"])
def test_second_thread_gets_an_error_and_the_first_goes_on(model, first, second):
    errors = []

    def call():
        try:
            CALLS[second](model)
        except Exception as error:
            errors.append(error)

    def in_thread():
        thread = threading.Thread(target=call, name="server")
        thread.start()
        thread.join()

    CALLS[first](model, callbacks=[During(in_thread)])
    assert errors
    assert all(type(error) is UnsupportedError for error in errors)
    assert str(errors[0]).startswith(
        f"{second}() of model {model.name!r} was called in the thread 'server' while {first}() of it runs in the thread "
        "'MainThread'. The steps of a model run in one thread at a time."
    )
    errors.clear()
    in_thread()
    assert not errors, "after the end of the first"


def test_callback_may_evaluate_the_model_that_is_trained(model):
    """By its name too: Keras writes the state into the model only for ``self.model``."""
    losses = []
    model.fit(X, Y, verbose=0, callbacks=[During(lambda: losses.append(CALLS["evaluate"](model)))])
    assert len(losses) == 1
    assert CALLS["evaluate"](model) < losses[0] + 1e-6


def test_error_in_a_loop_leaves_the_model_free(model):
    def fail():
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        CALLS["fit"](model, callbacks=[During(fail)])
    thread = threading.Thread(target=CALLS["predict"], args=(model,))
    thread.start()
    thread.join()
    CALLS["fit"](model)
