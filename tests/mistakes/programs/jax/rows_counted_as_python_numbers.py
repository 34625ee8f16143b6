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


def count_step(batch):
    x, _ = batch
    return x.shape[0]


total = 0
for batch in batches:
    counts = strategy.run(count_step, args=(batch,))
    total += strategy.reduce("sum", counts, axis=None)
print("rows", total)
