"""A call of ``fit`` is described once; what prepares it returns another description."""

import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.fit_preparation import prepare

X, Y = np.ones((4, 2)), np.ones((4, 1))  # of 64 bits


def model_of(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def test_description_does_not_change_when_the_call_is_prepared():
    strategy = rx.MirroredStrategy(2)
    model = model_of(strategy)
    given = {"x": rx.data.from_arrays((X, Y)).batch(2), "epochs": 2}
    call = FitCall.of(model, "fit", (), given)
    with strategy.scope():
        prepared = prepare(call, strategy)
    assert call.x is given["x"]
    assert prepared.inputs == [prepared.call.x]
    assert prepared.call.x is not call.x
    with pytest.raises(TypeError):
        call.arguments["x"] = X


def test_arrays_are_narrowed_once_and_other_arguments_reach_keras_as_they_were_given():
    strategy = rx.MirroredStrategy(2)
    model = model_of(strategy)
    call = FitCall.of(model, "evaluate", (X, Y), {"verbose": 0, "_use_cached_eval_dataset": True})
    with strategy.scope():
        call = prepare(call, strategy).call
    seen = []
    call.run(lambda *args, **kwargs: seen.append((args, kwargs)))
    ((of_model, x, y, *others), options) = seen[0]
    assert of_model is model
    assert (x.dtype, y.dtype) == (np.float32, np.float32)
    assert others == []
    assert options == {"verbose": 0, "_use_cached_eval_dataset": True}


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_call_names_the_argument_that_gives_the_number_of_batches(method):
    call = FitCall.of(None, method, (X,), {})
    call = call.with_arguments(**{call.steps_name("x"): 3})
    assert call.num_steps("x") == 3
    assert call.is_loop


def test_methods_for_one_batch_are_no_loops():
    call = FitCall.of(None, "train_on_batch", (X, Y), {})
    assert not call.is_loop
    assert call.datasets == ()
