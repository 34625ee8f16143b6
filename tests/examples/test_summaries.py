"""Runs the example of summaries as a person runs it, and reads its files."""

import os
import pathlib
import subprocess
import sys

import pytest

from checks import path_of_programs, xla_flags
from event_files import scalars_in, summaries_in
from trace_files import events_in, files_in

pytestmark = pytest.mark.rest

ROOT = pathlib.Path(__file__).parents[2]


def test_summaries_writes_losses_weights_pictures_and_a_trace(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    environment |= {"XLA_FLAGS": xla_flags(optimization_level=1)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "summaries.py"), "--logdir", str(tmp_path), "--epochs", "2"],
        env=environment
        | {"PYTHONPATH": path_of_programs(ROOT / "src"), "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "wrote 70 summaries"
    scalars = scalars_in(tmp_path)
    assert list(scalars["loss"]) == list(range(58))
    assert scalars["loss"][57] < scalars["loss"][0] / 3
    assert 0.8 < scalars["accuracy"][58] <= 1
    plugins = {plugin for plugin, *_ in summaries_in(tmp_path)}
    assert plugins == {"scalars", "histograms", "images", "text"}
    (path,) = files_in(tmp_path)
    steps = [name for name, stats in events_in(path) if "step_num" in stats]
    assert len(steps) == 5
