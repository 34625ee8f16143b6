"""Errors of JAX in traced functions and Keras layers name the user's line and what to write."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax.errors import TracedConditionError, UnknownAxisError, UnsupportedError

X = np.ones((4, 3), "float32")


@pytest.fixture(params=[1, 2], ids="{} replica(s)".format)
def strategy(request):
    return rx.MirroredStrategy(request.param)


def clip(layer, x):
    return np.clip(x, -1, 1)


def scale(layer, x):
    return np.float64(0.5) * layer.w * x


def branch(layer, x):
    if jnp.sum(x) > 0:
        return x
    return -x


def mask(layer, x):
    return x * jnp.sum(x[x > 0])


class Layer(keras.layers.Layer):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def build(self, shape):
        self.w = self.add_weight((shape[-1],), initializer="ones")

    def call(self, x):
        return self.fn(self, x)

    def compute_output_shape(self, shape):
        return shape


class Net(keras.Model):
    def __init__(self, fn):
        super().__init__()
        self.layer = Layer(fn)

    def call(self, x):
        return self.layer(x)


MISTAKES = {
    clip: "Write keras.ops.clip in place of np.clip",
    scale: "put the variable or array first, or write float(number)",
    branch: "jnp.where",
    mask: "jnp.sum(x, where=mask)",
}
CALLS = {
    "fit": lambda strategy, model: model.fit(X, X, verbose=0),
    "evaluate": lambda strategy, model: model.evaluate(X, X, verbose=0),
    "predict": lambda strategy, model: model.predict(X, verbose=0),
    "run": lambda strategy, model: strategy.run(model, args=(jnp.asarray(X),)),
    "function": lambda strategy, model: rx.function(lambda x: strategy.run(model, args=(x,)))(jnp.asarray(X)),
}


def says_the_line_and_the_cure(fn, call):
    line = fn.__code__.co_firstlineno + 1
    text = message(TracedConditionError, call, f"{__file__}:{line} in {fn.__name__}", MISTAKES[fn])
    assert "_error_repr" not in text
    assert "automatically build" not in text


def model_of(strategy, fn, *, is_built):
    with strategy.scope():
        if not is_built:
            model = Net(fn)
        else:
            model = keras.Sequential([keras.Input((3,)), Layer(lambda layer, x: x)])
            model.layers[0].fn = fn
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fn", MISTAKES, ids=lambda fn: fn.__name__)
def test_mistake_in_a_layer_names_its_line_and_the_cure(strategy, fn, call):
    for is_built in (True, False):
        model = model_of(strategy, fn, is_built=is_built)
        says_the_line_and_the_cure(fn, lambda model=model: CALLS[call](strategy, model))


def test_mistake_in_a_layer_that_keras_builds_in_a_scope(strategy):
    class Clip(keras.layers.Layer):
        def call(self, x):
            return clip(self, x)

    def make():
        with strategy.scope():
            return keras.Sequential([keras.Input((3,)), Clip()])

    says_the_line_and_the_cure(clip, make)


def test_traceback_ends_at_the_users_line_and_has_the_lines_that_lead_there(strategy):
    model = model_of(strategy, scale, is_built=True)
    with pytest.raises(TracedConditionError) as caught:
        model.fit(X, X, verbose=0)
    entries = [entry.frame.code.name for entry in caught.traceback]
    assert entries[-1] == "scale"
    assert "call" in entries


def test_errors_of_the_users_own_code_are_unchanged(strategy):
    class Own(Exception):
        pass

    def own(layer, x):
        try:
            return float(jnp.sum(x))
        except TypeError:
            raise Own("mine") from None

    model = model_of(strategy, own, is_built=True)
    with pytest.raises(Own, match="mine"):
        strategy.run(model, args=(jnp.asarray(X),))

    def fallback(layer, x):
        try:
            x = float(jnp.sum(x))
        except TypeError:
            x = keras.ops.matmul(x, np.ones((7, 2)))
        return x

    model = model_of(strategy, fallback, is_built=True)
    with pytest.raises((ValueError, TypeError)) as caught:
        strategy.run(model, args=(jnp.asarray(X),))
    assert not isinstance(caught.value, TracedConditionError)


def test_list_of_numbers_in_place_of_an_array_gets_a_note(strategy):
    with pytest.raises(TypeError) as caught:
        strategy.run(lambda rows: jnp.mean(rows), args=([1.0, 2.0],))
    (note,) = [note for note in caught.value.__notes__ if "rows is a Python list" in note]
    assert "np.asarray(rows)" in note
    with pytest.raises(TypeError) as caught:
        strategy.run(lambda rows: rows + 1, args=([1.0, 2.0],))
    assert not getattr(caught.value, "__notes__", [])


def test_error_of_replicax_in_a_model_that_keras_builds_stays_typed(strategy):
    def tape(layer, x):
        raise UnsupportedError("this and that")

    model = model_of(strategy, tape, is_built=False)
    message(UnsupportedError, lambda: model.fit(X, X, verbose=0), "this and that")


def test_jax_error_in_a_scope_that_keras_has_no_part_in_stays_jaxs(strategy):
    with pytest.raises(jax.errors.ConcretizationTypeError), strategy.scope():
        jax.jit(lambda x: float(x))(1.0)


class PrintsItsLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
        print(float(loss))
        return {"loss": loss}


def test_converted_value_gets_its_print_and_the_eager_mode_of_its_call(strategy):
    def step(x):
        return float(jnp.sum(x))

    def run(**kwargs):
        return strategy.run(step, args=(jnp.asarray(X),), **kwargs)

    written = 'Write jax.debug.print("{}", jnp.sum(x)) to print it'
    message(TracedConditionError, run, written, "rx.RunOptions(eager=True)")
    run(options=rx.RunOptions(eager=True))
    text = message(TracedConditionError, rx.function(run), written)
    assert "eager" not in text
    with strategy.scope():
        model = PrintsItsLoss()
        model.compile("sgd", "mse")
    written = 'Write jax.debug.print("{}", loss)'
    text = message(
        TracedConditionError, lambda: model.fit(X, X[:, :1], verbose=0), written, "run_eagerly=True"
    )
    assert "RunOptions" not in text


def test_condition_on_the_number_of_the_replica_gets_a_condition_that_works(strategy, capfd):
    def step(x):
        value = jnp.sum(x)
        if rx.get_replica_context().replica_id_in_sync_group == 0:
            print(value)
        return value

    text = message(
        TracedConditionError, lambda: strategy.run(step, args=(X,)), "experimental_local_results(value)[0]"
    )
    line = 'rx.cond(rx.get_replica_context().replica_id_in_sync_group == 0, lambda: jax.debug.print("{}", value), lambda: None)'
    assert line in text

    def mended(x):
        value = jnp.sum(x)
        eval(line, {"rx": rx, "jax": jax, "value": value})
        return value

    strategy.run(mended, args=(X,))
    jax.effects_barrier()
    assert capfd.readouterr().out == "12.0\n"


class Config:
    rate = 0.1


def test_object_that_jit_refuses_gets_a_note_with_a_cure(strategy):
    def step(x, config):
        return x * config.rate

    jitted = jax.jit(step)
    with pytest.raises(TypeError) as caught:
        strategy.run(jitted, args=(X, Config()))
    (note,) = [note for note in caught.value.__notes__ if "jitted is compiled by jax.jit" in note]
    assert 'static_argnames="config"' in note
    strategy.run(step, args=(X, Config()))
    strategy.run(jax.jit(step, static_argnames="config"), args=(X, Config()))


WITHOUT_SOURCE = """
def condition(x):
    return x if x.sum() > 0 else -x
def mask(x):
    return x[x > 0]
def axis(x):
    return jax.lax.psum(x, "batch")
"""


@pytest.mark.parametrize("name", ["condition", "mask", "axis"])
def test_a_message_without_a_source_is_a_sentence(strategy, name):
    """Python knows no lines of ``python -c``, of standard input, and of what ``exec`` runs."""
    scope = {"jax": jax}
    exec(WITHOUT_SOURCE, scope)
    (x,) = strategy.experimental_distribute_dataset([X])
    with pytest.raises((TracedConditionError, UnknownAxisError), match=rf"^At <string>:\d in {name}, [aP]"):
        strategy.run(scope[name], args=(x,))
