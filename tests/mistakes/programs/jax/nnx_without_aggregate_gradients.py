import jax
import jax.numpy as jnp
import numpy as np
import optax
import replicax as rx
from flax import nnx

rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 4)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
batches = strategy.experimental_distribute_dataset(rx.data.from_arrays((x, y)).batch(16))

model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def loss_fn(model, batch):
    x, y = batch
    return rx.nn.compute_average_loss((model(x) - y)[:, 0] ** 2)


def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


for batch in batches:
    loss = strategy.run(train_step, args=(model, optimizer, batch))
print("kernel", np.asarray(model.kernel[...]).ravel())
