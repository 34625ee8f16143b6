"""Plans for replicas of several TPUs or GPUs: groups, layouts of variables, memory. Nothing ran on any device."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from logical_training import (
    F32,
    ROWS,
    WIDE,
    WIDTH,
    Training,
    collectives_by_hand,
    exchanged,
    two_dimensions,
)
from replicax._src.devices.ahead_of_time import topology_ahead
from replicax._src.devices.hardware import hardware_of


@pytest.fixture(scope="module")
def training():
    return Training()


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:4x4", "v5p:2x2x2", "h100:1x2", "h100:2x8"])
def test_a_step_of_replicas_of_two(training, topology):
    found = training.strategy.plan(training.step, args=(training.described,), topology=topology)
    num_replicas = hardware_of(topology).num_devices // 2
    assert found.fits
    assert (found.num_replicas, found.num_logical_devices) == (num_replicas, 2)
    assert found.memory.arguments == training.state_bytes + ROWS * WIDTH * F32
    assert found.memory.donated == training.state_bytes
    exchanged = {(c.kind, c.axes, c.group_size) for c in found.compiled}
    assert ("all-reduce", ("logical",), 2) in exchanged
    if num_replicas > 1:
        assert any(axes == ("replica",) and size == num_replicas for _, axes, size in exchanged)
    assert {axes for _, axes, _ in exchanged} <= {("logical",), ("replica",)}
    assert {a.name: a.split for a in found.arrays}["up"] == (None, "logical")
    assert not any("hosts" in note for note in found.notes)


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:1x8"])
def test_sharded_state_gathers_only_shards_over_replicas(topology):
    """Of the two sharded kernels a device needs the half of its logical device."""
    layouts = {"up": (None, "logical"), "down": ("logical",)}
    strategy = rx.MirroredStrategy(devices_per_replica=2, layout_map=layouts, shard_state="all")
    with strategy.scope():
        up = rx.Variable(np.ones((WIDTH, WIDE), np.float32), name="up")
        down = rx.Variable(np.ones((WIDE, WIDTH), np.float32), name="down")

    def step(x):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(jnp.sum((jnp.tanh(x @ up.value) @ down.value) ** 2, axis=1))
        gradients = rx.get_replica_context().all_reduce("sum", tape.gradient(loss, [up, down]))
        up.assign_sub(0.1 * gradients[0])
        down.assign_sub(0.1 * gradients[1])
        return loss

    x = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    found = strategy.plan(step, args=(x,), topology=topology)
    of_kernels = 2 * WIDTH * WIDE * F32
    assert found.memory.arguments == of_kernels // 8 + ROWS * WIDTH * F32
    gathered = [c for c in found.compiled if c.kind == "all-gather"]
    assert {c.axes for c in gathered} == {("replica",)}
    # The TPU's compiler casts to what its matrix unit multiplies, bfloat16, before it gathers.
    least = of_kernels // (4 if topology.startswith("v5e") else 2)
    assert sum(c.bytes * c.count for c in gathered) in (least, 2 * least)  # once, or twice for "down"


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:1x8"])
def test_collectives_of_two_dimensions_are_those_of_a_program_by_hand(topology):
    strategy, step, described = two_dimensions()
    hardware = hardware_of(topology)
    devices = topology_ahead(hardware, 2).mesh.devices.reshape(-1, 2)
    found = strategy.plan(step, args=tuple(described), topology=topology)
    assert exchanged(found.compiled) == exchanged(collectives_by_hand(devices))


def test_replica_over_several_hosts_raises():
    training = Training(1, 8)
    found = training.strategy.plan(training.step, args=(training.described,), topology="v5p:2x2x4")
    assert any("devices of 2 hosts" in note for note in found.notes)


class Block(keras.layers.Layer):
    """Four products, each with an activation."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), name="kernel")

    def call(self, x):
        for _ in range(4):
            x = keras.ops.tanh(x @ keras.ops.cast(self.kernel, self.compute_dtype))
        return x


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_remat_scope_in_fit_needs_less_memory(policy):
    """On TPUs. XLA for several GPUs needs as much as without it for unrolled layers, in a program of JAX alone too."""
    rows, needed = 4096, []
    described = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    for mode in (None, "full"):
        strategy = rx.MirroredStrategy(
            devices_per_replica=2, layout_map={"block": (None, "logical")}, shard_state="all"
        )
        with strategy.scope(), keras.RematScope(mode=mode):
            blocks = [Block(dtype=policy) for _ in range(4)]
            model = keras.Sequential([keras.Input((WIDTH,)), *blocks])
            model.compile("sgd", "mse")
        fit = {"batch_size": rows, "verbose": 0}
        plan = strategy.plan(model.fit, (described, described), fit, topology="v5e:2x4", global_batch=rows)
        needed.append(plan.memory.peak)
    # Without it, 4 activations of each of 4 blocks are kept; with it, 1 of each block and 4 of one.
    activation = rows // plan.num_replicas * WIDTH * (F32 if policy == "float32" else 2)
    assert needed[0] - needed[1] > 8 * activation, needed
