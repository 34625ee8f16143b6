"""Errors for TensorFlow code that is left in a program say what the table says to write."""

import logging
import sys
import traceback

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.diagnostics import side_effects, tensorflow_code
from replicax.errors import UnsupportedError
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
    said = message(
        UnsupportedError,
        lambda: strategy.run(scope["step"], args=(jnp.ones(2),)),
        "in step, the code uses TensorFlow, which cannot",
    )
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


def test_functions_that_run_once_while_tracing_are_reported(strategy, tf, told):
    def step(x):
        tf.print("loss", x)
        return x

    for _ in range(2):
        strategy.run(step, args=(jnp.ones(2),))
    (said,) = told()
    assert f"{line_of(step, 'print')}: `tf.print('loss', x)` runs in TensorFlow once" in said
    assert "Write jax.debug.print in place of tf.print." in said


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
