"""Names of Keras files whose ending is known at run time."""

from pathlib import Path

import pytest

import replicax as rx
from replicax.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("path", "model", "weights"),
    [
        ("a", "a.keras", "a.weights.h5"),
        ("a/", "a.keras", "a.weights.h5"),
        ("a.keras", "a.keras", "a.keras"),
        ("a.h5", "a.h5", "a.weights.h5"),
        ("a.weights.h5", "a.weights.h5", "a.weights.h5"),
        (Path("b") / "ckpt-{epoch}", "b/ckpt-{epoch}.keras", "b/ckpt-{epoch}.weights.h5"),
        ("a.hdf5", "a.hdf5", "a.weights.h5"),
    ],
)
def test_the_ending_is_added_once(path, model, weights):
    assert rx.keras.model_path(path) == rx.keras.model_path(rx.keras.model_path(path)) == model
    assert rx.keras.weights_path(path) == rx.keras.weights_path(rx.keras.weights_path(path)) == weights


@pytest.mark.parametrize("given", [None, "", 3, b"a"])
def test_invalid_paths(given):
    for function in (rx.keras.model_path, rx.keras.weights_path):
        with pytest.raises(InvalidArgumentError, match="path"):
            function(given)
