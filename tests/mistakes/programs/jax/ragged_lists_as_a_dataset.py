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

sentences = np.array([[4, 8], [15], [16, 23, 42], [7]], dtype=object)
batches = strategy.experimental_distribute_dataset(rx.data.from_arrays(sentences).batch(2))


for batch in batches:
    print(strategy.run(lambda ids: ids.shape[0], args=(batch,)))
