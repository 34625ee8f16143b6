"""Functional JAX without Keras: a pytree of parameters, optax, and a strategy that runs the step.

State goes into ``strategy.run`` and comes back out of it. Nothing is a variable, and nothing is global.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

rx.config.set_local_devices(2)  # two virtual CPU devices; has no effect on accelerators

NUM_ROWS, NUM_FEATURES, BATCH_SIZE, NUM_EPOCHS = 1_001, 4, 64, 15
optimizer = optax.adam(1e-2)


def make_data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in a cube; the target is the sine of a sum."""
    rows = np.random.default_rng(seed).uniform(-1, 1, (NUM_ROWS, NUM_FEATURES)).astype(np.float32)
    return rows, np.sin(rows.sum(axis=1)).astype(np.float32)


def make_parameters(seed: int) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (NUM_FEATURES, 64)) / np.sqrt(NUM_FEATURES),
        "b1": jnp.zeros(64),
        "w2": jax.random.normal(second, (64, 1)) / 8,
        "b2": jnp.zeros(1),
    }


def predict(parameters, rows):
    hidden = jnp.tanh(rows @ parameters["w1"] + parameters["b1"])
    return (hidden @ parameters["w2"] + parameters["b2"])[:, 0]


def step(state, batch):
    """One step of one replica: it takes its rows of the batch, and returns the new state and each row's
    squared error."""
    parameters, optimizer_state = state
    rows, targets = batch

    def loss_of(parameters):
        errors = (predict(parameters, rows) - targets) ** 2
        return rx.nn.compute_average_loss(
            errors
        ), errors  # the sum of errors, over the true global batch size

    (_, errors), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
    gradients = rx.get_replica_context().all_reduce("sum", gradients)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
    return (optax.apply_updates(parameters, updates), optimizer_state), errors


def main() -> None:
    strategy = rx.MirroredStrategy()
    print(f"{strategy.num_replicas_in_sync} replicas of {strategy}")
    dataset = rx.data.from_arrays(make_data(seed=0)).shuffle(seed=0).batch(BATCH_SIZE)
    batches = strategy.experimental_distribute_dataset(dataset)

    parameters = make_parameters(seed=0)
    state = strategy.replicate((parameters, optimizer.init(parameters)))
    donate = rx.RunOptions(donate_args=(0,))  # the memory of the old state is used for the new one

    for epoch in range(1, NUM_EPOCHS + 1):
        total = 0.0
        for batch in batches:  # the last one has 41 rows: 21 for one replica, 20 for the other
            state, errors = strategy.run(step, args=(state, batch), options=donate)
            total += strategy.reduce("sum", errors, axis=0)
        print(f"epoch {epoch:2}: mean squared error {total / NUM_ROWS:.5f}")

    # The gradients were reduced, so the data flow proves that the new state is the same on all replicas.
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, rx.DistributedValues))
    print(f"{sum(leaf.is_equal for leaf in leaves)} of {len(leaves)} arrays of the state are proven the same")

    parameters, _ = strategy.unreplicate(state)
    rows, targets = make_data(seed=1)
    error = jnp.mean((predict(parameters, rows) - targets) ** 2)
    print(f"mean squared error on new data: {error:.5f}")


if __name__ == "__main__":
    main()
