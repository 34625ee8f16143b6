import jax
import jax.numpy as jnp
import numpy as np
import optax
import replicax as rx

rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 4)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
batches = strategy.experimental_distribute_dataset(rx.data.from_arrays((x, y)).batch(16))

tx = optax.chain(rx.optax.aggregate_gradients(), optax.sgd(0.1))


def loss_fn(w, batch):
    x, y = batch
    return rx.nn.compute_average_loss((x @ w - y)[:, 0] ** 2)


def train_step(w, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(w, batch)
    grads = rx.get_replica_context().all_reduce("sum", grads)
    updates, opt_state = tx.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state, loss


w = strategy.replicate(jnp.zeros((4, 1)))
opt_state = strategy.replicate(tx.init(jnp.zeros((4, 1))))
for batch in batches:
    w, opt_state, loss = strategy.run(train_step, args=(w, opt_state, batch))
print("w", np.asarray(strategy.unreplicate(w)).ravel())
