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


class Trainer:
    def step(self, w, batch):
        x, y = batch
        error = x @ w - y
        self.last_error = error
        return rx.get_replica_context().all_reduce("sum", (error**2).sum())


trainer = Trainer()

w = strategy.replicate(jnp.zeros((4, 1)))
for batch in batches:
    loss = strategy.run(trainer.step, args=(w, batch))
print("last error", np.abs(trainer.last_error).max())
