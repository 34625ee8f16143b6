"""Variables that are sharded over replicas and over the devices of each replica: the numbers of one device, computed
bytes on each. ``tests/plan/test_two_dimensions.py`` counts what they exchange.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from checks import assert_close, message, tpu_strategy
from in_two_dimensions import (
    BATCH,
    MAP,
    WIDE,
    WIDTH,
    WORDS,
    bytes_of,
    made,
    rows,
    step_of,
    strategy_of,
)
from replicax._src.tracing import gathers
from replicax._src.tracing.equations import equations, equations_in
from replicax.errors import InvalidArgumentError, UnsupportedError


def trained(how, strategy):
    """Trains for an epoch.

    Returns:
      The model, the losses and the values of its variables.
    """
    model = made(strategy)
    if how == "fit":
        losses = model.fit(*rows(), batch_size=BATCH, shuffle=False, verbose=0).history["loss"]
    else:
        step = step_of(model)

        def total(batch):
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        batches = strategy.experimental_distribute_dataset(rx.data.from_arrays(rows()).batch(BATCH))
        if how == "steps":
            of_steps = strategy.run_steps(step, iter(batches), 3)
            losses = np.asarray(strategy.reduce("SUM", of_steps, axis=None)).tolist()
        else:
            losses = list(map(float, map(rx.function(total) if how == "function" else total, batches)))
    return model, losses, [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]


@functools.cache
def on_one_device(how):
    return trained(how, rx.MirroredStrategy(["cpu:0"]))[1:]


def held(variables):
    """The bytes that each device holds of each variable."""
    return [{shard.data.nbytes for shard in v.value.addressable_shards} for v in variables]


LONG, REST = pytest.mark.long, pytest.mark.rest


@pytest.mark.parametrize(
    ("how", "num_logical", "state", "size", "is_late"),
    [
        ("run", 2, "all", None, True),
        ("fit", 2, "all", None, True),
        pytest.param("function", 2, "all", None, True, marks=LONG),
        pytest.param("steps", 2, "all", None, True, marks=LONG),
        pytest.param("run", 2, "all", None, False, marks=LONG),
        pytest.param("fit", 2, "all", None, False, marks=LONG),
        pytest.param("run", 2, "optimizer", None, True, marks=REST),
        pytest.param("fit", 2, "optimizer", None, True, marks=LONG),
        pytest.param("run", 2, "all", 2, True, marks=REST),
        pytest.param("fit", 2, "all", 2, True, marks=LONG),
        pytest.param("run", 4, "all", None, True, marks=REST),  # two logical axes
        pytest.param("fit", 4, "all", None, True, marks=LONG),
        pytest.param("run", 8, "all", None, True, marks=LONG),  # one replica
        pytest.param("fit", 2, None, None, True, marks=LONG),
    ],
)
def test_training_equals_one_device_and_shards_memory(how, num_logical, state, size, is_late, monkeypatch):
    if is_late:
        monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    model, *got = trained(how, strategy_of(num_logical, state, shard_size=size))
    assert_close(got, list(on_one_device("fit" if how == "fit" else "run")), 1e-5, 1e-6)
    num_shards = size or 8 // num_logical
    of_model = bytes_of(num_logical, num_shards if state == "all" else 1)
    of_slots = bytes_of(num_logical, num_shards if state else 1)
    assert held(model.trainable_variables) == [{n} for n in of_model]
    assert held(model.optimizer.variables[2:]) == [{n} for n in of_slots for _ in range(2)]


# --- the collectives ------------------------------------------------------------------------------------------


# --- other state ----------------------------------------------------------------------------------------------


def functional(strategy):
    """A loop of ``run`` with functional state."""
    params = {"up": np.cos(np.arange(256.0)).reshape(8, 32), "down": np.sin(np.arange(256.0)).reshape(32, 8)}
    params = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), params)
    optimizer = optax.adamw(1e-2)
    state = strategy.replicate((params, optimizer.init(params)))

    def step(state, batch):
        (params, moments), (x, y) = state, batch

        def loss_of(params):
            hidden = jnp.tanh(x @ params["up"])
            return rx.nn.compute_average_loss(((hidden @ params["down"] - y) ** 2).mean(-1))

        loss, gradients = rx.value_and_grad(loss_of)(params)
        gradients = rx.get_replica_context().all_reduce("SUM", gradients)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    features = rows()[1]
    batches = strategy.experimental_distribute_dataset(rx.data.from_arrays((features, features)).batch(BATCH))
    losses = []
    for batch in batches:
        state, loss = strategy.run(step, args=(state, batch))
        losses.append(float(strategy.reduce("SUM", loss, axis=None)))
    return losses, jax.tree.map(np.asarray, strategy.unreplicate(state)[0])


def of_nnx(strategy):
    """A loop of ``run`` with an nnx module."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def step(model, batch):
        x, y = batch

        def loss_of(model):
            return rx.nn.compute_average_loss(((model(x) - y) ** 2).mean(-1))

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        gradients = rx.get_replica_context().all_reduce("SUM", gradients)
        state = jax.tree.map(lambda value, of_value: value - 0.1 * of_value, nnx.state(model), gradients)
        nnx.update(model, state)
        return loss

    features = rows()[1]
    batches = strategy.experimental_distribute_dataset(rx.data.from_arrays((features, features)).batch(BATCH))
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, args=(model, batch)), axis=None)) for batch in batches
    ]
    return losses, np.asarray(model.kernel.get_value())


@pytest.mark.parametrize("loop", [functional, of_nnx])
@REST
def test_functional_state_equals_one_device(loop):
    """It is replicated: ``shard_state`` and layout maps shard variables."""
    assert_close(loop(strategy_of()), loop(rx.MirroredStrategy(["cpu:0"])), 1e-5, 1e-6)


def test_variable_split_by_hand_is_also_sharded_over_replicas():
    strategy = rx.MirroredStrategy(devices_per_replica=2, shard_state="all")
    with strategy.scope():
        w = rx.Variable(np.arange(64, dtype=np.float32).reshape(8, 8))
    strategy.experimental_split_to_logical_devices(w, [1, 2])
    strategy.run(lambda: w.assign_add(np.ones((8, 8), np.float32)))
    assert [shard.data.shape for shard in w.value.addressable_shards] == [(2, 4)] * 8
    np.testing.assert_array_equal(w.numpy(), np.arange(64).reshape(8, 8) + 1)
    w.assign(np.zeros((8, 8), np.float32))
    assert [shard.data.shape for shard in w.value.addressable_shards] == [(2, 4)] * 8


@REST
def test_tpu_strategy_shards_in_two_dimensions(monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    model, *got = trained("run", tpu_strategy(4, 2, layout_map=MAP, shard_state="all"))
    assert_close(got, list(on_one_device("run")), 1e-5, 1e-6)
    assert held(model.trainable_variables) == [{n} for n in bytes_of(2, 4)]


@REST
def test_checkpoint_is_restored_on_replicas_of_other_sizes(tmp_path):
    def values(model):
        return [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]

    def losses(model):
        return model.fit(*rows(), batch_size=BATCH, shuffle=False, verbose=0).history["loss"]

    before = trained("fit", strategy_of(2))[0]
    saved = values(before)
    path = rx.Checkpoint(model=before).save(str(tmp_path / "ckpt"))
    after = made(strategy_of(4))
    rx.Checkpoint(model=after).restore(path).assert_consumed()
    for value, other in zip(values(after), saved, strict=True):
        np.testing.assert_array_equal(value, other)
    assert held(after.trainable_variables) == [{n} for n in bytes_of(4, 2)]
    assert_close(losses(after), losses(before), 1e-5, 1e-6)


# --- what is wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"devices_per_replica": 3}, InvalidArgumentError, ["8", "1, 2, 4, 8"]),
        ({"devices_per_replica": 0}, InvalidArgumentError, ["devices_per_replica"]),
        ({"layout_map": {"w": ("logical",)}}, InvalidArgumentError, ["devices_per_replica"]),
        (
            {"devices_per_replica": 2, "layout_map": {"w": ("model",)}},
            InvalidArgumentError,
            ["'model'", "'logical'"],
        ),
        (
            {"devices_per_replica": 2, "cross_device_ops": rx.ReductionToOneDevice()},
            UnsupportedError,
            ["ReductionToOneDevice"],
        ),
    ],
)
@pytest.mark.quick
def test_wrong_arguments(options, error, says):
    message(error, lambda: rx.MirroredStrategy(**options), *says)


@pytest.mark.quick
def test_layouts_that_do_not_fit_a_variable():
    layouts = {"w": (None, "logical"), "^v": ("logical",), "a$": (None, "logical")}
    strategy = rx.MirroredStrategy(devices_per_replica=2, layout_map=layouts, shard_state="all")
    with strategy.scope():
        message(InvalidArgumentError, lambda: rx.Variable(np.ones((4, 7)), name="w"), "'w'", "7", "8 long")
        message(InvalidArgumentError, lambda: rx.Variable(np.ones((4, 8)), name="via"), "'^v'", "'a$'")


def test_programs_need_shardy():
    strategy = rx.MirroredStrategy(devices_per_replica=2)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        message(UnsupportedError, lambda: strategy.run(lambda: jnp.ones(())), "jax_use_shardy_partitioner")
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.rest
@pytest.mark.parametrize("prints", [False, True])
def test_uneven_batches_have_no_branches(prints, monkeypatch):
    """The compiler may move an exchange of all devices into a branch, which some replicas never take."""
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    strategy = strategy_of()
    with strategy.scope():
        up = rx.Variable(np.full((WIDTH, WIDE), 0.1, np.float32), name="up/kernel")
        down = rx.Variable(np.full((WIDE, WIDTH), 0.1, np.float32), name="down/kernel")
        rx.Variable(np.zeros(WIDE, np.float32), name="up/bias")
        rx.Variable(np.zeros((WORDS, WIDTH), np.float32), name="tokens/embeddings")

    def step(x):
        total = jnp.sum(jnp.tanh(x @ up.value) @ down.value)
        if prints:
            jax.debug.print("{total}", total=total)
        return total

    x = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones((2 if context.replica_id_in_sync_group == 0 else 1, WIDTH), np.float32)
    )
    totals = strategy.experimental_local_results(strategy.run(step, args=(x,)))
    assert_close(totals[0], 2 * totals[1], 1e-5)
    launcher = strategy.runner.last_launcher
    traced = launcher.compiled.trace(*launcher.described([x.stored])).jaxpr
    branches = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "cond"]  # prints are in some
    assert not [
        eqn for eqn in branches for inner in equations_in(eqn) if inner.primitive.name == "dot_general"
    ]


def test_indexing_under_a_condition_of_each_replica():
    """A pass marks what the compiler would do wrong on shards. Such a mark may stand under a condition that differs."""
    strategy = rx.MirroredStrategy(devices_per_replica=2, shard_state="all")
    with strategy.scope():
        table = rx.Variable(np.ones((8, 8), np.float32))

    def step(ids):
        def rows(table):
            return jnp.sum(table[ids])

        return jax.lax.cond(ids[0] > 1, lambda t: jnp.sum(jax.grad(rows)(t)), lambda t: 0.0, table.value)

    ids = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(5, context.replica_id_in_sync_group, np.int32)
    )
    results = strategy.experimental_local_results(strategy.run(step, args=(ids,)))
    assert list(map(float, results)) == [0.0, 0.0, 40.0, 40.0]
