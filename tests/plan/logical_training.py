"""The model in the tests of plans for replicas of several devices: a wide layer and a narrow one, split as in
Megatron."""

import collections

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import replicax as rx
from checks import tpu_strategy
from replicax._plan.hlo import read_hlo

ROWS, WIDTH, WIDE = 8, 256, 512  # whose halves are whole tiles on TPUs
F32 = 4
LAYOUTS = {"up": (None, "logical"), "down": ("logical",), "kernel": (None, "logical")}


class Training:
    """A step over R replicas of L devices, which split ``up``, ``down``, and a momentum that was split by hand."""

    def __init__(self, num_replicas=2, num_logical_devices=2):
        self.strategy = tpu_strategy(num_replicas, num_logical_devices, layout_map=LAYOUTS)
        with self.strategy.scope():
            self.up = rx.Variable(np.ones((WIDTH, WIDE), np.float32), name="up")
            self.down = rx.Variable(np.ones((WIDE, WIDTH), np.float32), name="down")
            self.by_hand = rx.Variable(np.zeros((WIDE, WIDTH), np.float32), name="by hand")
        self.model()  # the variables of the layout map's "kernel"
        split = self.strategy.experimental_split_to_logical_devices
        split(self.by_hand, [1, num_logical_devices])

        def step(x):
            with rx.GradientTape() as tape:
                hidden = split(jnp.tanh(x @ self.up), [1, num_logical_devices])
                loss = rx.nn.compute_average_loss(jnp.sum((hidden @ self.down) ** 2, axis=1))
            gradients = tape.gradient(loss, [self.up, self.down])
            gradients = rx.get_replica_context().all_reduce("sum", gradients)
            self.up.assign_sub(0.1 * gradients[0])
            self.by_hand.assign(0.9 * self.by_hand + gradients[1])
            self.down.assign_sub(0.1 * self.by_hand)
            return loss

        self.step = step
        self.described = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)

    @property
    def state_bytes(self):
        """Bytes of one device."""
        return 3 * WIDTH * WIDE * F32 // self.strategy.num_logical_devices

    def model(self):
        with self.strategy.scope():
            layers = [keras.layers.Dense(WIDE, name="dense"), keras.layers.Dense(WIDTH, name="dense_1")]
            model = keras.Sequential([keras.Input((WIDTH,)), *layers], name="sequential")
            model.compile(keras.optimizers.Adam(), "mse")
        return model


def two_dimensions(devices=None):
    """Returns a strategy of replicas of two devices that shards its state over them too, a step, and its arguments.

    The step requests what ``collectives_by_hand`` writes down.
    """
    strategy = rx.MirroredStrategy(
        devices,
        devices_per_replica=2,
        layout_map={"up": (None, "logical"), "down": ("logical",)},
        shard_state="all",
    )
    with strategy.scope():
        up = rx.Variable(np.ones((WIDTH, WIDE), np.float32), name="up")
        down = rx.Variable(np.ones((WIDE, WIDTH), np.float32), name="down")

    def step(x, y):
        with rx.GradientTape() as tape:
            errors = jnp.tanh(x @ up.value) @ down.value - y
            loss = rx.nn.compute_average_loss((errors**2).sum(-1))
        gradients = tape.gradient(loss, [up, down])
        gradients, loss = rx.get_replica_context().all_reduce("SUM", (gradients, loss))
        up.assign_sub(0.1 * gradients[0])
        down.assign_sub(0.1 * gradients[1])
        return loss

    return strategy, step, [jax.ShapeDtypeStruct((4, WIDTH), np.float32)] * 2


def collectives_by_hand(devices):
    """Returns the collectives of the step of ``two_dimensions`` with every exchange written down, as compiled.

    Args:
      devices: [replicas, 2]; they may be descriptions.
    """
    num_replicas = len(devices)
    mesh = Mesh(devices, ("replica", "logical"))
    up_spec, down_spec = P("replica", "logical"), P("logical", "replica")

    def summed(gradient, dim):
        if devices[0, 0].platform != "cpu":
            return jax.lax.psum_scatter(gradient, "replica", scatter_dimension=dim, tiled=True)
        size = gradient.shape[dim] // num_replicas
        total = jax.lax.psum(gradient, "replica")
        return jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index("replica") * size, size, dim)

    def step(up_shard, down_shard, x, y):
        up = jax.lax.all_gather(up_shard, "replica", axis=0, tiled=True)
        down = jax.lax.all_gather(down_shard, "replica", axis=1, tiled=True)
        hidden = jnp.tanh(x @ up)
        errors = jax.lax.psum(hidden @ down, "logical") - y
        of_outputs = 2 * errors / (len(x) * num_replicas)
        of_hidden = (of_outputs @ down.T) * (1 - hidden**2)
        of_up, of_down = summed(x.T @ of_hidden, 0), summed(hidden.T @ of_outputs, 1)
        return up_shard - 0.1 * of_up, down_shard - 0.1 * of_down, jax.lax.psum(jnp.sum(errors**2), "replica")

    specs = up_spec, down_spec, P("replica"), P("replica")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(up_spec, down_spec, P()), check_vma=False
    )
    shapes = (WIDTH, WIDE), (WIDE, WIDTH), (4 * num_replicas, WIDTH), (4 * num_replicas, WIDTH)
    args = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs)
    ]
    text = jax.jit(mapped).lower(*args).compile().as_text()
    return read_hlo(text, devices.size, devices.size, dict(mesh.shape)).collectives


def exchanged(collectives):
    """The bytes of results by kind and axes."""
    total = collections.Counter()
    for one in collectives:
        total[one.kind, one.axes] += one.bytes * one.count
    return dict(total)
