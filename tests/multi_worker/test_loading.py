"""Weights loaded into a model that is divided over processes: each needs memory for its own shards and one variable."""

import keras
import numpy as np
import pytest

import loaded_models
from replicax._src.checkpoint.errors import CheckpointMismatchError

save_file = pytest.importorskip("safetensors.numpy").save_file

pytestmark = [pytest.mark.timeout(240), pytest.mark.rest]
WIDTH = 768  # 2.25 MiB
NAMES = {"weights": "weights.h5", "model": "keras", "safetensors": "safetensors"}


def saved(folder, how, num_layers):
    """Returns the file, its layers, and the values in it."""
    random = np.random.default_rng(num_layers)
    values = [random.random((WIDTH, WIDTH), np.float32) for _ in range(num_layers)]
    file = folder / f"{num_layers}.{NAMES[how]}"
    if how == "safetensors":
        save_file({f"layers/{number}/kernel": value for number, value in enumerate(values)}, file)
    else:
        layers = [keras.layers.Dense(WIDTH, use_bias=False, kernel_initializer="zeros") for _ in values]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.set_weights(values)
        model.save(file) if how == "model" else model.save_weights(file)
    return (file, num_layers, WIDTH), values


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
@pytest.mark.parametrize("how", ["weights", pytest.param("model", marks=pytest.mark.long), "safetensors"])
def test_each_process_needs_its_shards_and_one_variable(how, tmp_path):
    small, _ = saved(tmp_path, how, 2)
    large, values = saved(tmp_path, how, 32)
    reports = loaded_models.check(how, small, large, values)
    if how == "model":
        return
    for report in reports:
        kind, text = report["failed"]
        assert kind == (CheckpointMismatchError.__name__ if how == "safetensors" else "ValueError")
        for part in ("kernel", f"({WIDTH}, {WIDTH})", f"({WIDTH // 2}, {WIDTH // 2})"):
            assert part in text
