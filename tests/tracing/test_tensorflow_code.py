"""TensorFlow code left in a program: the errors, with a stand-in for TensorFlow. ``tests/peers`` has the real one."""

import importlib.machinery
import inspect
import logging
import sys
import sysconfig
import traceback
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.migrate import tensorflow_code
from replicax._src.tracing import side_effects
from replicax.errors import TracedConditionError, UnsupportedError

SOURCE = """
import numpy as np

class Variable:
    dtype = shape = None
    _tf_api_names = ("Variable",)
    def __init__(self, value):
        self.value = np.asarray(value)
    def __array__(self, *args, **kwargs):
        return self.value
    def __rmul__(self, other):
        return np.asarray(other) * self.value
    def assign_add(self, value):
        self.value = np.asarray(self.value + value)

class ResourceVariable(Variable):
    pass

class Tensor:
    _tf_api_names = ("experimental.numpy.ndarray", "Tensor")
    dtype = np.dtype("float32")

class GradientTape:
    _tf_api_names = ("GradientTape", "autodiff.GradientTape")
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def gradient(self, target, sources):
        return target._id

class Function:
    def __init__(self, fn):
        self.python_function = self.__wrapped__ = fn
    def __call__(self, *args):
        return self.python_function(*map(traced, args))

def traced(value):
    return np.asarray(value) if hasattr(value, "__array__") else value

def function(fn):
    return Function(fn)

def reduce_mean(x, axis=None):
    return np.asarray(x).mean(axis)

def while_loop(cond, body, variables):
    return np.asarray(variables[0])

def constant(x):
    return Tensor()

def print(*values):
    pass

def unheard_of(x):
    return np.asarray(x)
"""


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def tf(monkeypatch):
    path = f"{sysconfig.get_path('purelib')}/tensorflow/python/stand_in.py"
    names = {"__name__": "tensorflow.python.stand_in"}
    exec(compile(SOURCE, path, "exec"), names)
    module = types.ModuleType("tensorflow")
    module.__spec__ = importlib.machinery.ModuleSpec(
        "tensorflow", None
    )  # for JAX, which looks whether it is installed
    vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})
    module.inside_function = lambda: False
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    return module


@pytest.fixture
def told(caplog, monkeypatch):
    """The warnings so far."""
    monkeypatch.setattr(side_effects, "_reported", set())
    with caplog.at_level(logging.WARNING, logger="replicax"):
        yield lambda: [record.getMessage() for record in caplog.records]


def line_of(fn, text):
    """``file:line in function`` of the line of a function with a text."""
    lines, first = inspect.getsourcelines(fn)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + number} in {fn.__name__}"


# --- in a function that is traced ---------------------------------------------------------------------


def test_a_function_of_tensorflow_is_named_with_its_line_and_what_to_write(strategy, tf):
    def step(x):
        y = x * 2
        return tf.reduce_mean(y, axis=0) + 1  # the expression alone is shown

    said = message(
        UnsupportedError,
        lambda: strategy.run(step, args=(jnp.ones(2),)),
        f"At {line_of(step, 'tf.')}, `tf.reduce_mean(y, axis=0)` uses TensorFlow",
        "Write keras.ops.mean in place of tf.reduce_mean.",
        "replicax migrate",
    )
    assert "while" not in said
    message(UnsupportedError, lambda: rx.function(step)(jnp.ones(2)), f"At {line_of(step, 'tf.')}, ")
    with pytest.raises(UnsupportedError) as caught:
        rx.value_and_grad(step)(jnp.ones(2))
    error = caught.value
    assert (
        traceback.extract_tb(error.__traceback__)[-1].name == "step"
    )  # TensorFlow's own frames are left out
    assert error.__suppress_context__


def test_without_keras_in_the_file_jax_numpy_is_named(strategy, tf):
    scope = {"tf": tf}
    exec("def step(x):\n    return tf.reduce_mean(x)", scope)
    said = message(UnsupportedError, lambda: strategy.run(scope["step"], args=(jnp.ones(2),)), "in step")
    assert "keras.ops.mean" not in said  # the source of the line is not known
    assert not tensorflow_code.uses_keras(scope)
    assert tensorflow_code.uses_keras({"Dense": keras.layers.Dense})
    assert "Write jnp.mean in place of tf.reduce_mean." in tensorflow_code.advice(["tf.reduce_mean"], False)


def test_names_that_have_no_single_counterpart(strategy, tf):
    loop = message(
        UnsupportedError,
        lambda: strategy.run(lambda x: tf.while_loop(None, None, [x]), args=(jnp.ones(2),)),
        "For tf.while_loop: write jax.lax.while_loop",
    )
    assert "Write a function of" not in loop
    message(
        UnsupportedError,
        lambda: strategy.run(lambda x: tf.unheard_of(x), args=(jnp.ones(2),)),
        "`tf.unheard_of(x)` uses TensorFlow",
        "Write a function of keras.ops or jax.numpy",
    )


def test_a_tape_of_tensorflow(strategy, tf):
    with strategy.scope():
        variable = rx.Variable(2.0)

    def step():
        with tf.GradientTape() as tape:
            loss = variable * variable
        return tape.gradient(loss, [variable])

    message(
        UnsupportedError,
        lambda: strategy.run(step),
        f"At {line_of(step, 'tape.gradient')}, `tape.gradient(loss, [variable])` uses TensorFlow",
        "Write rx.GradientTape in place of tf.GradientTape.",
    )


def test_a_replica_function_run_eagerly(strategy, tf):
    def step(x):
        with tf.GradientTape() as tape:
            pass
        return tape.gradient(x, [x])

    options = rx.RunOptions(eager=True)
    message(
        UnsupportedError,
        lambda: strategy.run(step, args=(jnp.ones(2),), options=options),
        "tape.gradient",
        "rx.GradientTape",
    )


def test_what_made_a_tensor_of_tensorflow_is_named(strategy, tf):
    def step(x):
        noise = tf.constant(1.0)
        return x + noise

    message(
        UnsupportedError,
        lambda: strategy.run(step, args=(jnp.ones(2),)),
        f"At {line_of(step, 'x + noise')}, `x + noise` uses TensorFlow",
        f"noise is the result of `tf.constant(1.0)` at line {step.__code__.co_firstlineno + 1}.",
        "in place of tf.constant.",
    )


def test_other_errors_are_unchanged(strategy, tf):
    def step(x):
        if x > tf.reduce_mean(np.ones(2)):
            x = x + 1
        return x

    message(TracedConditionError, lambda: strategy.run(step, args=(1.0 * jnp.ones(()),)), "jnp.where")
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    with pytest.raises(KeyError):
        rx.function(lambda x: {tf: x}["absent"])(1.0)


# --- tf.Variable --------------------------------------------------------------------------------------


def test_a_tf_variable_as_an_argument(strategy, tf):
    counter = tf.ResourceVariable(1.0)
    for call in (lambda: strategy.run(jnp.sum, args=(counter,)), lambda: rx.function(jnp.sum)(counter)):
        message(UnsupportedError, call, "args[0] is a tf.Variable", "Make an rx.Variable of it")


def test_tf_variable_in_a_closure_raises_for_any_use(strategy, tf, told):
    counter = tf.ResourceVariable(1.0)

    class Trainer:
        def __init__(self):
            self.counter = counter
            self.factor = 2.0

        def count(self, x):
            self.counter.assign_add(1.0)
            return x

        def read(self, x):
            return x + np.asarray(self.counter) * self.factor

        def leave(self, x):
            if x.shape == (3,):
                self.counter.assign_add(1.0)
            return x * self.factor

    def multiply(x):
        return x * counter

    trainer = Trainer()
    for _ in range(2):
        count = lambda: strategy.run(trainer.count, args=(jnp.ones(2),))  # noqa: E731
        message(
            UnsupportedError,
            count,
            f"{line_of(trainer.count, 'assign_add')}: `self.counter` is a tf.Variable",
            "rx.Variable",
        )
    message(
        UnsupportedError, lambda: rx.function(trainer.read)(jnp.ones(2)), "`self.counter` is a tf.Variable"
    )
    message(
        UnsupportedError, lambda: strategy.run(multiply, args=(jnp.ones(2),)), "`x * counter`", "rx.Variable"
    )
    assert told() == []
    assert strategy.run(trainer.leave, args=(jnp.ones(2),)).values[0].tolist() == [2, 2]


# --- what does not fail by itself ---------------------------------------------------------------------


def test_functions_that_run_once_while_tracing_are_reported(strategy, tf, told):
    def step(x):
        tf.print("loss", x)
        return x

    for _ in range(2):
        strategy.run(step, args=(jnp.ones(2),))
    (said,) = told()
    assert f"{line_of(step, 'print')}: `tf.print('loss', x)` runs in TensorFlow once" in said
    assert "Write jax.debug.print in place of tf.print." in said


def test_tensors_that_tensorflow_made_are_not_returned(strategy, tf, told):
    message(UnsupportedError, lambda: strategy.run(lambda: {"a": tf.constant(1.0)}), "returns a tf.Tensor")
    message(UnsupportedError, lambda: rx.function(lambda: tf.constant(1.0))(), "returns a tf.Tensor")


# --- tf.function --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "reduce", "gather", "function"])
def test_calls_in_a_tf_function_raise(strategy, tf, monkeypatch, name):
    value = strategy.run(lambda: jnp.ones(2))
    monkeypatch.setattr(tf, "inside_function", lambda: True)

    def train_step():
        if name == "run":
            strategy.run(lambda: 1.0)
        if name == "reduce":
            strategy.reduce("SUM", value, axis=None)
        if name == "gather":
            strategy.gather(value, axis=0)
        rx.function(lambda: 1.0)()

    place = line_of(train_step, "def train_step").partition(" ")[0]
    what = "A function of rx.function" if name == "function" else f"strategy.{name}"
    text = f"{what} was called in the tf.function train_step, at {place}. "
    message(UnsupportedError, tf.function(train_step), text, "Write @rx.function in place of @tf.function")


def test_error_in_a_tf_function_passes_autograph_unchanged(strategy, tf, monkeypatch):
    monkeypatch.setattr(tf, "inside_function", lambda: True)
    with pytest.raises(UnsupportedError) as caught:
        strategy.run(lambda: 1.0)
    assert caught.value.ag_pass_through
    assert hasattr(strategy.run, "autograph_info__")


def test_a_per_replica_value_as_argument_of_a_tf_function(strategy, tf):
    value = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    message(
        UnsupportedError,
        lambda: tf.function(lambda x: x)(value),
        "A PerReplica was used in the tf.function <lambda>",
        "@rx.function",
    )


def test_a_tf_function_given_to_run_or_rx_function_is_the_python_function(strategy, tf):
    step = tf.function(lambda x: jnp.sum(x) * 2)
    assert float(strategy.run(step, args=(jnp.ones(2),)).values[0]) == 4
    assert float(rx.function(step)(jnp.ones(2))) == 4
    assert float(strategy.run(rx.function(step), args=(jnp.ones(2),)).values[0]) == 4


def test_a_run_while_a_tape_of_tensorflow_records(strategy, tf, monkeypatch):
    record = types.ModuleType("tensorflow.python.eager.record")
    record.could_possibly_record = lambda: True
    monkeypatch.setitem(sys.modules, record.__name__, record)
    message(
        UnsupportedError,
        lambda: strategy.run(lambda: 1.0),
        "while a tf.GradientTape records",
        "rx.GradientTape",
    )


# --- fit ----------------------------------------------------------------------------------------------


def test_a_loss_of_fit(strategy, tf):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", lambda y, predicted: tf.reduce_mean(y - predicted))
    message(
        UnsupportedError,
        lambda: model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0),
        f"At {line_of(test_a_loss_of_fit, 'compile').partition(' ')[0]} in <lambda>, `tf.reduce_mean(y - predicted)` uses TensorFlow",
        "keras.ops.mean",
    )


def test_errors_of_the_data_of_fit_are_unchanged(strategy, tf):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def batches():
        yield np.ones((2, 2)), np.ones((2, 1))
        tf.GradientTape().gradient(1.0, [])

    with pytest.raises(AttributeError, match="_id"):
        model.fit(batches(), steps_per_epoch=2, verbose=0, shuffle=False)


def test_nothing_is_checked_without_tensorflow(strategy, monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    with pytest.raises(TracedConditionError):
        strategy.run(lambda x: float(x), args=(jnp.ones(()),))
    assert "tensorflow" not in sys.modules
    assert jax.devices()
