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


def loss_fn(w, batch):
    x, y = batch
    return rx.nn.compute_average_loss((x @ w - y)[:, 0] ** 2)


def total_loss(w, batch):
    losses = strategy.run(loss_fn, args=(w, batch))
    return strategy.reduce("sum", losses, axis=None)


w = jnp.zeros((4, 1))
for batch in batches:
    w = w - 0.1 * jax.grad(total_loss)(w, batch)
print("w", w)
