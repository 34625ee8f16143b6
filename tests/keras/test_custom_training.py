"""TensorFlow's custom-training tutorial gives the same numbers on several devices as on one."""

import numpy as np
import pytest

import replicax as rx
from custom_training import train


def on(strategy):
    return train(rx, strategy, lambda arrays, rows: rx.data.from_arrays(arrays).batch(rows))


@pytest.fixture(scope="module")
def on_one_device():
    return on(rx.OneDeviceStrategy("cpu:0"))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]), id="mirrored_2"),
        pytest.param(
            lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1", "cpu:2"]),
            id="central_storage_3",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_tutorial_equals_one_device(on_one_device, make):
    found = on(make())
    assert found.keys() == on_one_device.keys()
    assert found["loss"][1] < found["loss"][0]
    for name, value in found.items():
        np.testing.assert_allclose(value, on_one_device[name], rtol=1e-4, atol=1e-5, err_msg=name)
