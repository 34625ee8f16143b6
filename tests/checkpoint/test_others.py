"""Checkpoints read by other programs (plain tensorstore, Keras's weights, safetensors) and by name."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.checkpoint import polling
from replicax.checkpoint import (
    CheckpointNotFoundError,
    checkpoints_iterator,
    export_weights,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    load_variable,
)
from replicax.errors import InvalidArgumentError

READ_BY_TENSORSTORE = """
import sys
import tensorstore
def read(name):
    place = {"driver": "file", "path": f"{sys.argv[1]}/{name}"}
    return tensorstore.open({"driver": "zarr3", "kvstore": place}).result().read().result()
kernel = read("arrays/model/layers/0/kernel")
assert "replicax" not in sys.modules
print(kernel.shape, kernel.dtype, kernel.sum(), read("arrays/half").dtype, read("components/count").sum())
"""


@pytest.fixture
def model():
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones")])


def test_plain_tensorstore_reads_it(model, saved):
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        count = rx.Variable(3, trainable=False, synchronization="on_read", aggregation="sum")
    path = saved(model=model, count=count, half=rx.Variable(1.0, dtype="bfloat16"))
    read = subprocess.run(
        [sys.executable, "-c", READ_BY_TENSORSTORE, path], capture_output=True, text=True, timeout=120
    )
    assert read.stdout.strip().split("\n")[-1] == "(4, 3) float32 12.0 bfloat16 6", read.stderr


def test_by_name(model, saved):
    path = saved(model=model)
    assert list_variables(path) == [("model/layers/0/bias", (3,)), ("model/layers/0/kernel", (4, 3))]
    assert list_variables(Path(path).parent) == list_variables(path), "the newest of the directory"
    np.testing.assert_array_equal(load_variable(path, "model/layers/0/kernel"), np.ones((4, 3)))
    message(CheckpointNotFoundError, lambda: load_variable(path, "kernel"), "It has model/layers/0/bias")


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
def test_keras_weights(model, tmp_path):
    path = export_weights(model, tmp_path / "model.weights.h5")
    other = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    other.load_weights(path)
    np.testing.assert_array_equal(other.layers[0].kernel, np.ones((4, 3)))
    assert [file.name for file in tmp_path.iterdir()] == ["model.weights.h5"]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
def test_failed_exports_of_a_live_model(model, tmp_path):
    weights = tmp_path / "m.weights.h5"
    message(InvalidArgumentError, lambda: export_weights(model, tmp_path / "m.h5"), "'.weights.h5'")
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    message(InvalidArgumentError, lambda: export_weights(unbuilt, weights), "built")
    message(InvalidArgumentError, lambda: export_weights(str(weights), weights), "a Keras model")
    export_weights(model, tmp_path / "new" / "m.weights.h5")  # its folder is made
    assert [file.name for file in tmp_path.rglob("*")] == ["new", "m.weights.h5"]


def test_a_reader_has_shapes_dtypes_and_values(model, saved):
    path = saved(model=model)
    reader = load_checkpoint(Path(path).parent)
    assert reader.get_variable_to_shape_map() == {"model/layers/0/bias": [3], "model/layers/0/kernel": [4, 3]}
    assert reader.get_variable_to_dtype_map()["model/layers/0/kernel"] == "float32"
    assert reader.has_tensor("model/layers/0/bias")
    assert not reader.has_tensor("model")
    np.testing.assert_array_equal(reader.get_tensor("model/layers/0/kernel"), np.ones((4, 3)))
    with pytest.raises(CheckpointNotFoundError):
        load_checkpoint(Path(path).parent / "nothing")


@pytest.mark.parametrize("name", ["ckpt-7.data-00000-of-00001", "model.ckpt-7.data-00000-of-00002"])
@pytest.mark.parametrize("find", ["function", "manager"])
def test_a_directory_of_tensorflows_checkpoints_warns_that_nothing_is_restored(name, find, tmp_path, caplog):
    (tmp_path / "checkpoint").touch()
    (tmp_path / name).touch()

    def latest():
        if find == "function":
            return rx.checkpoint.latest_checkpoint(tmp_path)
        return rx.CheckpointManager(rx.Checkpoint(), tmp_path, 3).latest_checkpoint

    assert latest() is None
    assert latest() is None
    assert caplog.text.count(f"({name}), which replicax does not read") == 1
    assert "model.load_weights" in caplog.text


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
def test_latest_checkpoint_finds_keras_files_if_there_are_no_others(model, tmp_path, saved):
    assert latest_checkpoint(tmp_path) is None
    for number, name in enumerate(("b.weights.h5", "a.weights.h5", "c.keras")):
        save = model.save if name.endswith(".keras") else model.save_weights
        save(tmp_path / name)
        os.utime(tmp_path / name, (number, number))
        assert latest_checkpoint(tmp_path) == str(tmp_path / name)
    model.load_weights(latest_checkpoint(tmp_path))
    with pytest.raises(CheckpointNotFoundError):
        list_variables(tmp_path)
    saved(model=model)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-1")


def test_new_checkpoints_are_iterated(model, saved, monkeypatch):
    monkeypatch.setattr(polling, "_PAUSE_S", 0.01)
    first = saved(model=model)
    checkpoint = rx.Checkpoint(model=model)
    calls = []
    paths = checkpoints_iterator(
        os.path.dirname(first), timeout=0.05, timeout_fn=lambda: calls.append(1) or len(calls) > 1
    )
    assert next(paths) == first
    checkpoint.save_counter = 1
    second = checkpoint.save(os.path.join(os.path.dirname(first), "ckpt"))
    assert next(paths) == second
    assert list(paths) == [], "it ends after two waits without a new one"
    assert list(checkpoints_iterator(os.path.dirname(first), timeout=0.05)) == [second]
