"""The model in the tests of plans for replicas of several devices: a wide layer and a narrow one, split as in
Megatron."""

import jax
import jax.numpy as jnp
import keras
import numpy as np

import replicax as rx
from checks import tpu_strategy

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
