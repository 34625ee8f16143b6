"""optax under strategies: gradients are summed by ``aggregate_gradients`` at the head of a chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

X = np.random.default_rng(0).normal(size=(12, 3)).astype("f")
Y = (X @ np.array([1.0, -2.0, 0.5], "f")).astype("f")


def train(strategy, make_optimizer, reduce_first=False, steps=3):
    optimizer = make_optimizer()
    params = {"w": np.zeros(3, "f"), "b": np.zeros((), "f")}
    state = strategy.replicate({"params": params, "optimizer": optimizer.init(params)})

    def step(state, batch):
        def loss(params):
            x, y = batch
            return jnp.sum((x @ params["w"] + params["b"] - y) ** 2) / 12

        gradients = jax.grad(loss)(state["params"])
        if reduce_first:
            gradients = rx.get_replica_context().all_reduce("sum", gradients)
        updates, inner = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": inner}

    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays((X, Y)).batch(12))
    (batch,) = list(dataset)
    for _ in range(steps):
        state = strategy.run(step, (state, batch))
    return strategy.unreplicate(state)["params"]


def aggregated():
    return optax.chain(
        rx.optax.aggregate_gradients(), optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.01)
    )


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("reduce_first", [False, True])
def test_the_same_parameters_as_one_device(num_replicas, reduce_first):
    one = train(rx.OneDeviceStrategy("cpu:0"), aggregated)
    several = train(rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]), aggregated, reduce_first)
    np.testing.assert_allclose(several["w"], one["w"], rtol=1e-5)  # sums in another order
    np.testing.assert_allclose(several["b"], one["b"], rtol=1e-5)


def test_forgotten_aggregation_is_detected():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(rx.errors.PerReplicaUseError):
        train(strategy, lambda: optax.sgd(0.1))


def test_outside_run_it_changes_nothing():
    optimizer = rx.optax.aggregate_gradients()
    gradients = {"w": np.ones(2, "f")}
    updates, _ = optimizer.update(gradients, optimizer.init(gradients))
    assert updates is gradients
