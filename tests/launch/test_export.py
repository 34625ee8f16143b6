"""The command exports checkpoints."""

import contextlib
import io
import os

import keras
import numpy as np
import pytest

import exported_models
import replicax as rx
from exported_models import make_model
from replicax.__main__ import main

MODELS = exported_models.__file__
CPUS = ["cpu:0", "cpu:1"]


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


def test_the_command_exports_the_latest_of_a_directory(trained, tmp_path, capsys):
    directory = os.path.dirname(trained[1])
    to = tmp_path / "m.safetensors"
    assert main(["export", directory, "--to", str(to), "--only", "model/layers/*", "--only", "epoch"]) == 0
    assert capsys.readouterr().out == f"{to}: {to.stat().st_size:,} bytes\n"
    weights = tmp_path / "m.weights.h5"
    assert main(["export", directory, "--to", str(weights), "--model", f"{MODELS}:make_model"]) == 0
    model = make_model()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(weights)
    np.testing.assert_array_equal(model.layers[-1].kernel, trained[0].layers[-1].kernel)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--to", "m.pt"], "'.keras'"),
        (["--to", "m.keras"], "model=make_model"),
        (["--to", "m.keras", "--model", "make_model"], "train.py:make_model"),
        (["--to", "m.keras", "--model", "missing.py:make_model"], "'missing.py'"),
        (["--to", "m.keras", "--model", f"{MODELS}:missing"], "'missing'"),
    ],
)
def test_the_command_reports_bad_options(trained, given, says):
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        assert main(["export", trained[1], *given]) == 1
    assert says in printed.getvalue()
