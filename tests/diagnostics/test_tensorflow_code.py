"""TensorFlow code left in a program: the errors, with a stand-in for TensorFlow. ``tests/peers`` has the real one."""

import logging
import sys
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.diagnostics import side_effects
from replicax.errors import TracedConditionError, UnsupportedError
from tensorflow_stand_in import line_of, stand_in


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def tf(monkeypatch):
    module = stand_in()
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    return module


@pytest.fixture
def told(caplog, monkeypatch):
    """The warnings so far."""
    monkeypatch.setattr(side_effects, "_reported", set())
    with caplog.at_level(logging.WARNING, logger="replicax"):
        yield lambda: [record.getMessage() for record in caplog.records]


# --- in a function that is traced ---------------------------------------------------------------------


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


# --- what does not fail by itself ---------------------------------------------------------------------


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
