"""The statements about Keras 3 in ``keras_dropped.toml`` and ``keras_arguments.json`` are true of the installed Keras."""

import functools
import inspect
import re

import keras
import numpy as np
import pytest

from migrated import becomes, marks, rewritten
from replicax._migrate.keras_dropped import arguments_of_keras_2, dropped_by_keras

DROPPED = dropped_by_keras()
ARGUMENTS = arguments_of_keras_2()
MISSING = object()
OWNERS = [keras.Model, keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric]
HEAD = "from tensorflow import keras\n"
MODEL = "model = keras.Sequential()\n"


def at(path):
    return functools.reduce(lambda found, name: getattr(found, name, MISSING), path.split("."), keras)


def functions(path):
    """The functions of Keras 3 that a name of the files means."""
    if not path.startswith("."):
        return [at(path)]
    return [getattr(owner, path[1:]) for owner in OWNERS if hasattr(owner, path[1:])]


def places_of(function):
    signature = inspect.signature(function.__init__ if isinstance(function, type) else function)
    names = [p.name for p in signature.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    return names[names[:1] == ["self"] :]


@pytest.mark.parametrize("name", [*DROPPED["names"], *DROPPED["private"]])
def test_keras_has_no_such_name(name):
    assert at(name) is MISSING


def test_private_names_of_keras_2_are_marked():
    text = "from tensorflow.python.keras.utils import losses_utils\nx = losses_utils.ReductionV2.AUTO\n"
    assert [rule for rule, _ in marks(text)] == ["keras"]


def test_arguments_are_gone_and_places_are_those_of_keras():
    assert len(ARGUMENTS) > 150
    wrong = []
    for path, found in ARGUMENTS.items():
        for function in functions(path):
            named = set(places_of(function))
            if set(found["gone"]) & named:
                wrong.append(f"{path} takes {set(found['gone']) & named}")
            if found["now"] and places_of(function) != found["now"]:
                wrong.append(f"{path} has {places_of(function)}, not {found['now']}")
    assert wrong == []


@pytest.mark.parametrize("table", ["renamed", "removed", "without_effect", "arguments"])
def test_what_is_said_of_arguments_is_of_arguments_that_are_gone(table):
    """Each entry is in the file that is made from the sources, or Keras refuses it or warns."""
    for path, names in DROPPED[table].items():
        if path in ("layers", "optimizers"):
            continue
        for function in functions(path):
            assert not set(names) & set(places_of(function)) - {"epsilon"}, path


def test_keras_takes_the_new_names_of_arguments():
    for path, names in DROPPED["renamed"].items():
        for function in functions(path) if path not in ("layers", "optimizers") else ():
            assert set(names.values()) <= set(inspect.signature(function).parameters), path


def test_removed_arguments_are_rejected_by_keras():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="workers"):
        model.fit([[1.0]], [[1.0]], workers=2)
    with pytest.raises(ValueError, match="jit_compile"):
        keras.optimizers.SGD(jit_compile=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("keras.regularizers.l2(l=0.1)", "keras.regularizers.l2(l2=0.1)"),
        ("keras.regularizers.L1(l=0.1)", "keras.regularizers.L1(l1=0.1)"),
        ("keras.optimizers.Adam(lr=0.1, epsilon=None)", "keras.optimizers.Adam(learning_rate=0.1)"),
        ("keras.optimizers.SGD(lr=0.1, decay=0.0)", "keras.optimizers.SGD(learning_rate=0.1)"),
        (
            "keras.optimizers.SGD(lr=0.1, decay=1e-6, nesterov=True)",
            "keras.optimizers.SGD(learning_rate=keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1e-6), "
            "nesterov=True)",
        ),
        (
            "keras.optimizers.Adam(rate, decay=rate / epochs)",
            "keras.optimizers.Adam(keras.optimizers.schedules.InverseTimeDecay(rate, 1, rate / epochs))",
        ),
        ("keras.layers.LeakyReLU(alpha=0.2)", "keras.layers.LeakyReLU(negative_slope=0.2)"),
        ("keras.layers.LeakyReLU(0.2)", "keras.layers.LeakyReLU(0.2)"),
        ("keras.layers.Dense(3, dynamic=False)", "keras.layers.Dense(3)"),
        ("keras.layers.Embedding(9, 3, input_length=5)", "keras.layers.Embedding(9, 3)"),
        (
            "keras.layers.Embedding(9, 3, 'uniform', None, None, c)",
            "keras.layers.Embedding(9, 3, 'uniform', None, activity_regularizer=None, embeddings_constraint=c)",
        ),
        ("keras.layers.BatchNormalization(fused=True)", "keras.layers.BatchNormalization()"),
        ("keras.layers.InputLayer(input_shape=(3,))", "keras.layers.InputLayer(shape=(3,))"),
        ("keras.Input((3,), 2, 'x')", "keras.Input((3,), 2, name='x')"),
        ("keras.utils.to_categorical(y=y, num_classes=3)", "keras.utils.to_categorical(x=y, num_classes=3)"),
        ("keras.callbacks.ReduceLROnPlateau(epsilon=1)", "keras.callbacks.ReduceLROnPlateau(min_delta=1)"),
        ("keras.Sequential([], 'net')", "keras.Sequential([], name='net')"),
        ("model.compile('sgd', 'mse', ['mae'])", "model.compile('sgd', 'mse', metrics=['mae'])"),
        ("model.compile('sgd', 'mse')", "model.compile('sgd', 'mse')"),
        ("model.load_weights('w.weights.h5', by_name=False)", "model.load_weights('w.weights.h5')"),
        ("model.train_on_batch(x, y, reset_metrics=True)", "model.train_on_batch(x, y)"),
        ("model.optimizer.apply_gradients(pairs, name='a')", "model.optimizer.apply_gradients(pairs)"),
        ("model.optimizer.apply_gradients(pairs, 'a')", "model.optimizer.apply_gradients(pairs)"),
    ],
)
def test_arguments_of_keras_2(before, after):
    """Renamed, removed, moved: no mark."""
    assert becomes(HEAD + MODEL + before).endswith("\n" + after)
    assert not marks(HEAD + MODEL + before)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "keras.layers.LSTM(3, batch_input_shape=(2, 3, 1))",
            "Put keras.Input(batch_shape=…) before the layer",
        ),
        ("keras.layers.Dense(3, weights=w)", "layer.set_weights(weights)"),
        ("keras.layers.LSTM(3, time_major=True)", "Swap the first two axes"),
        ("keras.optimizers.SGD(decay=1e-6)", "InverseTimeDecay(rate, 1, decay)"),
        (
            "keras.optimizers.SGD(0.1, decay=1e-6)\nkeras.callbacks.ReduceLROnPlateau()",
            "no callback that sets the rate",
        ),
        ("keras.losses.SparseCategoricalCrossentropy(True, 'none')", "Give them by keyword"),
        ("keras.utils.load_img(p, grayscale=True)", 'color_mode="grayscale"'),
    ],
)
def test_arguments_that_need_a_person_are_marked_with_what_to_write(text, says):
    (mark,) = rewritten(HEAD + text).marks
    assert mark.rule == "keras"
    assert says in mark.text


@pytest.mark.parametrize(
    ("base", "before", "after"),
    [
        ("metrics.Metric", "super().__init__(name)", "super().__init__(name=name)"),
        (
            "metrics.Metric",
            "super(C, self).__init__('m', **kwargs)",
            "super(C, self).__init__(name='m', **kwargs)",
        ),
        ("losses.Loss", "super().__init__(None, name)", "super().__init__(reduction=None, name=name)"),
        ("losses.Loss", "super().__init__(name=name)", "super().__init__(name=name)"),
        ("layers.Layer", "super().__init__(True, 'l')", "super().__init__(trainable=True, name='l')"),
        ("layers.Layer", "super().__init__(dynamic=False)", "super().__init__()"),
        ("Model", "super().__init__(name='net')", "super().__init__(name='net')"),
        ("Model", "super().__init__(inputs, outputs)", "super().__init__(inputs, outputs)"),
    ],
)
def test_calls_of_a_base_of_keras(base, before, after):
    text = f"{HEAD}class C(keras.{base}):\n    def __init__(self, name=None, **kwargs):\n        {{}}\n"
    assert becomes(text.format(before)).endswith(after + "\n")
    assert not marks(text.format(before))


def test_decay_is_the_rate_of_keras_2():
    """Keras 2 divided the rate by ``1 + decay * step``."""
    code = becomes(HEAD + "made = keras.optimizers.SGD(lr=0.5, decay=0.1)\n")
    names = {}
    exec(re.sub(r"^os\.environ.*$", "", code, flags=re.M), names)
    value = keras.Variable(1.0)
    for step in range(3):
        before = float(np.asarray(value))
        names["made"].apply([keras.ops.convert_to_tensor(1.0)], [value])
        assert before - float(np.asarray(value)) == pytest.approx(0.5 / (1 + 0.1 * step), rel=1e-5)
