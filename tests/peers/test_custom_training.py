"""TensorFlow's custom-training tutorial: the same program with replicax on several devices and with TensorFlow on one.

On two devices TensorFlow 2.21 fails with Keras 3: it creates the optimizer's variables in a condition.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import replicax as rx
from custom_training import train

pytestmark = pytest.mark.timeout(240)

WITH_TENSORFLOW = """
import sys, types
import numpy as np
import tensorflow as tf
from custom_training import train

lib = types.SimpleNamespace(
    function=tf.function, GradientTape=tf.GradientTape, nn=tf.nn, ReduceOp=tf.distribute.ReduceOp
)
batched = lambda arrays, rows: tf.data.Dataset.from_tensor_slices(arrays).batch(rows)
np.savez(sys.argv[1], **train(lib, tf.distribute.OneDeviceStrategy("CPU:0"), batched))
"""


def test_tutorial_equals_tensorflow(strategy, tmp_path):
    path = tmp_path / "found.npz"
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    result = subprocess.run(
        [sys.executable, "-c", WITH_TENSORFLOW, str(path)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    expected = np.load(path)
    found = train(rx, strategy, lambda arrays, rows: rx.data.from_arrays(arrays).batch(rows))
    assert found.keys() == set(expected.files)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-4, err_msg=name)
