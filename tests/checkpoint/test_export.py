"""Checkpoints exported to other formats, and loaded by the programs that read these."""

import errno
import json
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import exported_models
import replicax as rx
from checks import message
from exported_models import make_model, make_nothing, make_smaller
from replicax._src.checkpoint import array_chunks, array_files
from replicax._src.keras import unallocated_variables
from replicax.checkpoint import (
    CheckpointMismatchError,
    CheckpointWriteError,
    CorruptCheckpointError,
    export,
)
from replicax.errors import InvalidArgumentError

MODELS = exported_models.__file__
CPUS = ["cpu:0", "cpu:1"]

LOAD = """
import sys, json, numpy as np
sys.path.insert(0, sys.argv[1])
import keras
import exported_models
from exported_models import make_model
file = sys.argv[2]
if file.endswith(".keras"):
    model = keras.models.load_model(file)
else:
    model = make_model()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(file)
assert "replicax" not in sys.modules
x = np.linspace(-1, 1, 48, dtype="float32").reshape(3, 16)
tokens = np.arange(12).reshape(3, 4) % 20
predicted = model.predict([x, tokens], verbose=0)
model.fit([x, tokens], x[:, :1], epochs=1, verbose=0, shuffle=False)
print(json.dumps([predicted.tolist(), [int(model.optimizer.iterations), len(model.optimizer.variables)]]))
"""


@pytest.fixture
def small_slabs(monkeypatch):
    """Slabs of 4 KB, so that small arrays have several."""
    monkeypatch.setattr(array_chunks, "SLAB_BYTES", 4096)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained model, and the path of its checkpoint."""
    keras.utils.set_random_seed(0)
    with rx.MirroredStrategy(CPUS, shard_state="all").scope():
        model = make_model()
    rng = np.random.default_rng(0)
    x, tokens = rng.normal(size=(32, 16)).astype("f4"), rng.integers(0, 20, (32, 4))
    model.fit([x, tokens], x[:, :1], batch_size=16, epochs=2, verbose=0)
    folder = tmp_path_factory.mktemp("trained")
    path = rx.Checkpoint(model=model, epoch=rx.Variable(2)).save(folder / "ckpt")
    return model, path


# --- safetensors ----------------------------------------------------------------------------------------


def test_safetensors_has_every_array(tmp_path, saved, small_slabs):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    rng = np.random.default_rng(0)
    arrays = {
        name: np.asarray(rng.normal(size=(40, 70)) * 50).astype(jnp.dtype(name))
        for name in ("float32", "float16", "bfloat16", "int8", "uint16", "int32", "bool")
    }
    path = saved(
        empty=np.zeros((0, 2), "f4"),
        one=jnp.ones(()),
        long_row=np.arange(6000.0).reshape(2, 3, 1000),
        **arrays,
    )
    loaded = load_file(export(path, tmp_path / "all.safetensors"))
    assert sorted(loaded) == sorted(["empty", "one", "long_row", *arrays])
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    assert (loaded["empty"].shape, loaded["one"].shape) == ((0, 2), ())
    np.testing.assert_array_equal(loaded["long_row"], np.arange(6000.0).reshape(2, 3, 1000))


def test_patterns_choose_arrays_and_labels_are_metadata(tmp_path, trained):
    safe_open = pytest.importorskip("safetensors").safe_open
    file = export(trained[1], tmp_path / "m.safetensors", only=["model/layers/*/bias", "epoch"])
    with safe_open(file, framework="np") as opened:
        names = sorted(opened.keys())
        assert names[0] == "epoch"
        assert all(name == "epoch" or name.endswith("/bias") for name in names)
        assert all("bias" in opened.metadata()[name] for name in names[1:])


# --- Keras ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
@pytest.mark.parametrize("file", [pytest.param("model.weights.h5", marks=pytest.mark.rest), "model.keras"])
def test_keras_loads_it_in_a_fresh_process(trained, file, tmp_path, small_slabs):
    model, path = trained
    to = export(path, tmp_path / file, model=make_model)
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, os.path.dirname(MODELS), to], capture_output=True, text=True, timeout=200
    )
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    predicted, (iterations, num_variables) = json.loads(loaded.stdout.splitlines()[-1])
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(3, 16)
    expected = model.predict([x, np.arange(12).reshape(3, 4) % 20], verbose=0)
    np.testing.assert_allclose(predicted, expected, 1e-5, 1e-6)
    assert num_variables == len(model.optimizer.variables)
    assert iterations == int(model.optimizer.iterations) + 1, "the optimizer goes on"
    assert [entry.name for entry in tmp_path.iterdir()] == [file]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
def test_keras_files_have_what_keras_writes(trained, tmp_path):
    h5py = pytest.importorskip("h5py")
    model, path = trained
    model.save_weights(tmp_path / "by_keras.weights.h5")
    export(path, tmp_path / "exported.weights.h5", model=make_model)
    found = []
    for name in ("by_keras", "exported"):
        with h5py.File(tmp_path / f"{name}.weights.h5") as file:
            arrays = {}
            file.visititems(
                lambda key, item, arrays=arrays: (
                    arrays.update({key: np.asarray(item)})
                    if isinstance(item, h5py.Dataset) and "loss_tracker" not in key
                    else None
                )
            )
        found.append(arrays)
    by_keras, exported = found
    assert exported.keys() == by_keras.keys()
    assert any(key.startswith("optimizer/") for key in exported)
    for key, array in by_keras.items():
        assert exported[key].dtype == array.dtype, key
        np.testing.assert_array_equal(exported[key], array, key)


def test_a_model_that_is_not_compiled_is_exported_without_an_optimizer(saved, tmp_path):
    model = make_smaller()
    path = saved(net=model)
    other = make_smaller()
    other.load_weights(export(path, tmp_path / "m.weights.h5", model=make_smaller, name="net"))
    np.testing.assert_array_equal(other.layers[1].kernel, model.layers[1].kernel)


# --- orbax ----------------------------------------------------------------------------------------------


READ_BY_ORBAX = """
import sys
import numpy as np
import orbax.checkpoint as ocp
tree = ocp.PyTreeCheckpointer().restore(sys.argv[1])
assert "replicax" not in sys.modules
kernel, half = tree["model"]["layers"]["1"]["kernel"], tree["half"]
print(kernel.shape, kernel.dtype, float(np.sum(kernel)), half.dtype, float(half[1]), tree["empty"].shape)
"""


def test_orbax_restores_a_directory(saved, tmp_path, small_slabs):
    model = make_smaller()
    path = saved(model=model, half=jnp.ones(2, jnp.bfloat16), empty=np.zeros((0, 3), "f4"))
    to = export(path, tmp_path / "for_orbax")
    read = subprocess.run(
        [sys.executable, "-c", READ_BY_ORBAX, to], capture_output=True, text=True, timeout=120
    )
    total = float(np.sum(np.asarray(model.layers[1].kernel)))
    assert read.stdout.split("\n")[0] == f"(16, 299) float32 {total} bfloat16 1.0 (0, 3)", read.stderr[-2000:]
    with pytest.raises(InvalidArgumentError):
        export(path, to)


# --- memory ---------------------------------------------------------------------------------------------


EXPORT = """
import sys
import numpy as np
import replicax as rx
from replicax._src.checkpoint import array_files, array_chunks
sys.path.insert(0, sys.argv[1])
import exported_models

def megabytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

small, path, to = sys.argv[2:5]
array_chunks.SLAB_BYTES, array_files._CACHE_BYTES, width, count = map(int, sys.argv[5:])
model = (lambda: exported_models.make_wide(width, count)) if ".weights." in to or ".keras" in to else None
make_small = model and (lambda: exported_models.make_wide(64, count))
rx.checkpoint.export(small, to.replace("large", "small"), model=make_small)  # imports what the large one needs
before = megabytes("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # begins to measure the peak anew
rx.checkpoint.export(path, to, model=model)
print(megabytes("VmHWM") - before)
"""


def check_memory(folder, file, width, count, slab_bytes, cache_bytes, limit_bytes):
    paths = []
    for size in (64, width):
        model = exported_models.make_wide(size, count)
        paths.append(rx.Checkpoint(model=model).save(folder / f"ckpt{size}"))
        del model
    numbers = map(str, (slab_bytes, cache_bytes, width, count))
    arguments = [os.path.dirname(MODELS), *paths, str(folder / file), *numbers]
    ended = subprocess.run(
        [sys.executable, "-c", EXPORT, *arguments], capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert float(ended.stdout.splitlines()[-1]) * 2**20 < limit_bytes
    shutil.rmtree(folder)


FILES = ["large.safetensors", "large.weights.h5", "large.keras", "large"]


@pytest.mark.parametrize(
    "file", [FILES[0], *(pytest.param(file, marks=pytest.mark.rest) for file in FILES[1:])]
)
def test_an_export_takes_little_memory(tmp_path, file):
    """12 arrays of 16 MB, in slabs of 2 MB. The chunks that one array keeps are freed before the next."""
    check_memory(tmp_path, file, 2048, 12, 2 << 20, 16 << 20, 160 << 20)


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_an_export_of_a_large_checkpoint_takes_less_than_half_a_gigabyte(tmp_path, file):
    """3 arrays of 256 MB, with the slabs and the memory for chunks that users have."""
    check_memory(tmp_path, file, 8192, 3, array_chunks.SLAB_BYTES, array_files._CACHE_BYTES, 500 << 20)


def test_no_later_model_reads_the_checkpoint_of_an_export(trained, tmp_path, monkeypatch):
    """Keras gives variables without a value one at the end of any scope without state, such as that of a new model."""
    monkeypatch.setattr(unallocated_variables, "_LEAST_BYTES", 1)
    _, path = trained
    folder = shutil.copytree(os.path.dirname(path), tmp_path / "copy")
    export(folder / os.path.basename(path), tmp_path / "exported.weights.h5", model=make_model)
    shutil.rmtree(folder)
    with keras.StatelessScope():
        pass


# --- errors ---------------------------------------------------------------------------------------------


def test_bad_arguments_write_nothing(trained, saved, tmp_path):
    _, path = trained
    other = saved(small=jnp.ones(2, jnp.int4))
    tensors = tmp_path / "m.safetensors"
    export(path, tensors, only="model/*")
    before = tensors.read_bytes()
    message(InvalidArgumentError, lambda: export(path, tmp_path / "m.pt"), "'.safetensors'")
    message(InvalidArgumentError, lambda: export(path, tmp_path / "m.h5"), "'.weights.h5'")
    message(InvalidArgumentError, lambda: export(path, tensors, only="no/*"), "none of the arrays", "epoch")
    message(InvalidArgumentError, lambda: export(path, tensors, only=3), "'model/*'", "3")
    message(InvalidArgumentError, lambda: export(path, tensors, model=make_model), "model is for")
    message(InvalidArgumentError, lambda: export(path, tmp_path / "m.keras"), "model=make_model")
    weights = tmp_path / "m.weights.h5"
    message(InvalidArgumentError, lambda: export(path, weights, model=make_model, only="*"), "only")
    message(InvalidArgumentError, lambda: export(path, weights, model=make_nothing), "3")
    message(
        CheckpointMismatchError, lambda: export(path, weights, model=make_smaller), "(16, 300)", "(16, 299)"
    )
    message(CheckpointMismatchError, lambda: export(path, weights, model=make_model, name="net"), "'model'")
    message(CheckpointWriteError, lambda: export(other, tensors), "int4")
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    message(CheckpointWriteError, lambda: export(path, folder), str(folder))
    assert tensors.read_bytes() == before
    assert not [*tmp_path.rglob("*.part*")]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
def test_nothing_else_in_the_directory_is_touched(trained, tmp_path):
    model, path = trained
    own = [tmp_path / name for name in ("m.part.safetensors", "m.part.weights.h5", "directory.part")]
    for file in own:
        file.write_text("mine")
    export(path, tmp_path / "m.safetensors")
    export(path, tmp_path / "m.weights.h5", model=make_model)
    rx.checkpoint.export_weights(model, tmp_path / "m.weights.h5")
    export(path, tmp_path / "directory")
    assert [file.read_text() for file in own] == ["mine"] * 3
    made = [tmp_path / name for name in ("m.safetensors", "m.weights.h5", "directory")]
    assert sorted(tmp_path.iterdir()) == sorted([*own, *made])


def test_a_damaged_variable_is_named_and_nothing_is_written(saved, tmp_path):
    path = saved(model=make_smaller(), other=np.ones((100, 100), "f4"))
    folder = os.path.join(path, "arrays", "other")
    (file,) = [name for name in os.listdir(folder) if name.startswith("c")]
    with open(os.path.join(folder, file), "r+b") as opened:
        opened.seek(50)
        byte = opened.read(1)
        opened.seek(50)
        opened.write(bytes([byte[0] ^ 4]))
    for to in ("m.safetensors", "directory"):
        message(CorruptCheckpointError, lambda to=to: export(path, tmp_path / to), "other")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [os.path.basename(path)]


def test_a_full_disk_leaves_the_old_file(trained, tmp_path):
    """A limit on the size of files stands for the full disk: writing fails part of the way."""
    files = ["m.safetensors", "m.weights.h5", "m.keras"]
    for file in files:
        (tmp_path / file).write_bytes(b"old")
    call = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import replicax as rx
sys.path.insert(0, {os.path.dirname(MODELS)!r})
import exported_models
from exported_models import make_model
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
for file in {[*files, "directory"]!r}:
    model = make_model if "5" in file or "keras" in file else None
    try:
        rx.checkpoint.export({trained[1]!r}, {str(tmp_path)!r} + "/" + file, model=model)
    except rx.errors.CheckpointWriteError as error:
        print("refused", file, error.errno)
"""
    ended = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=200)
    refused = dict(line.split()[1:] for line in ended.stdout.splitlines())
    assert list(refused) == [*files, "directory"], ended.stderr[-2000:]
    assert {refused[file] for file in files} == {str(errno.EFBIG)}
    assert ended.returncode == 0, "HDF5 ends the process with a crash once a write has failed"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(files)
    assert {(tmp_path / file).read_bytes() for file in files} == {b"old"}


# --- the command ----------------------------------------------------------------------------------------
