"""``rx.experimental.layouts.for_model``: the layouts of Keras models, and training with them. (Its rules:
``variables/test_layer_layouts.py``; the models of keras_hub: ``peers/test_keras_hub.py``.)"""

import logging
import random

import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close, message
from decoders import LENGTH, TOKENS, WIDTH, decoder, for_model
from replicax.errors import InvalidArgumentError


def mlp():
    """Its layers have the names that Keras gives."""
    layers = [keras.layers.Dense(size, activation="relu") for size in (32, 8, 32, 8)]
    return keras.Sequential([keras.Input((8,)), *layers])


def layouts(layout_map, model):
    return {variable.path: layout_map[variable.path] or () for variable in model.variables}


# --- what it chooses -----------------------------------------------------------------------------------


def test_a_decoder():
    def wanted(path):
        if path.endswith(("query/kernel", "key/kernel", "value/kernel")):
            return ((), ("logical",), ())
        if path.endswith("attention_output/kernel"):
            return (("logical",), (), ())
        if path.endswith(("query/bias", "key/bias", "value/bias", "down/kernel", "embedding/embeddings")):
            return (("logical",), ())
        if path.endswith(("up/kernel", "gate/kernel")):
            return ((), ("logical",))
        return (("logical",),) if path.endswith(("up/bias", "gate/bias")) else ()

    model = decoder(num_blocks=2)
    found = layouts(for_model(model), model)
    assert found == {path: wanted(path) for path in found}
    of_four = layouts(for_model(model, 4), model)
    changed = {path for path in found if found[path] != of_four[path]}
    assert changed == {path for path in found if "key/" in path or "value/" in path}  # two heads


def test_layers_without_names_are_found_in_a_second_model():
    def make():
        ids = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.Embedding(TOKENS, WIDTH)(ids)
        x = keras.layers.MultiHeadAttention(4, 4)(x, x)
        return keras.Model(ids, keras.layers.Dense(TOKENS)(x))

    model, second = make(), make()
    for layout_map in (for_model(make), for_model(model)):
        found, of_second = layouts(layout_map, model), layouts(layout_map, second)
        assert list(found.values()) == list(of_second.values())
        assert sum(map(any, found.values())) == 1 + 7 + 2
        assert found.keys().isdisjoint(of_second)


def test_numbers_that_tell_layers_apart_are_those_of_the_model_that_is_made_next():
    mlp()
    layout_map = for_model(mlp)
    kernels = [layout_map[variable.path] for variable in mlp().variables if variable.path.endswith("kernel")]
    assert kernels == [((), ("logical",)), (("logical",), ())] * 2


def test_layers_of_a_subclass_and_of_a_layer_that_is_no_model():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.up = keras.layers.Dense(32)
            self.down = keras.layers.Dense(8)
            self.table = self.add_weight(shape=(64, 64), name="table")

        def build(self, shape):
            self.up.build(shape)
            self.down.build((*shape[:-1], 32))

    def make():
        block = Block()
        block.build((None, 8))
        return block

    layout_map = for_model(make)
    assert [layout_map[v.path] or () for v in make().variables if "bias" not in v.path] == [
        (),
        ((), ("logical",)),
        (("logical",), ()),
    ]
    assert "Block" in layout_map.replicated[r"block(_\d+)?/table"]


# --- building it costs nothing -------------------------------------------------------------------------


def test_a_model_that_no_memory_could_hold_is_only_described(caplog):
    def huge():
        return keras.Sequential(
            [
                keras.Input((2**17,)),
                keras.layers.Dense(2**21, name="up"),
                keras.layers.Dense(2**17, name="down"),
            ]
        )

    layout_map = for_model(huge, 16)  # 2 TiB
    assert len(layout_map) == 3
    assert not caplog.records
    with keras.StatelessScope():  # at its end Keras makes the values of all variables that await them
        pass


def test_nothing_that_follows_changes():
    def following():
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
        return layer.name, np.asarray(layer.kernel), random.random(), np.random.rand()

    def make():
        keras.utils.set_random_seed(9)
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])

    number = keras.backend.get_uid("dense")
    keras.utils.set_random_seed(1)
    expected = following()
    for_model(make)
    keras.utils.set_random_seed(1)
    for_model(make)
    got = following()
    assert got[0] == f"dense_{number + 1}" != expected[0]
    np.testing.assert_array_equal(got[1], expected[1])
    assert got[2:] == expected[2:]


# --- large variables that stay whole -------------------------------------------------------------------


def test_large_replicated_variables_are_warned_of_and_small_ones_are_not(caplog):
    def odd():
        return keras.Sequential([keras.Input((1024,)), keras.layers.Dense(1023, name="odd")])

    with caplog.at_level(logging.WARNING, "replicax"):
        layout_map = for_model(odd)
        (told,) = [record.getMessage() for record in caplog.records]
        for_model(lambda: decoder(heads=3, key_value_heads=1))
    assert "odd/kernel" in told
    assert "2.00 times" in told
    assert len(caplog.records) == 1
    assert set(layout_map.replicated) == {r"sequential(_\d+)?/odd/kernel", r"sequential(_\d+)?/odd/bias"}


# --- training ------------------------------------------------------------------------------------------


def train(strategy):
    with strategy.scope():
        model = decoder()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss)
    ids = np.random.default_rng(0).integers(0, TOKENS, (13, LENGTH + 1)).astype(np.int32)
    history = model.fit(ids[:, :-1], ids[:, 1:], batch_size=8, shuffle=False, verbose=0)
    return model, history.history["loss"]


@pytest.mark.rest
def test_training_with_the_layouts_equals_one_device_and_takes_little_more_than_an_even_part():
    _, expected = train(rx.MirroredStrategy(["cpu:0"]))
    strategy = rx.MirroredStrategy(devices_per_replica=2, layout_map=for_model(decoder), shard_state="all")
    model, losses = train(strategy)
    assert_close(losses, expected, 1e-5)
    variables = [*model.variables, *model.optimizer.variables]
    held = sum(variable.value.addressable_shards[0].data.nbytes for variable in variables)
    assert held <= 1.06 * sum(variable.value.nbytes for variable in variables) / 8


# --- what is wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "devices", "says"),
    [
        (mlp, 0, ["devices_per_replica", "got 0"]),
        (mlp, 2.0, ["devices_per_replica", "got 2.0"]),
        (mlp, True, ["devices_per_replica"]),
        ({}, 2, ["for_model takes a Keras model", "got {}"]),
        (keras.Sequential, 2, ["for_model takes a Keras model"]),
        (lambda: None, 2, ["returned None"]),
        (lambda size: mlp(), 2, ["without arguments", "'size'", "lambda"]),
        (lambda: keras.Sequential([keras.layers.Dense(2)]), 2, ["no variables yet", "keras.Input"]),
    ],
)
def test_invalid_arguments(model, devices, says):
    message(InvalidArgumentError, lambda: for_model(model, devices), *says)


def test_layers_that_are_not_built_yet_are_warned_of(caplog):
    class HalfBuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.up, self.down = (keras.layers.Dense(8, name=name) for name in ("up", "down"))
            self.up.build((None, 8))

    with caplog.at_level(logging.WARNING, "replicax"):
        for_model(lambda: HalfBuilt())
    (record,) = caplog.records
    assert "down" in record.getMessage()
    assert "up" not in record.getMessage().split(":", 1)[1].split(".")[0]


def test_an_error_in_the_function_leaves_keras_as_it_was():
    def broken():
        keras.layers.Dense(2)
        raise RuntimeError("broken")

    keras.layers.Dense(2)
    with pytest.raises(RuntimeError, match="broken"):
        for_model(broken)
    first = keras.layers.Dense(2).name
    with pytest.raises(RuntimeError, match="broken"):
        for_model(broken)
    number = int(first.rpartition("_")[2])
    layer = keras.layers.Dense(2)
    assert layer.name == f"dense_{number + 1}"
    layer.build((None, 2))
    assert np.asarray(layer.kernel).shape == (2, 2)  # it has a value: no stateless scope is open


def test_replicas_of_one_device_need_no_layouts():
    layout_map = rx.experimental.layouts.for_model(mlp, devices_per_replica=np.int64(1))
    assert len(layout_map) == 0
    assert (
        rx.MirroredStrategy(["cpu:0"], devices_per_replica=1, layout_map=layout_map).num_replicas_in_sync == 1
    )
