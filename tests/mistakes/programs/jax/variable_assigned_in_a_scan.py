import jax
import jax.numpy as jnp
import numpy as np
import replicax as rx

rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 4)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
batches = strategy.experimental_distribute_dataset(rx.data.from_arrays((x, y)).batch(16))

with strategy.scope():
    total = rx.Variable(0.0)


def step(batch):
    x, _ = batch

    def add(carry, row):
        total.assign_add(row.sum())
        return carry, None

    jax.lax.scan(add, None, x)


for batch in batches:
    strategy.run(step, args=(batch,))
print(total)
