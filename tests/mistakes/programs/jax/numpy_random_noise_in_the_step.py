import jax
import jax.numpy as jnp
import numpy as np
import replicax as rx

rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()
np.random.seed(0)

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 4)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
batches = strategy.experimental_distribute_dataset(rx.data.from_arrays((x, y)).batch(16))


def loss_fn(w, batch):
    x, y = batch
    return rx.nn.compute_average_loss((x @ w - y)[:, 0] ** 2)


def train_step(w, batch):
    w = w + 0.01 * np.random.normal(size=w.shape)
    loss, grads = jax.value_and_grad(loss_fn)(w, batch)
    grads = rx.get_replica_context().all_reduce("sum", grads)
    return w - 0.1 * grads, loss


w = strategy.replicate(jnp.zeros((4, 1)))
for batch in batches:
    w, loss = strategy.run(train_step, args=(w, batch))
print("w", np.asarray(strategy.unreplicate(w)).ravel())
