"""safetensors files loaded into variables: values, names, casts, memory, and files that do not fit."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import replicax as rx
from checks import message
from replicax.checkpoint import CheckpointMismatchError, export, load_safetensors
from replicax.errors import InvalidArgumentError

save_file = pytest.importorskip("safetensors.numpy").save_file

CPUS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def made(width=8):
    return keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(width), keras.layers.BatchNormalization()]
    )


def values_of(model):
    return [np.array(v.value) for v in model.variables]


@pytest.mark.parametrize(
    "make_strategy",
    [
        lambda: rx.MirroredStrategy(CPUS),
        lambda: rx.MirroredStrategy(CPUS, shard_state="all"),
        lambda: rx.OneDeviceStrategy("cpu:1"),
        lambda: rx.CentralStorageStrategy(CPUS[:2]),
    ],
    ids=["mirrored", "sharded_state", "one_device", "central_storage"],
)
def test_an_exported_file_restores_every_variable(make_strategy, saved, tmp_path):
    source = made()
    file = export(saved(model=source), tmp_path / "m.safetensors")
    with make_strategy().scope():
        model = made()
    shardings = [v.value.sharding for v in model.variables]
    load_safetensors(rx.Checkpoint(model=model), file)
    for variable, value, sharding in zip(model.variables, values_of(source), shardings, strict=True):
        np.testing.assert_array_equal(variable.value, value)
        assert variable.value.sharding == sharding
    x = np.ones((2, 12), "f4")
    np.testing.assert_allclose(model.predict(x, verbose=0), source.predict(x, verbose=0), 1e-5, 1e-6)


def test_names_of_the_file_are_mapped_and_floats_are_cast(tmp_path):
    model = made()
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(12, 8)).astype(jnp.bfloat16)
    save_file({"proj.weight": kernel, "other": np.zeros(3, "f4")}, tmp_path / "hf.safetensors")
    bias = np.array(model.layers[0].bias.value)
    load_safetensors(model, tmp_path / "hf.safetensors", names={"layers/0/kernel": "proj.weight"})
    np.testing.assert_array_equal(model.layers[0].kernel, kernel.astype("f4"))
    np.testing.assert_array_equal(model.layers[0].bias, bias)
    model = made()
    load_safetensors(
        model,
        tmp_path / "hf.safetensors",
        names=lambda key: "proj.weight" if key.endswith("kernel") else None,
    )
    np.testing.assert_array_equal(model.layers[0].kernel, kernel.astype("f4"))


def test_an_index_names_several_files(tmp_path):
    tensors = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(4)}
    for name, array in tensors.items():
        save_file({name: array}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in tensors}}))
    module = rx.Checkpoint(a=rx.Variable(np.zeros((2, 3), "f4")), b=rx.Variable(np.zeros(4, "i4")))
    message(CheckpointMismatchError, lambda: load_safetensors(module, index), "int64", "int32")
    save_file({"b": np.arange(4, dtype="i4")}, tmp_path / "b.safetensors")
    load_safetensors(module, index)
    assert module.b.numpy().tolist() == [0, 1, 2, 3]
    assert module.a.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_nnx_module(tmp_path):
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    save_file({"kernel": np.ones((3, 2), "f4"), "bias": np.full(2, 5, "f4")}, tmp_path / "m.safetensors")
    load_safetensors(module, tmp_path / "m.safetensors")
    assert module(jnp.ones((1, 3))).tolist() == [[8, 8]]


def test_a_file_that_does_not_fit_changes_nothing(saved, tmp_path):
    file = export(saved(model=made(9)), tmp_path / "m.safetensors")
    model = made()
    before = values_of(model)
    tracked = rx.Checkpoint(model=model)
    message(
        CheckpointMismatchError,
        lambda: load_safetensors(tracked, file),
        "model/layers/0/kernel",
        "(12, 9)",
        "(12, 8)",
        file,
    )
    message(CheckpointMismatchError, lambda: load_safetensors(model, file), "the file has no 'layers/0/bias'")
    small = rx.Checkpoint(bias=rx.Variable(np.zeros(9, "f4")))
    names = {"bias": "model/layers/0/bias"}
    message(CheckpointMismatchError, lambda: load_safetensors(small, file), "only in the file")
    load_safetensors(small, file, names=names)
    message(CheckpointMismatchError, lambda: load_safetensors(small, file, names={"biases": "x"}), "biases")
    message(InvalidArgumentError, lambda: load_safetensors(small, file, names=["bias"]), "dict")
    message(InvalidArgumentError, lambda: load_safetensors(keras.layers.Dense(3), file), "built")
    message(
        InvalidArgumentError, lambda: load_safetensors(small, tmp_path / "missing.safetensors"), "missing"
    )
    damaged = tmp_path / "damaged.safetensors"
    header = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}'
    outside = len(header).to_bytes(8, "little") + header + b"\x00" * 8
    truncated = (tmp_path / "m.safetensors").read_bytes()[:-4]
    for content in (b"", b"\x00" * 4, b"\xff" * 40, truncated, outside):
        damaged.write_bytes(content)
        message(InvalidArgumentError, lambda: load_safetensors(tracked, damaged), "damaged.safetensors")
    for value, now in zip(before, values_of(model), strict=True):
        np.testing.assert_array_equal(now, value)


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
WRONG_HEADERS = {
    "deep": "[" * 100_000,
    "list": [],
    "tensor that is no object": {"a": 1},
    "unknown dtype": {"a": TENSOR | {"dtype": "F33"}},
    "shape of strings": {"a": TENSOR | {"shape": ["2"]}},
    "negative size": {"a": TENSOR | {"shape": [-1, -2]}},
    "huge empty shape": {"a": TENSOR | {"shape": [0, 2**61, 2**61], "data_offsets": [0, 0]}},
    "many dims": {"a": TENSOR | {"shape": [1] * 40 + [2]}},
    "one offset": {"a": TENSOR | {"data_offsets": [0]}},
    "end beyond the file": {"a": TENSOR | {"shape": [2**40], "data_offsets": [0, 2**42]}},
    "offset that is no number": {"a": TENSOR | {"data_offsets": [None, 8]}},
}


@pytest.mark.parametrize("header", WRONG_HEADERS.values(), ids=WRONG_HEADERS)
def test_wrong_header_is_one_typed_error(header, tmp_path):
    file = tmp_path / "wrong.safetensors"
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\x00" * 8)
    small = rx.Checkpoint(a=rx.Variable(np.zeros(2, "f4")))
    message(InvalidArgumentError, lambda: load_safetensors(small, file), "wrong.safetensors")


@pytest.mark.parametrize(
    "index",
    ["[" * 100_000, "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../other"}}'],
    ids=len,
)
def test_wrong_index_is_one_typed_error(index, tmp_path):
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(index)
    small = rx.Checkpoint(a=rx.Variable(np.zeros(2, "f4")))
    message(InvalidArgumentError, lambda: load_safetensors(small, file), "model.safetensors.index.json")


def test_it_reads_one_variable_at_a_time(tmp_path):
    """The host holds one variable, beside those that the first CPU device may take over."""
    width, count = 512, 12
    tensors = {f"layers/{i}/kernel": np.full((width, width), i, "f4") for i in range(count)}
    save_file(tensors, tmp_path / "m.safetensors")
    del tensors
    with rx.MirroredStrategy(CPUS, shard_state="all").scope():
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(count)]
        model = keras.Sequential([keras.Input((width,)), *layers])
    tracemalloc.start()
    load_safetensors(model, tmp_path / "m.safetensors")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one = 4 * width * width
    assert peak < 3 * one, "of 12"
    for i, variable in enumerate(model.variables):
        assert {shard.data.nbytes for shard in variable.value.addressable_shards} == {one / 4}
        assert float(jax.numpy.mean(variable.value)) == i
