"""The statements about Keras 3 in ``keras_dropped.toml`` are true of the installed Keras."""

import functools
import inspect

import keras
import pytest

from migrated import marks
from replicax._src.migrate.keras_dropped import dropped_by_keras

DROPPED = dropped_by_keras()
MISSING = object()


def at(path):
    return functools.reduce(lambda found, name: getattr(found, name, MISSING), path.split("."), keras)


def parameters_of(function):
    return inspect.signature(function).parameters


@pytest.mark.parametrize("name", [*DROPPED["names"], *DROPPED["private"]])
def test_keras_has_no_such_name(name):
    assert at(name) is MISSING


def test_private_names_of_keras_2_are_marked():
    text = "from tensorflow.python.keras.utils import losses_utils\nx = losses_utils.ReductionV2.AUTO\n"
    assert [rule for rule, _ in marks(text)] == ["keras"]


ARGUMENTS = {**DROPPED["arguments"], **{k: v for k, v in DROPPED["removed"].items() if "." in k[1:]}}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_keras_names_no_such_argument(name):
    assert not set(ARGUMENTS[name]) & set(parameters_of(at(name)))


@pytest.mark.parametrize("name", DROPPED["positional"])
def test_positional_arguments_are_those_of_a_function_of_keras(name):
    places = [p for p in parameters_of(at(name)).values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert len(places) > DROPPED["positional"][name]


METHODS = {**DROPPED["methods"], **{k[1:]: v for k, v in DROPPED["removed"].items() if k.startswith(".")}}


@pytest.mark.parametrize("method", METHODS)
def test_keras_names_no_such_argument_of_a_method(method):
    owners = [keras.Model, keras.layers.Layer, keras.optimizers.Optimizer]
    found = [parameters_of(getattr(owner, method)) for owner in owners if hasattr(owner, method)]
    assert found
    for parameters in found:
        assert not set(METHODS[method]) & set(parameters)


def test_removed_arguments_are_rejected_by_keras():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="workers"):
        model.fit([[1.0]], [[1.0]], workers=2)
    with pytest.raises(ValueError, match="jit_compile"):
        keras.optimizers.SGD(jit_compile=True)
