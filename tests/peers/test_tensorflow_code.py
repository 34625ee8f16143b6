"""Code of TensorFlow left in a program: ``tests/diagnostics/test_tensorflow_code.py`` with TensorFlow itself."""

import logging

import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow import math as tf_math
from tensorflow import reduce_sum

import replicax as rx
from checks import message
from replicax._src.diagnostics import side_effects
from replicax.errors import UnsupportedError

counter = tf.Variable(1.0)
mean = tf.constant([1.0, 2.0])

FUNCTIONS = {
    "tf.reduce_mean": lambda x: tf.reduce_mean(x),
    "tf.reduce_sum": lambda x: reduce_sum(x),
    "tf.math.reduce_max": lambda x: tf_math.reduce_max(x),
    "tf.cast": lambda x: tf.cast(x, tf.int32),
    "tf.argmax": lambda x: 1 + tf.argmax(x, axis=0),
    "tf.nn.softmax": lambda x: tf.nn.softmax(x),
    "tf.matmul": lambda x: tf.matmul([x], [x], transpose_b=True),
    "tf.square": lambda x: jnp.sum(tf.square(x - 1.0)),
    "tf.while_loop": lambda x: tf.while_loop(lambda i: i[0] < 3, lambda i: i + 1, [x]),
    "tf.cond": lambda x: tf.cond(x[0] > 0, lambda: 1.0, lambda: 2.0),
    "tf.shape": lambda x: tf.shape(x),
    "tf.summary.scalar": lambda x: tf.summary.scalar("loss", x[0], step=0),
    "tf.debugging.assert_greater": lambda x: tf.debugging.assert_greater(x, 0.0),
    "tf.constant": lambda x: x + tf.constant(1.0),
    "tf.Variable": lambda x: x * counter,
    "mean": lambda x: x - mean,
    "tf.function": lambda x: tf.function(lambda y: y + 1)(x),
    "tf.random.normal": lambda x: x + tf.random.normal((2,)),
}


@pytest.fixture
def told(caplog, monkeypatch):
    monkeypatch.setattr(side_effects, "_reported", set())
    with caplog.at_level(logging.WARNING, logger="replicax"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_tensorflow_in_a_step(strategy, name):
    fn = FUNCTIONS[name]
    line = f"At {__file__}:{fn.__code__.co_firstlineno} in <lambda>, "
    said = message(
        UnsupportedError, lambda: strategy.run(fn, args=(jnp.ones(2),)), line, name.rpartition(".")[2]
    )
    assert "uses TensorFlow" in said
    if name.startswith(("tf.reduce", "tf.square", "tf.cast", "tf.argmax")):
        assert "Write keras.ops." in said
        assert f"in place of {name}." in said
    message(UnsupportedError, lambda: rx.function(fn)(jnp.ones(2)), line)


def test_a_tape_around_variables_of_replicax_and_of_keras(strategy):
    with strategy.scope():
        variables = [rx.Variable(2.0), keras.Variable(2.0)]

    def step(variable):
        with tf.GradientTape() as tape:
            loss = variable * variable
        return tape.gradient(loss, [variable])

    for variable in variables:
        text = "`tape.gradient(loss, [variable])`"
        message(
            UnsupportedError, lambda v=variable: strategy.run(step, args=(v,)), text, "Write rx.GradientTape"
        )
    with tf.GradientTape():
        message(UnsupportedError, lambda: strategy.run(lambda: 1.0), "while a tf.GradientTape records")


def test_tf_variables(strategy, told):
    class Trainer(tf.Module):
        def __init__(self):
            super().__init__()
            self.steps, self.factor = tf.Variable(0), 2.0

        def count(self, x):
            self.steps.assign_add(1)
            return x

        def scale(self, x):
            return x * self.factor

    def add(x):
        return keras.ops.add(x, counter)

    trainer = Trainer()
    message(
        UnsupportedError, lambda: strategy.run(trainer.count, args=(1.0,)), "`self.steps` is a tf.Variable"
    )
    message(UnsupportedError, lambda: rx.function(add)(1.0), "`counter` is a tf.Variable")
    message(
        UnsupportedError,
        lambda: strategy.run(jnp.sum, args=(counter,)),
        "args[0] is a tf.Variable",
        "rx.Variable",
    )
    assert strategy.run(trainer.scale, args=(jnp.ones(2),)).values[0].tolist() == [2, 2]
    assert told() == []


def test_functions_that_run_while_tracing_are_reported(strategy, told):
    def step(x):
        tf.print("x", x)
        number = tf.distribute.get_strategy().num_replicas_in_sync
        noise = np.asarray(tf.random.normal((2,)))
        return tf.nest.map_structure(lambda leaf: leaf + noise / number, x).astype(tf.float32.as_numpy_dtype)

    for _ in range(2):
        strategy.run(step, args=(jnp.ones(2),))
    said = "\n".join(told())
    assert len(told()) == 3
    assert "Write jax.debug.print in place of tf.print." in said
    assert "Write rx.get_strategy in place of tf.distribute.get_strategy." in said
    assert "all replicas and all steps get the same numbers" in said


def test_tensors_are_not_returned(strategy):
    message(UnsupportedError, lambda: strategy.run(lambda: tf.ones(2)), "returns a tf.Tensor")
    message(UnsupportedError, lambda: strategy.run(lambda: tf.Variable(2.0)), "returns a tf.Variable")


@pytest.mark.parametrize("autograph", [True, False])
def test_a_tf_function_around_run(strategy, capfd, autograph):
    def train_step(iterator):
        losses = strategy.run(lambda x: jnp.sum(x), args=(next(iterator),))
        return strategy.reduce("SUM", losses, axis=None)

    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.ones((4, 2))).batch(4))
    compiled = tf.function(train_step, autograph=autograph)
    place = f"{__file__}:{train_step.__code__.co_firstlineno}."
    message(
        UnsupportedError, lambda: compiled(iter(dataset)), "strategy.run", "tf.function train_step", place
    )
    message(
        UnsupportedError,
        lambda: compiled(next(iter(dataset))),
        "A PerReplica was used in the tf.function",
        place,
    )
    assert "AutoGraph" not in capfd.readouterr().err
    assert float(rx.function(compiled)(iter(dataset))) == 8  # its Python function


def test_run_of_functions_of_tensorflow(strategy, tmp_path):
    module = tf.Module()
    module.double = tf.function(lambda x: 2 * x, input_signature=[tf.TensorSpec([None], tf.float32)])
    tf.saved_model.save(module, str(tmp_path), signatures=module.double)
    signature = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    for function, says in (
        (tf.nn.relu, "Write keras.ops.relu in place of tf.nn.relu"),
        (signature, "SavedModel"),
    ):
        message(UnsupportedError, lambda fn=function: strategy.run(fn, args=(jnp.ones(2),)), says)


def test_run_of_a_tf_function(strategy):
    step = tf.function(lambda x: jnp.sum(x))
    assert float(strategy.run(step, args=(jnp.ones(2),)).values[0]) == 2


def test_fit(strategy):
    class Activated(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return tf.nn.relu(self.dense(x))

    class Taped(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(self(data[0]))
            tape.gradient(loss, self.trainable_variables)
            return {"loss": loss}

    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    with strategy.scope():
        activated, taped = Activated(), Taped()
        activated.compile("sgd", "mse")
        taped.compile("sgd", "mse")
        plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        plain.compile("sgd", lambda y, predicted: tf.reduce_mean(y - predicted))
    message(
        UnsupportedError, lambda: activated.fit(x, y, verbose=0), "`tf.nn.relu(self.dense(x))`", "in call"
    )
    message(UnsupportedError, lambda: taped.fit(x, y, verbose=0), "in train_step", "Write rx.GradientTape")
    message(
        UnsupportedError,
        lambda: plain.fit(x, y, verbose=0),
        "`tf.reduce_mean(y - predicted)`",
        "keras.ops.mean",
    )


def test_errors_of_tf_data_are_unchanged(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.ones((4, 2)), np.ones((4, 1)))).batch(2)
    wrong = data.map(
        lambda x, y: (tf.ensure_shape(tf.py_function(lambda x: x[:, :1], [x], tf.float64), (2, 2)), y)
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(wrong, verbose=0, shuffle=False)
