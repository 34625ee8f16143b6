"""Layout maps of strategies whose replicas have several devices: the numbers of one device, and less memory on each."""

import functools
import logging

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close, message, tpu_strategy
from replicax.errors import InvalidArgumentError

pytestmark = pytest.mark.rest

STEPS, WIDTH, HEADS = 6, 8, 4
BATCHES = {"run": 12, "function": 13, "fit": 13}  # over 4 replicas; of 13 rows one has 4
MEGATRON = {
    r"(query|key|value)/kernel": (None, "logical", None),
    r"(query|key|value)/bias": ("logical", None),
    r"attention_output/kernel": ("logical", None, None),
    r"up/kernel": (None, "logical"),
    r"up/bias": ("logical",),
    r"down/kernel": ("logical",),
    r"^scale$": (None, "logical"),
}
IS_DIVIDED = ("query/", "key/", "value/", "attention_output/kernel", "up/", "down/kernel", "scale")


def block():
    """A transformer's."""
    inputs = keras.Input((STEPS, WIDTH))
    h = keras.layers.LayerNormalization()(inputs)
    h = inputs + keras.layers.MultiHeadAttention(HEADS, 2, name="attention")(h, h)
    u = keras.layers.Dense(32, activation="gelu", name="up")(h)
    h = h + keras.layers.Dense(WIDTH, name="down")(u)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(h[:, 0]))


def trained(how, strategy, optimizer=None):
    """Trains with two batches.

    Returns:
      The variables; their first values; then the losses and the last values.
    """
    random, size = np.random.default_rng(0), BATCHES[how]
    rows = random.normal(size=(2 * size, STEPS, WIDTH)).astype(np.float32)
    labels = random.integers(0, 3, 2 * size)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = block()
        optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
        scale = rx.Variable(np.cos(np.arange(24, dtype=np.float32)).reshape(3, 8), name="scale")
        optimizer.build(model.trainable_variables)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    variables = [*model.variables, *optimizer.variables, scale]
    first = [np.asarray(v.value) for v in variables]

    def step(batch):
        inputs, wanted = batch
        with rx.GradientTape() as tape:
            logits = model(inputs, training=True) * jnp.mean(scale**2)
            loss = rx.nn.compute_average_loss(loss_fn(wanted, logits))
        *of_model, of_scale = tape.gradient(loss, [*model.trainable_variables, scale])
        optimizer.apply(of_model, model.trainable_variables)
        scale.assign_sub(0.1 * rx.get_replica_context().all_reduce("SUM", of_scale))
        return loss

    def total(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    if how == "fit":
        with strategy.scope():
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses = model.fit(rows, labels, batch_size=size, shuffle=False, verbose=0).history["loss"]
    else:
        call = rx.function(total) if how == "function" else total
        batches = strategy.experimental_distribute_dataset(rx.data.from_arrays((rows, labels)).batch(size))
        losses = [float(call(batch)) for batch in batches]
    return variables, first, [losses, [np.asarray(v.value) for v in variables]]


@functools.cache
def on_one_device(how):
    return trained(how, rx.MirroredStrategy(["cpu:0"]))[1:]


def held(variable):
    return [shard.data.nbytes for shard in variable.value.addressable_shards]


@pytest.mark.parametrize("how", ["run", "fit", pytest.param("function", marks=pytest.mark.long)])
@pytest.mark.parametrize("num_logical", [2, pytest.param(4, marks=pytest.mark.long)])
def test_training_equals_one_device_and_shards_memory(how, num_logical, caplog):
    strategy = tpu_strategy(8 // num_logical, num_logical, layout_map=MEGATRON)
    with caplog.at_level(logging.WARNING, "replicax"):
        variables, first, got = trained(how, strategy)
    assert not caplog.records
    first_of_one, expected = on_one_device(how)
    for value, other in zip(first, first_of_one, strict=True):
        np.testing.assert_array_equal(value, other)
    assert_close(got, expected, 1e-5, 1e-6)
    for variable in variables:
        path = variable.path.replace("_kernel", "/kernel").replace("_bias", "/bias")  # of the optimizer's
        is_sharded = any(part in path for part in IS_DIVIDED)
        assert held(variable) == [variable.value.nbytes // (num_logical if is_sharded else 1)] * 8, path


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword"
)  # of Keras, where it saves
def test_variables_are_sharded_from_the_start_and_after_every_assignment(tmp_path):
    strategy = tpu_strategy(2, 2, layout_map={"kernel|^w$": (None, "logical")})
    with strategy.scope():
        layer = keras.layers.Dense(6)
        layer.build((None, 4))
        w = rx.Variable(np.arange(8.0, dtype=np.float32).reshape(2, 4), name="w")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="other")])
    assert held(layer.kernel) == [4 * 3 * 4] * 4
    assert held(w) == [2 * 2 * 4] * 4
    np.testing.assert_array_equal(w.numpy(), np.arange(8).reshape(2, 4))
    w.assign(np.ones((2, 4), np.float32))
    layer.kernel.assign(np.ones((4, 6), np.float32))
    model.save_weights(tmp_path / "a.weights.h5")
    model.load_weights(tmp_path / "a.weights.h5")
    assert held(w) == [2 * 2 * 4] * 4
    assert held(layer.kernel) == [4 * 3 * 4] * 4
    assert held(model.trainable_variables[0]) == [4 * 1 * 4] * 4
    assert [part.shape for part in w.values] == [(2, 4)] * 2
    strategy.experimental_replicate_to_logical_devices(w)
    strategy.run(lambda: w.assign_add(np.ones((2, 4), np.float32)))
    assert held(w) == [2 * 4 * 4] * 4


def test_one_logical_device_takes_any_map():
    strategy = tpu_strategy(2, 1, layout_map={"w": ("logical",)})
    with strategy.scope():
        w = rx.Variable(np.ones(3, np.float32), name="w")
    assert held(w) == [12] * 2


@pytest.mark.quick
def test_several_axes():
    strategy = tpu_strategy(
        2, 4, layout_map={"a": ("logical_0", "logical_1"), "b": ("logical_1",), "c": (None, "logical")}
    )
    with strategy.scope():
        a, b, c = (rx.Variable(np.ones((8, 8), np.float32), name=name) for name in "abc")
    assert [v.value.addressable_shards[0].data.shape for v in (a, b, c)] == [(4, 4), (4, 8), (8, 2)]


# --- optimizers ----------------------------------------------------------------------------------------


def test_optimizer_slots_follow_a_variable_split_by_hand():
    strategy = tpu_strategy(2, 2)
    with strategy.scope():
        kernel = keras.Variable(np.ones((8, 6), np.float32), name="kernel")
        before = keras.optimizers.Adam(0.1, use_ema=True, gradient_accumulation_steps=2)
        before.build([kernel])
    strategy.experimental_split_to_logical_devices(kernel, [1, 2])
    with strategy.scope():
        after = keras.optimizers.Adafactor(0.1)
        after.build([kernel])
    kept = [v for v in before.variables if v.shape == kernel.shape]
    assert len(kept) == 4  # two moments, the average, what is accumulated
    assert [held(v) for v in [kernel, *kept]] == [[8 * 3 * 4] * 4] * 5

    def step(optimizer):
        with rx.GradientTape() as tape:
            loss = jnp.sum(kernel.value**2)
        optimizer.apply(tape.gradient(loss, [kernel]), [kernel])

    for optimizer in (before, after):
        strategy.run(step, args=(optimizer,))
    kept += [v for v in after.variables if v.shape == kernel.shape]
    assert [held(v) for v in [kernel, *kept]] == [[8 * 3 * 4] * 4] * (1 + len(kept))
    strategy = tpu_strategy(2, 2)
    with strategy.scope():
        other = keras.Variable(np.ones((8, 6), np.float32))
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        sgd.build([other])
    strategy.experimental_split_to_logical_devices(other, [2, 1])
    strategy.experimental_replicate_to_logical_devices(other)
    assert {tuple(held(v)) for v in [other, *sgd.variables] if v.shape == other.shape} == {(8 * 6 * 4,) * 4}


@pytest.mark.long
@pytest.mark.parametrize("name", ["Adafactor", "AdamW", "Lamb", "Lion", "Muon", "Nadam"])
def test_optimizers(name):
    def optimizer():
        return getattr(keras.optimizers, name)(1e-3, global_clipnorm=0.5)

    expected = trained("run", rx.MirroredStrategy(["cpu:0"]), optimizer())[2]
    got = trained("run", tpu_strategy(4, 2, layout_map=MEGATRON), optimizer())[2]
    assert_close(got[0], expected[0], 1e-5)


# --- what is wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ((None, "model"), ["'w'", "names the axis 'model'", "2 logical device(s)", "'logical'"]),
        ((None, "logical_0"), ["'logical_0'"]),
        (("replica",), ["'replica'", "shard_state"]),
        (("logical", "logical"), ["several dims"]),
    ],
)
@pytest.mark.quick
def test_unknown_axes(layout, says):
    message(InvalidArgumentError, lambda: tpu_strategy(2, 2, layout_map={"w": layout}), *says)


def test_axes_that_share_devices():
    message(
        InvalidArgumentError,
        lambda: tpu_strategy(2, 4, layout_map={"w": ("logical", "logical_1")}),
        "by an axis twice",
    )
    message(InvalidArgumentError, lambda: tpu_strategy(2, 2, layout_map=[("w", None)]), "layout_map must be")


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (
            (None, "logical"),
            ["'model/w' of shape (4, 7)", "'w$'", "dim 1, 7 long", "its 2 logical devices", "8 long"],
        ),
        ((None, None, "logical"), ["(4, 7)", "for 3 dims, but the variable has 2"]),
    ],
)
@pytest.mark.parametrize("make", [rx.Variable, keras.Variable])
@pytest.mark.quick
def test_layouts_that_do_not_fit_a_variable(make, layout, says):
    strategy = tpu_strategy(2, 2, layout_map={"w$": layout})
    with strategy.scope(), keras.name_scope("model"):
        name = "w" if make is keras.Variable else "model/w"
        message(InvalidArgumentError, lambda: make(np.ones((4, 7), np.float32), name=name), *says)


@pytest.mark.quick
def test_a_pattern_that_matches_no_variable_is_an_error_before_the_first_step():
    strategy = tpu_strategy(2, 2, layout_map={"kernels": ("logical",), "w": ("logical",), "dense/": ()})
    with strategy.scope():
        w = rx.Variable(np.ones(4, np.float32), name="w")
        rx.Variable(np.ones(4, np.float32), name="kernel")
        steps = rx.Variable(0, trainable=False, name="steps")
    for set_to in (lambda: steps.assign_add(1), lambda: w.assign(np.ones(4, np.float32))):
        for call in (lambda fn=set_to: strategy.run(fn), rx.function(set_to)):
            call()  # what is trained may come yet

    def step():
        with rx.GradientTape() as tape:
            loss = jnp.sum(-w)
        w.assign_sub(tape.gradient(loss, w))

    for train in (lambda: strategy.run(step), rx.function(lambda: strategy.run(step))):
        text = message(InvalidArgumentError, train, "'kernels'", "'dense/'")
        assert "'kernels': the closest paths are 'kernel', " in text
    np.testing.assert_array_equal(w, np.ones(4))
    with strategy.scope():
        rx.Variable(np.ones(4, np.float32), name="kernels")
        rx.Variable(np.ones(4, np.float32), name="dense/bias")
    strategy.run(step)
    np.testing.assert_array_equal(w, 2 * np.ones(4))


def model_with_map(layout_map):
    strategy = tpu_strategy(2, 2, layout_map=layout_map)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Dense(4, "relu", name="up"), keras.layers.Dense(1, name="down")], name="m"
        )
        model.compile("adam", "mse")
    return model


BATCH = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("feature.*kernel", "kernel'"), ("up_kernel_momentum", "an optimizer slot")],
)
def test_fit_does_not_start_with_a_pattern_that_matches_no_variable(pattern, says):
    """Named as DTensor's notebook for Keras names variables. The pattern was ignored, and each device held all
    variables."""
    model = model_with_map({"up/kernel": (None, "logical"), pattern: (None, "logical")})
    message(InvalidArgumentError, lambda: model.fit(*BATCH, verbose=0), repr(pattern), says)
    assert int(model.optimizer.iterations) == 0


def test_predict_with_an_unmatched_pattern_warns_once_and_fit_still_fails(caplog):
    """A model for the pattern may be made later."""
    model = model_with_map({"encoder/kernel": (None, "logical")})
    with caplog.at_level(logging.WARNING, "replicax"):
        for _ in range(2):
            model.predict(BATCH[0], verbose=0)
        (told,) = [record.getMessage() for record in caplog.records]
        message(InvalidArgumentError, lambda: model.fit(*BATCH, verbose=0), "encoder/kernel")
    assert "'encoder/kernel': the closest paths are" in told
