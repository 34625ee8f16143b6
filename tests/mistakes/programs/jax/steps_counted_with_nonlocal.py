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


def train():
    num_steps = 0
    w = strategy.replicate(jnp.zeros((4, 1)))

    def train_step(w, batch):
        nonlocal num_steps
        num_steps += 1
        x, y = batch
        grads = jax.grad(lambda w: rx.nn.compute_average_loss((x @ w - y)[:, 0] ** 2))(w)
        grads = rx.get_replica_context().all_reduce("sum", grads)
        return w - 0.1 / num_steps * grads

    for _ in range(2):
        for batch in batches:
            w = strategy.run(train_step, args=(w, batch))
    print("steps", num_steps)


train()
