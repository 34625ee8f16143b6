"""A name of TensorFlow that replicax, JAX or Keras does not have: the error, or its note, says what to write."""

import importlib
import subprocess
import sys
import traceback

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.migrate import missing_names, table

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


def note_of(call):
    """The notes of the AttributeError that ``call`` raises."""
    with pytest.raises(AttributeError) as caught:
        call()
    return " ".join(getattr(caught.value, "__notes__", ()))


# --- modules and classes of replicax ------------------------------------------------------------------------------


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
        "print(hasattr(rx, '__path_of__'), 'replicax._src.migrate.table' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr


# --- values and modules of JAX and Keras ----------------------------------------------------------------------------


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


# --- errors that end the program ----------------------------------------------------------------------------------

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
