"""What steps exchange whose state is sharded over replicas and over the devices of each: what a program by hand does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from checks import assert_close
from in_two_dimensions import (
    BATCH,
    WIDTH,
    bytes_of,
    made,
    rows,
    step_of,
    strategy_of,
)
from logical_training import collectives_by_hand, exchanged, two_dimensions
from replicax._plan.hlo import read_hlo
from replicax._src.tracing import gathers

LONG, REST = pytest.mark.long, pytest.mark.rest


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
