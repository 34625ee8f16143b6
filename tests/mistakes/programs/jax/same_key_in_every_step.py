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

key = jax.random.key(0)


def noisy_step(w, batch):
    noise = jax.random.normal(key, w.shape)
    return w + 0.1 * noise


w = strategy.replicate(jnp.zeros(3))
for batch in batches:
    new_w = strategy.run(noisy_step, args=(w, batch))
    print("noise", np.asarray(strategy.unreplicate(new_w)))
