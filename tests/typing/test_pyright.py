"""A type checker finds ten mistakes in a user's script, each at its line, and nothing in the corrected script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CORRECT = """\
import jax
import jax.numpy as jnp
import keras
import numpy as np
import replicax as rx
from flax import nnx

strategy = rx.MirroredStrategy()
batch = np.ones((8, 4), np.float32)


@rx.function
def scaled(x: jax.Array, factor: float) -> jax.Array:
    return factor * x


class Trainer:
    @rx.function
    def step(self, x: jax.Array) -> jax.Array:
        return x


def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.sum(x)


scaled(jnp.ones(3), 2.0)  # argument type
scaled(jnp.ones(3), factor=2.0)  # arity
same, total = strategy.run(step, args=(batch,))  # tuple
strategy.reduce(rx.ReduceOp.SUM, total, axis=None)  # axis
strategy.reduce("MEAN", total, axis=None)  # op
variable = rx.Variable(1.0, dtype=jnp.float32)  # dtype
variable.assign_add(2.0)
print(variable.values)  # attribute
strategy.experimental_local_results(total)  # method
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
model.fit(batch)  # scope
options = rx.RunOptions(check_same=True)  # option
strategy.run(step, (batch,), options=options)
Trainer().step(jnp.ones(3))

layer = keras.layers.Dense(1)
variable.assign([1.0, jnp.ones(()), np.float32(1)])
variable.assign(keras.ops.sum(layer.kernel))
variable.assign(strategy.run(lambda: jnp.ones(3)))
rx.Variable(lambda: keras.ops.ones(3))
rx.Variable(nnx.Param(jnp.ones(3)))
ids = jnp.asarray([0])
rows: jax.Array = rx.nn.embedding_lookup(layer.kernel, [0, ids[0]])
rx.nn.embedding_lookup([variable, layer.kernel], ids)
rx.nn.embedding_lookup_sparse(rows, [[0], [1, 2]], weights=[[1.0], [0.5, 0.5]], mask=None)
sharded = rx.experimental.ShardedVariable([variable])
print(sharded[1:, ..., None], sharded[ids], sharded[[0, 1]], sharded[np.asarray([True])])
rx.MirroredStrategy(layout_map={"up": (None, "logical"), "down": [("logical_0", "logical_1")]})
rx.MirroredStrategy(layout_map=rx.experimental.LayoutMap({"up": (None, "logical")}))
total = strategy.experimental_split_to_logical_devices(rows, [1]) + strategy.group(rows)
iterator = iter(strategy.experimental_make_numpy_dataset(batch).batch(2))
"""

MISTAKES = {
    "argument type": ("scaled(jnp.ones(3), 2.0)", 'scaled(jnp.ones(3), "2")'),
    "arity": ("scaled(jnp.ones(3), factor=2.0)", "scaled(jnp.ones(3))"),
    "tuple": ("args=(batch,)", "args=batch"),
    "axis": ("rx.ReduceOp.SUM, total, axis=None", "rx.ReduceOp.SUM, total"),
    "op": ('"MEAN"', '"AVG"'),
    "dtype": ("dtype=jnp.float32", "dtype=[jnp.float32]"),
    "attribute": ("variable.values", "variable.valuse"),
    "method": ("experimental_local_results", "local_result"),
    "scope": ("model.fit(batch)", "strategy.scope().fit(batch)"),
    "option": ("check_same", "chekc_same"),
}


def lines_with_errors(folder: Path, source: str) -> dict[int, str]:
    script = folder / "script.py"
    script.write_text(source)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic"}')
    pyright = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*pyright, "script.py"], cwd=folder, capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"]: each["message"] for each in found if each["severity"] == "error"}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("PYRIGHT_PYTHON_IGNORE_WARNINGS", "1")


@pytest.mark.rest
def test_ten_mistakes_are_found_each_at_its_line(tmp_path):
    wrong = CORRECT.splitlines()
    expected = {}
    for name, (right, mistake) in MISTAKES.items():
        line = next(i for i, text in enumerate(wrong) if text.endswith(f"# {name}"))
        assert right in wrong[line]
        wrong[line] = wrong[line].replace(right, mistake)
        expected[line] = name
    found = lines_with_errors(tmp_path, "\n".join(wrong))
    assert set(found) == set(expected), found


@pytest.mark.rest
def test_the_corrected_script_has_no_error(tmp_path):
    assert lines_with_errors(tmp_path, CORRECT) == {}
