"""Names in checkpoints follow the structure, so Keras's counters do not matter."""

import json

import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax.checkpoint import UntrackableError


def keys_of(path):
    with open(f"{path}/manifest.json") as file:
        return sorted(json.load(file)["contents"]["arrays"])


def small_model():
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
        ]
    )


def test_layers_by_position_and_weights_by_attribute(saved):
    model = small_model()
    path = saved(model=model, step=rx.Variable(0, trainable=False))
    assert keys_of(path) == [
        "model/layers/0/bias",
        "model/layers/0/kernel",
        "model/layers/1/beta",
        "model/layers/1/gamma",
        "model/layers/1/moving_mean",
        "model/layers/1/moving_variance",
        "model/layers/2/seed_generator/state",
        "step",
    ]


class Classifier(keras.Model):
    """A subclass with layers in attributes, lists and dicts, one of them twice, and a variable of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = [keras.layers.Dense(4), keras.layers.Dense(4)]
        self.heads = {"a/b": keras.layers.Dense(1), "a.b": keras.layers.Dense(1)}
        self.first = self.blocks[0]
        self.scale = self.add_weight(name="s", shape=(), initializer="ones")

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.scale * (self.heads["a/b"](x) + self.heads["a.b"](x))


def test_subclasses_by_attributes_each_once(saved):
    model = Classifier()
    model(np.zeros((1, 4), "float32"))
    path = saved(model=model)
    keys = keys_of(path)
    assert len(keys) == len(model.variables) == 9
    assert {
        "model/scale",
        "model/blocks/1/kernel",
        "model/heads/a%2Fb/bias",
        "model/heads/a%2Eb/bias",
    } <= set(keys)

    other = Classifier()
    other(np.ones((1, 4), "float32"))
    rx.Checkpoint(model=other).restore(path).assert_consumed()
    for mine, saved_one in zip(other.variables, model.variables, strict=True):
        np.testing.assert_array_equal(mine, saved_one)


LAYERS = {
    "dense": (lambda: keras.layers.Dense(3), (4,)),
    "lstm": (lambda: keras.layers.Bidirectional(keras.layers.LSTM(3, dropout=0.1)), (5, 4)),
    "stacked": (lambda: keras.layers.RNN([keras.layers.GRUCell(3), keras.layers.LSTMCell(2)]), (5, 4)),
    "attention": (lambda: keras.layers.MultiHeadAttention(2, 2), None),
    "spectral": (lambda: keras.layers.SpectralNormalization(keras.layers.Dense(3)), (4,)),
    "separable": (lambda: keras.layers.SeparableConv1D(3, 2), (5, 4)),
    "distributed": (lambda: keras.layers.TimeDistributed(keras.layers.Dense(3)), (5, 4)),
    "normalization": (lambda: keras.layers.Normalization(), (4,)),
    "augmentation": (lambda: keras.layers.RandomFlip(), (8, 8, 3)),
}


def built(name):
    make, shape = LAYERS[name]
    layer = make()
    if name == "attention":
        layer.build((None, 5, 4), (None, 5, 4))
    else:
        layer.build((None, *shape))
    return layer


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_everything_that_a_layer_has_comes_back(name, saved):
    layer = built(name)
    for number, variable in enumerate(layer.variables):
        variable.assign(np.full(variable.shape, number + 1, variable.dtype))
    path = saved(layer=layer)
    assert len(keys_of(path)) == len(layer.variables) > 0
    other = built(name)
    rx.Checkpoint(layer=other).restore(path).assert_consumed()
    for mine, wanted in zip(other.variables, layer.variables, strict=True):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("make", [keras.optimizers.Adam, keras.optimizers.Adafactor, keras.optimizers.Lamb])
def test_an_optimizer_saves_its_own_variables_only(make, saved):
    model = small_model()
    optimizer = make(0.1, use_ema=True)
    optimizer.build(model.trainable_variables)
    path = saved(optimizer=optimizer)
    assert len(keys_of(path)) == len(optimizer.variables)
    scaled = keras.optimizers.LossScaleOptimizer(make(0.1))
    scaled.build(model.trainable_variables)
    assert len(keys_of(saved(optimizer=scaled))) == len(scaled.variables)


def test_a_compiled_model_has_its_optimizer_and_not_the_metrics_of_its_loop(saved):
    model = small_model()
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
    keys = keys_of(saved(model=model))
    assert [key for key in keys if "momentums" in key]
    assert not [key for key in keys if "metric" in key or "loss" in key]
    with_metrics = keys_of(saved(model=model, metrics=model.metrics))
    assert len(with_metrics) == len(keys) + len(model.metrics_variables)


def test_names_with_separators(saved):
    objects = {name: rx.Variable(float(n)) for n, name in enumerate(["..", "zarr.json", "", "a/b", "ä b"])}
    nested = rx.Checkpoint(b=rx.Variable(7.0))
    path = saved(**objects, a=nested)
    for variable in (*objects.values(), nested.b):
        variable.assign(-1.0)
    rx.Checkpoint(**objects, a=nested).restore(path).assert_consumed()
    assert [float(variable) for variable in (*objects.values(), nested.b)] == [0.0, 1.0, 2.0, 3.0, 4.0, 7.0]


def test_checkpoints_that_contain_each_other(saved):
    inner = rx.Checkpoint(v=rx.Variable(1.0))
    inner.outer = outer = rx.Checkpoint(inner=inner)
    path = saved(outer=outer)
    inner.v.assign(0.0)
    rx.Checkpoint(outer=outer).restore(path).assert_consumed()
    assert float(inner.v) == 1.0


def test_object_tracked_twice_is_found_by_either_name(saved):
    model = small_model()
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    path = saved(model=model, optimizer=model.optimizer)
    assert "optimizer/iterations" in keys_of(path)
    model.optimizer.iterations.assign(7)
    rx.Checkpoint(model=model).restore(path).assert_consumed()
    assert int(model.optimizer.iterations) == 0


def test_unsavable_object_raises_when_the_checkpoint_is_made():
    message(UntrackableError, lambda: rx.Checkpoint(f=print), "f=", "builtin_function", "get_state()")
    message(UntrackableError, lambda: rx.Checkpoint(state={"a": [object()]}), "state/a/0=", "object")
