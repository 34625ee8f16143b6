"""The table of names matches TensorFlow: names and signatures are TensorFlow's, and the recording is up to date."""

import functools
import inspect
import json
import runpy
from pathlib import Path

import pytest
import tensorflow as tf

from replicax._migrate import table

MIGRATE = Path(__file__).parents[1] / "migrate"
# TensorFlow 2.21 no longer has these, or has them only in some cases; programs still use them.
OLDER = (
    "tf.estimator",
    "tf.feature_column",
    "tf.text",
    "tf.python",
    "tf.hub",
    "tf.experimental.dtensor",
    "tf.keras",
    "tf.compat.v1",
    "tf.tpu.experimental.embedding",
)


def found(name):
    """The object of a name in TensorFlow 2, or else in TensorFlow 1; None if there is none."""
    name = name.partition(" in ")[0]  # `tf.Variable in a Keras layer`
    for root in (tf, tf.compat.v1):
        try:
            return functools.reduce(getattr, name.split(".")[1:], root)
        except AttributeError:
            continue
    return None


FUNCTIONS = {
    (name, row.parameters): row
    for row in table.rows()
    for name in row.names
    if row.parameters is not None and not name.startswith((".", *OLDER))
}


@pytest.mark.parametrize(("name", "row"), [(name, row) for (name, _), row in FUNCTIONS.items()])
def test_signature_is_that_of_tensorflow(name, row):
    """A row may leave parameters out, and may require one that has a default."""
    signature = inspect.signature(found(name))
    known = list(signature.parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    positional = [p.name for p in row.parameters if p.kind == "positional"]
    if not takes_any:
        assert {p.name for p in row.parameters} <= set(known) | OVERLOADS.get(name, set())
        if name not in OVERLOADS:
            assert positional == [p for p in known if p in positional], "the order is another one"
    for parameter in row.parameters:
        if parameter.name == "name":
            continue  # names of operations have no effect here
        theirs = signature.parameters.get(parameter.name)
        if parameter.default is not None and theirs is not None and theirs.default is not theirs.empty:
            ours = eval(parameter.default, {"tf": tf}) if parameter.default != "..." else theirs.default
            assert ours == theirs.default or ours is theirs.default


# `tf.range(limit)` and `tf.range(start, limit)`: Python has no signature for it.
OVERLOADS = {"tf.range": {"start", "limit"}}


def test_recording_equals_tensorflow():
    again = runpy.run_path(str(MIGRATE / "table_examples.py"))["record"]()
    recorded = json.loads((MIGRATE / "recorded.json").read_text())
    assert rounded(again) == rounded(recorded)


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
