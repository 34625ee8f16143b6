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


def dropout_step(key, batch):
    x, _ = batch
    return jax.random.bernoulli(key, 0.5, x.shape[:1])


key = jax.random.key(0)
for batch in batches:
    key, step_key = jax.random.split(key)
    print(strategy.run(dropout_step, args=(step_key, batch)))
    break
