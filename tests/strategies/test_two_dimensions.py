"""Variables that are sharded over replicas and over the devices of each replica: the numbers of one device, computed
bytes on each, and the collectives of a program written by hand.
"""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from checks import assert_close, message, tpu_strategy
from logical_training import collectives_by_hand, exchanged, two_dimensions
from replicax._src.plan.hlo import read_hlo
from replicax._src.tracing import gathers
from replicax._src.tracing.equations import equations, equations_in
from replicax.errors import InvalidArgumentError, UnsupportedError

ROWS, BATCH, WIDTH, WIDE, WORDS = 61, 24, 8, 32, 16  # batches of 24, 24 and 13 rows
MAP = {
    r"tokens/embeddings": ("logical", None),
    r"up/kernel": (None, "logical"),
    r"up/bias": ("logical",),
    r"down/kernel": ("logical",),
}
OF_MODEL = [WORDS * WIDTH, WIDTH, WIDTH, WIDTH * WIDE, WIDE, WIDE * WIDTH, WIDTH]  # numbers in each variable
DIVIDED = [True, False, False, True, True, True, False]  # over logical devices


def strategy_of(devices_per_replica=2, state="all", **options):
    return rx.MirroredStrategy(
        devices_per_replica=devices_per_replica, layout_map=MAP, shard_state=state, **options
    )


def network():
    inputs = keras.Input((3,), dtype="int32")
    h = keras.layers.Embedding(WORDS, WIDTH, name="tokens")(inputs)
    u = keras.layers.Dense(WIDE, "gelu", name="up")(keras.layers.LayerNormalization()(h))
    return keras.Model(inputs, (h + keras.layers.Dense(WIDTH, name="down")(u))[:, 0])


def made(strategy):
    """The model and its optimizer."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.AdamW(1e-2, global_clipnorm=0.5), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def rows():
    random = np.random.default_rng(0)
    return random.integers(0, WORDS, (ROWS, 3)), random.normal(size=(ROWS, WIDTH)).astype(np.float32)


def step_of(model):
    def step(batch):
        inputs, wanted = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(((model(inputs) - wanted) ** 2).mean(-1))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


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


def bytes_of(num_logical, num_shards):
    """The bytes of one device for each variable of the model: a share of every dim that is long enough."""
    fits = [
        n % (num_logical * num_shards if divided else num_shards) == 0
        for n, divided in zip(OF_MODEL, DIVIDED)
    ]
    return [
        4 * n // (num_logical if divided else 1) // (num_shards if fit else 1)
        for n, divided, fit in zip(OF_MODEL, DIVIDED, fits)
    ]


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
        pytest.param("steps", 2, "all", None, True, marks=REST),
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


@pytest.mark.parametrize("num_logical", [2, pytest.param(4, marks=LONG)])
@pytest.mark.parametrize("how", ["run", "fit"])
def test_only_shards_are_exchanged_over_replicas(how, num_logical, monkeypatch):
    """A gather over replicas that stands next to the compiler's axes would move all shards of a replica, and first
    gather them over its logical devices. The numbers would be the same.
    """
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    strategy = strategy_of(num_logical)
    model = made(strategy)
    if how == "fit":
        plan = strategy.plan(model.fit, rows(), {"batch_size": BATCH}, topology="cpu:8")
    else:
        described = jax.ShapeDtypeStruct((6, 3), "int32"), jax.ShapeDtypeStruct((6, WIDTH), "float32")
        plan = strategy.plan(step_of(model), (described,), topology="cpu:8")
    logical = tuple(strategy.topology.mesh.axis_names[1:])
    got = exchanged(plan.compiled)
    assert {kind for kind, _ in got} == {"all-gather", "all-reduce"}
    assert {axes for kind, axes in got if kind == "all-gather"} == {("replica",)}
    of_replica = bytes_of(num_logical, 1)
    times = (
        2 if how == "fit" else 1
    )  # forward and backward; XLA on CPU merges the gathers of one replica's program
    of_gathers = got["all-gather", ("replica",)]
    assert sum(of_replica) <= of_gathers <= times * sum(of_replica)
    rest = got["all-reduce", ("replica",)] - sum(
        of_replica
    )  # gradients, and a few sums of the loss and the norm
    assert 0 <= rest <= 64
    assert set(got) <= {
        ("all-gather", ("replica",)),
        ("all-reduce", ("replica",)),
        ("all-reduce", logical),
        ("all-reduce", ("replica", *logical)),
    }
    assert plan.memory.arguments == sum(array.device_bytes for array in plan.arrays)
    of_variables = [a.device_bytes for a in plan.arrays if a.role == "variable" and "optimizer" not in a.name]
    assert sum(of_variables) >= 3 * sum(bytes_of(num_logical, 8 // num_logical))
    text = str(plan)
    assert "over shard and dim 1 over logical" in text or num_logical == 4
    assert "over replica" in text


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("num_replicas", [4, 2])
def test_collectives_are_those_of_a_program_by_hand(num_replicas, is_late, monkeypatch):
    if is_late:
        monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    strategy, step, described = two_dimensions(2 * num_replicas)
    text = strategy.lower(step, described).compile().as_text()
    mesh = dict(strategy.topology.mesh.shape)
    devices = np.array(jax.devices()[: 2 * num_replicas]).reshape(num_replicas, 2)
    assert exchanged(read_hlo(text, 8, 8, mesh).collectives) == exchanged(collectives_by_hand(devices))


def test_collectives_of_split_values_move_shards():
    """Of values that ``experimental_split_to_logical_devices`` has split, and of variables."""
    strategy = rx.MirroredStrategy(devices_per_replica=2, layout_map={"w": (None, "logical")})
    split = strategy.experimental_split_to_logical_devices
    with strategy.scope():
        w = rx.Variable(np.arange(64, dtype=np.float32).reshape(4, 16), name="w")

    def step(x):
        x = split(x, [1, 2])
        gathered = rx.get_replica_context().all_gather(x, axis=0)
        exchanged = jax.lax.all_to_all(x, "replica", 0, 0, tiled=True)
        scattered = jax.lax.psum_scatter(x, "replica", scatter_dimension=0)
        of_variable = jax.lax.all_gather(w.value, "replica")
        results = split(gathered, [1, 2]), split(exchanged, [1, 2]), split(scattered, [2])
        return *results, split(of_variable, [1, 1, 2])

    def of_replica(value_context):
        return np.arange(64, dtype=np.float32).reshape(4, 16) + 100 * value_context.replica_id_in_sync_group

    x = strategy.experimental_distribute_values_from_function(of_replica)
    whole = np.concatenate([np.asarray(each) for each in strategy.experimental_local_results(x)])
    results = [strategy.experimental_local_results(each) for each in strategy.run(step, args=(x,))]
    np.testing.assert_array_equal(results[0][0], whole)
    np.testing.assert_array_equal(results[1][1], whole[1::4])
    np.testing.assert_array_equal(results[2][2], whole.reshape(4, 4, 16).sum(0)[2])
    np.testing.assert_array_equal(results[3][3], np.broadcast_to(w.numpy(), (4, 4, 16)))
    text = strategy.lower(step, (x,)).compile().as_text()
    got = exchanged_by(read_hlo(text, 8, 8, dict(strategy.topology.mesh.shape)).collectives, "replica")
    of_shard = 4 * 16 * 4 // 2
    assert got == {"all-gather": 2 * 4 * of_shard, "all-to-all": of_shard, "reduce-scatter": of_shard}


def exchanged_by(collectives, axis):
    return {kind: size for (kind, axes), size in exchanged(collectives).items() if axes == (axis,)}


def scanned(ups, downs, x):
    def layer(h, weights):
        return h + jnp.tanh(h @ weights[0]) @ weights[1], None

    return jax.lax.scan(jax.checkpoint(layer), x, (ups, downs))[0]


def unrolled(ups, downs, x):
    for i in range(len(ups)):
        x = x + jnp.tanh(x @ ups[i]) @ downs[i]
    return x


@pytest.mark.parametrize(("function", "num_gathers"), [(scanned, 12), (unrolled, None)])
@REST
def test_stacked_layers_gather_shards_of_one_layer_at_a_time(function, num_gathers, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    layouts = {"up": (None, None, "logical"), "down": (None, "logical")}

    def results(strategy):
        random = np.random.default_rng(1)
        values = [random.normal(size=shape).astype(np.float32) / 4 for shape in ((3, 8, 16), (3, 16, 8))]
        with strategy.scope():
            variables = [rx.Variable(value, name=name) for value, name in zip(values, ("up", "down"))]

        def step(x):
            with rx.GradientTape() as tape:
                outputs = function(variables[0].value, variables[1].value, x)
                loss = rx.nn.compute_average_loss((outputs**2).sum(-1))
            gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, variables))
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(0.01 * gradient)
            return loss

        batches = strategy.experimental_distribute_dataset(rx.data.from_arrays(rows()[1][:22]).batch(11))
        losses = [float(strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)) for x in batches]
        return step, [losses, [variable.numpy() for variable in variables]]

    strategy = rx.MirroredStrategy(devices_per_replica=2, layout_map=layouts, shard_state="all")
    step, got = results(strategy)
    assert_close(got, results(rx.MirroredStrategy(["cpu:0"]))[1], 1e-5, 1e-6)
    described = (jax.ShapeDtypeStruct((4, WIDTH), np.float32),)
    text = strategy.lower(step, described).compile().as_text()
    collectives = read_hlo(text, 8, 8, dict(strategy.topology.mesh.shape)).collectives
    found = [c for c in collectives if c.kind == "all-gather"]
    of_layer = 4 * 8 * 16 // 2  # what the logical device computes with
    assert {(c.axes, c.bytes) for c in found} == {(("replica",), of_layer)}
    assert num_gathers in (None, sum(c.count for c in found))  # of three layers, forward and backward
    of_gradients = 2 * 3 * of_layer
    assert exchanged_by(collectives, "replica")["all-reduce"] == of_gradients


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
