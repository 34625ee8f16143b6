"""A plan makes no array of the model's size: neither the model's variables, nor an optimizer's, nor copies of them."""

import gc

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._plan import planning

LONG, REST = pytest.mark.long, pytest.mark.rest
WIDTH, HIDDEN, ROWS = 512, 1024, 8
LARGE = WIDTH * HIDDEN * 4
X, Y = np.zeros((ROWS, WIDTH), np.float32), np.zeros((ROWS, 4), np.float32)


def device_bytes():
    """The bytes of the live arrays on each device; arrays that share a buffer count once."""
    shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards]
    sizes = {(s.device.id, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}
    return {d: sum(n for (of, _), n in sizes.items() if of == d) for d in {d for d, _ in sizes}}


@pytest.fixture
def growth(monkeypatch):
    """Returns a function that calls another, and returns how much any device held more, while it planned or after it."""
    compiled_for, held = planning.compiled_for, []

    def observed(*args):
        held.append(device_bytes())
        return compiled_for(*args)

    monkeypatch.setattr(planning, "compiled_for", observed)

    def measured(call):
        gc.collect()
        before = device_bytes()
        held.clear()
        call()
        held.append(device_bytes())
        assert len(held) > 1
        return max(after[device] - before.get(device, 0) for after in held for device in after)

    return measured


def strategy_of(shard_state):
    return rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state=shard_state)


def model_of(strategy, *, is_built):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        inputs = [keras.Input((WIDTH,))] if is_built else []
        model = keras.Sequential([*inputs, keras.layers.Dense(HIDDEN, "relu"), keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2), "mse")
    return model


METHODS = {"fit": (X, Y), "train_on_batch": (X, Y), "evaluate": (X, Y), "predict": (X,)}


@pytest.mark.parametrize(("method", "shard_state", "is_built"), [
    ("fit", None, True),
    *(pytest.param(method, state, is_built, marks=LONG if state == "optimizer" and method != "fit" else REST)
      for method in METHODS for state in (None, "optimizer", "all") for is_built in (True, False)
      if (method, state, is_built) != ("fit", None, True) and (is_built or not method.endswith("batch"))),
])  # fmt: skip
def test_a_plan_of_a_keras_method_allocates_nothing_large(method, shard_state, is_built, growth):
    strategy = strategy_of(shard_state)
    model = model_of(strategy, is_built=is_built)
    assert growth(lambda: strategy.plan(getattr(model, method), METHODS[method])) < LARGE / 8


@pytest.mark.parametrize("method", ["fit", pytest.param("evaluate", marks=REST)])
def test_a_plan_leaves_every_variable_as_it_was(method):
    """At the end of ``fit`` an optimizer with ``use_ema`` overwrites the model, and at its start metrics are reset."""
    strategy = strategy_of(None)
    model = model_of(strategy, is_built=True)
    model.fit(X + 1, Y + 1, verbose=0)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [np.array(v.value) for v in variables]
    strategy.plan(getattr(model, method), METHODS[method])
    for variable, old in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, old, err_msg=variable.path)


def test_fit_after_a_plan_gives_the_numbers_without_a_plan_where_the_strategy_keeps_them():
    random = np.random.default_rng(0)
    x, y = (random.normal(size=array.shape).astype(np.float32) for array in (X, Y))
    results = []
    for is_planned in (True, False):
        strategy = strategy_of("all")
        model = model_of(strategy, is_built=True)
        if is_planned:
            strategy.plan(model.fit, (x, y))
        model.fit(x, y, epochs=2, verbose=0)
        variables = [*model.variables, *model.optimizer.variables]
        results.append([(np.asarray(v.value), v.value.sharding.spec) for v in variables])
    for (planned, layout), (other, expected) in zip(*results, strict=True):
        np.testing.assert_allclose(planned, other, rtol=1e-5, atol=1e-6)
        assert layout == expected


@REST
def test_values_that_a_plan_left_out_are_there_when_they_are_read_saved_or_restored(tmp_path):
    strategy = strategy_of(None)
    model, other = model_of(strategy, is_built=True), model_of(strategy, is_built=True)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.variables[-1].assign(np.full(model.optimizer.variables[-1].shape, 3.0, np.float32))
    saved = rx.Checkpoint(optimizer=model.optimizer).save(tmp_path / "c")
    strategy.plan(other.fit, (X, Y))
    assert float(jnp.sum(other.optimizer.variables[-1].value)) == 0
    rx.Checkpoint(optimizer=other.optimizer).save(tmp_path / "of_planned")
    rx.Checkpoint(optimizer=other.optimizer).restore(saved)
    assert np.asarray(other.optimizer.variables[-1].value).min() == 3.0
    assert np.isfinite(other.fit(X, Y, verbose=0).history["loss"][0])


@pytest.mark.parametrize("shard_state", [None, pytest.param("all", marks=REST)])
@pytest.mark.parametrize("is_built", [True, pytest.param(False, marks=REST)])
def test_a_plan_of_a_loop_allocates_nothing_large(shard_state, is_built, growth):
    strategy = strategy_of(shard_state)
    with strategy.scope():
        dense, optimizer = keras.layers.Dense(HIDDEN), keras.optimizers.Adam()
        table = rx.Variable(np.zeros((WIDTH, HIDDEN), np.float32))
        if is_built:
            dense.build((None, WIDTH))

    def step(x):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(jnp.sum((dense(x) + x @ table) ** 2, axis=1))
        variables = dense.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    x = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    assert growth(lambda: strategy.plan(step, (x,))) < LARGE / 8


@REST
def test_a_plan_of_state_and_of_nnx_modules_allocates_nothing_large(growth):
    from flax import nnx

    strategy = strategy_of(None)
    state = strategy.replicate({"w": np.zeros((WIDTH, HIDDEN), np.float32)})
    module = nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    assert growth(lambda: strategy.plan(lambda s, x: x @ s["w"], (state, x))) < LARGE / 8
    assert growth(lambda: strategy.plan(lambda m, x: m(x), (module, x))) < LARGE / 8
