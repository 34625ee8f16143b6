"""A plan of ``fit`` refuses the data that ``fit`` refuses."""

import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.input.elements import EmptyDatasetError


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_arrays_without_rows_raise_a_clear_error(method):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)], name="small")
        model.compile("sgd", "mse")
    data = (np.ones((0, 4), np.float32), np.ones((0, 1), np.float32))[: 1 if method == "predict" else 2]
    says = [f"{method}() of model 'small'", "without a single batch: arrays of no rows"]
    message(EmptyDatasetError, lambda: strategy.plan(getattr(model, method), data), *says)
