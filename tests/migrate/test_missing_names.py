"""Errors of replicax, JAX and Keras for a name of TensorFlow say what the table says to write."""

import subprocess
import sys
import threading
import types

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from noted_errors import Shell, note_of
from replicax._migrate import table
from replicax._src.diagnostics import missing_names


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def test_a_name_of_tensorflow_below_rx_names_its_replacement():
    for call, said in (
        (lambda: rx.distribute, "Write rx in place of tf.distribute."),
        (
            lambda: rx.distribute.MirroredStrategy(),
            "Write rx.MirroredStrategy in place of tf.distribute.Mirr",
        ),
        (lambda: rx.math.reduce_mean(1.0), "Write keras.ops.mean in place of tf.math.reduce_mean."),
        (lambda: rx.clip_by_global_norm, "optax.tree.norm"),
        (lambda: rx.clip_by_global_norm, "a Keras optimizer with global_clipnorm"),
        (lambda: rx.print("loss", 1.0), 'jax.debug.print("{}", x)'),
        (lambda: rx.train.Checkpoint(), "Write rx.Checkpoint in place of tf.train.Checkpoint."),
        (lambda: rx.nn.relu(1.0), "Write keras.ops.relu in place of tf.nn.relu."),
        (lambda: rx.config.experimental.set_memory_growth(1, True), "Leave tf.config.experimental.set_mem"),
        (lambda: rx.data.AUTOTUNE, "leave it out"),
        (lambda: rx.data.TFRecordDataset("x"), "write rx.data.from_tfrecords"),
        (lambda: rx.keras.losses.MeanSquaredError(), "Write keras.losses.MeanSquaredError in place of"),
        (
            lambda: rx.data.Dataset.from_generator(iter),
            "has no attribute 'from_generator'. Datasets of replicax",
        ),
        (lambda: rx.data.from_arrays(np.ones(3)).padded_batch(2), "the datasets of grain and tf.data"),
        (lambda: rx.Variable(1.0).get_shape(), "Write variable.shape in place of variable.get_shape()."),
    ):
        message(AttributeError, call, said)


def test_an_import_of_a_name_of_tensorflow_says_what_to_write():
    for statement, said in (
        (
            "from replicax import distribute",
            "Write rx in place of tf.distribute. Import it with: import replicax as rx.",
        ),
        ("from replicax.data import AUTOTUNE", "leave it out"),
        ("from replicax.nn import relu", "Write jax.nn.relu in place of tf.nn.relu."),
    ):
        error = message(ImportError, lambda s=statement: exec(s, {}), said)
        assert error.startswith(f"cannot import name {statement.split()[-1]!r} from 'replicax")
    error = message(
        ImportError, lambda: exec("from replicax import MirroredStratgy", {}), "cannot import name"
    )
    assert "tf." not in error
    with pytest.raises(AttributeError):  # which hasattr and getattr with a default catch
        _ = rx.distribute


def test_every_name_of_the_table_below_a_module_of_replicax_has_a_sentence():
    """Except names that replicax has, and those that the table leaves to TensorFlow without a word."""
    silent = []
    for row in table.rows():
        below = row.name.removeprefix("tf.")
        if not row.name.startswith("tf.") or row.name in ("tf.keras", "tf.summary") or below in dir(rx):
            continue
        said = missing_names._first(missing_names._MODULES["replicax"], below, "", in_keras=True)
        if said is None and (row.kind != "keep" or row.note) and (row.with_keras or row.write or row.note):
            silent.append(row.name)
    assert not silent


def test_numpy_of_a_value_in_a_step_says_what_to_write_and_where(strategy):
    def step(loss):
        return loss.numpy()

    for call in (
        lambda: strategy.run(step, args=(jnp.ones(()),)),
        lambda: rx.function(step)(jnp.ones(())),
    ):
        note = note_of(call)
        assert "Write np.asarray(loss)[()] in place of loss.numpy()." in note
        assert "return the value" in note
        assert "jax.debug.print" in note
    eagerly = note_of(lambda: strategy.run(step, args=(jnp.ones(()),), options=rx.RunOptions(eager=True)))
    assert "loss.numpy()" in eagerly
    assert "is traced" not in eagerly


def test_methods_of_tensorflows_values_are_named_in_a_scope(strategy):
    x, model = jnp.ones((2, 3)), keras.Sequential()

    def in_scope(call):
        with strategy.scope():
            call()

    for call, said in (
        (lambda: x.numpy(), "Write np.asarray(x)[()] in place of x.numpy()."),
        (lambda: x.shape.as_list(), "Write list(x.shape) in place of x.shape.as_list()."),
        (lambda: x.shape.ndims, "Write len(x.shape) in place of x.shape.ndims."),
        (lambda: x.get_shape(), "Write x.shape in place of x.get_shape()."),
        (lambda: model.compiled_loss(1, 2), "Write rx.keras.compiled_loss(model, y_true, y_pred"),
        (lambda: keras.losses.Reduction.NONE, "Write None in place of tf.keras.losses.Reduction.NONE."),
        (lambda: keras.losses.Reduction, 'write None, "sum" or "sum_over_batch_size"'),
        (lambda: keras.ops.reduce_mean(x), "Write keras.ops.mean in place of tf.reduce_mean."),
        (lambda: jnp.reduce_mean(x), "Write keras.ops.mean in place of tf.reduce_mean."),
    ):
        assert said in note_of(lambda call=call: in_scope(call))


def test_compiled_loss_in_a_train_step_says_what_to_write(strategy):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with rx.GradientTape() as tape:
                loss = self.compiled_loss(y, self(x))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    with strategy.scope():
        model = Net()
        model.compile("sgd", "mse")
    note = note_of(lambda: model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0))
    assert "Write rx.keras.compiled_loss(self, y_true, y_pred" in note


def test_numpy_in_a_layers_call_is_named_though_keras_wraps_the_error(strategy):
    class Layer(keras.layers.Layer):
        def call(self, x):
            return x * x.numpy()

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        layer = Layer()
    assert "in place of x.numpy()" in note_of(
        lambda: strategy.run(lambda x: layer(model(x)), args=(jnp.ones((2, 2)),))
    )


def test_a_callback_of_fit_that_uses_numpy_is_named(strategy):
    class Callback(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            jnp.asarray(1.0).numpy()

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    note = note_of(lambda: model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[Callback()]))
    assert note.count("Write np.asarray(jnp.asarray(1.0))[()]") == 1


UNCAUGHT = """
import sys
before = sys.excepthook
import jax.numpy as jnp
import replicax as rx
assert sys.excepthook is before
strategy = rx.MirroredStrategy(["cpu:0"])
hook = sys.excepthook
rx.OneDeviceStrategy("cpu:0")
assert sys.excepthook is hook
loss = strategy.reduce("sum", strategy.run(lambda: jnp.ones(())), axis=None)
print("loss", loss.numpy())
"""


def test_numpy_of_a_result_outside_of_the_step_is_named_where_it_ends_the_program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(UNCAUGHT)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    *_, error, note = done.stderr.splitlines()
    assert error.endswith("object has no attribute 'numpy'")
    assert note == "Write np.asarray(loss)[()] in place of loss.numpy()."


def test_numpy_of_a_result_is_named_in_a_program_without_a_source():
    """As ``python -c`` and programs on standard input, whose lines Python does not know."""
    for command, given in (([sys.executable, "-c", UNCAUGHT], None), ([sys.executable, "-"], UNCAUGHT)):
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
        error, note = done.stderr.splitlines()[-2:]
        assert error.endswith("object has no attribute 'numpy'")
        assert note.startswith("Write np.asarray(")  # Python 3.13 knows the lines of -c
        assert " in place of " in note


@pytest.fixture
def hooks(monkeypatch):
    """Hooks of Python that are as a program finds them."""
    monkeypatch.setattr(missing_names, "_hooks", [])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)


def takes_numpy_of_a_result():
    loss = jnp.ones(())
    loss.numpy()


NOTE = "Write np.asarray(loss)[()] in place of loss.numpy()."


def test_numpy_of_a_result_is_named_where_it_ends_a_thread(hooks, capsys):
    missing_names.note_uncaught()
    thread = threading.Thread(target=takes_numpy_of_a_result)
    thread.start()
    thread.join()
    assert capsys.readouterr().err.endswith(f"object has no attribute 'numpy'\n{NOTE}\n")


def test_numpy_of_a_result_is_named_where_it_ends_a_cell_of_a_notebook(hooks, monkeypatch):
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    missing_names.note_uncaught()
    shell.run_cell(takes_numpy_of_a_result)
    assert shell.shown[0].endswith(f"object has no attribute 'numpy'\n{NOTE}\n")
    with pytest.raises(KeyboardInterrupt):  # of the stop button; IPython shows it itself
        shell.run_cell(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
