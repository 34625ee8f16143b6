"""A name of TensorFlow that replicax, JAX or Keras does not have: the error, or its note, says what to write."""

import importlib
import subprocess
import sys
import threading
import traceback
import types

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from noted_errors import Shell, note_of
from replicax._src.diagnostics import missing_names

MODULES = (
    "replicax",
    "replicax.config",
    "replicax.data",
    "replicax.experimental",
    "replicax.nn",
    "replicax.keras",
)


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


# --- modules and classes of replicax ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES)
def test_the_traceback_of_a_missing_name_ends_at_the_users_line(path):
    with pytest.raises(AttributeError) as caught:
        importlib.import_module(path).no_such_name
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == __file__


@pytest.mark.parametrize("path", MODULES)
def test_a_misspelt_name_is_no_name_of_tensorflow(path):
    module = importlib.import_module(path)
    said = message(AttributeError, lambda: module.MirroredStrategie, f"module {path!r} has no attribute")
    assert "tf." not in said
    assert not hasattr(module, "__wrapped__")


def test_an_unknown_private_name_reads_no_table():
    script = (
        "import sys, replicax as rx\n"
        "print(hasattr(rx, '__path_of__'), 'replicax._migrate.table' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr


# --- values and modules of JAX and Keras ----------------------------------------------------------------------------


def test_objects_of_users_get_no_note(strategy):
    class Own:
        pass

    def step(x):
        return Own().numpy() + x

    assert not note_of(lambda: strategy.run(step, args=(jnp.ones(()),)))

    class Net(keras.Model):
        def rate(self):
            return self.lr  # which optimizers had

    with strategy.scope():
        model = Net()
    assert not note_of(lambda: strategy.run(lambda x: x * model.rate(), args=(jnp.ones(()),)))
    assert not note_of(lambda: strategy.run(lambda x: x.no_such_name, args=(jnp.ones(()),)))


# --- errors that end the program ----------------------------------------------------------------------------------


@pytest.fixture
def hooks(monkeypatch):
    """Hooks of Python that are as a program finds them."""
    monkeypatch.setattr(missing_names, "_hooks", [])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)


def test_a_users_handler_for_errors_of_cells_stays(hooks, monkeypatch):
    shell = Shell()
    shell.set_custom_exc((ValueError,), "the user's")
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    missing_names.note_uncaught()
    assert shell.handler == "the user's"


WITHOUT_PARENTHESES = """
import replicax as rx
strategy = rx.MirroredStrategy(["cpu:0"])
with strategy.scope:
    pass
"""


def test_a_scope_without_parentheses_is_named_where_it_ends_the_program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(WITHOUT_PARENTHESES)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    *_, error, note = done.stderr.splitlines()
    assert error.startswith("TypeError: 'method' object does not support the context manager protocol")
    assert note == "strategy.scope is a method. Write its parentheses: with strategy.scope():"


def test_only_methods_are_said_to_lack_parentheses(strategy):
    def note(given):
        with pytest.raises(TypeError) as caught, strategy.scope(), given:
            pass
        return getattr(caught.value, "__notes__", ())

    assert not note(3)


def test_a_learning_rate_that_is_called_as_a_schedule_is_named(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))

    def notes(call):
        with pytest.raises(TypeError) as caught, strategy.scope():
            call()
        return getattr(caught.value, "__notes__", ())

    (note,) = notes(lambda: optimizer.learning_rate(optimizer.iterations))
    assert note.endswith("Leave the call out: float(optimizer.learning_rate).")
    assert float(optimizer.learning_rate) == 0.5
    assert not notes(lambda: np.float32(1.0)(2))


def test_weights_and_layers_made_in_call_are_named_with_their_line(strategy):
    class Projection(keras.layers.Layer):
        def call(self, x):
            return x @ self.add_weight(shape=(x.shape[-1], 2))

    class Nested(keras.layers.Layer):
        def call(self, x):
            self.dense = keras.layers.Dense(2)
            return self.dense(x)

    for layer in (Projection, Nested):
        with pytest.raises(ValueError, match="Could not automatically infer") as caught, strategy.scope():
            keras.Sequential([keras.Input((3,)), layer()])
        (note,) = caught.value.__notes__
        assert note.startswith(f"{layer.__name__}.call() makes a weight or a layer at test_missing_names.py:")
        assert "self.kernel = self.add_weight(...)" in note
