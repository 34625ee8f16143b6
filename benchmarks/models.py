"""The same training step twice: through ``strategy.run``, and by hand with ``jit(shard_map)``; both use Adam
as Keras computes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx

LEARNING_RATE, BETA_1, BETA_2, EPSILON = 1e-3, 0.9, 0.999, 1e-7


def data(sizes: Sequence[int], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """One batch: features [rows, sizes[0]] and labels [rows]."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(rows, sizes[0])).astype(np.float32)
    return features, rng.integers(0, sizes[-1], rows).astype(np.int32)


def through_run(strategy: rx.Strategy, sizes: Sequence[int], rows: int) -> Callable[[int], None]:
    """A Keras model and optimizer in ``strategy.run``."""
    step = keras_step(strategy, sizes, rows)
    batch = distributed_batch(strategy, sizes, rows)

    def run(steps: int) -> None:
        loss = None
        for _ in range(steps):
            loss = strategy.run(step, args=(batch,))
        jax.block_until_ready(strategy.experimental_local_results(loss))

    return run


def keras_step(strategy: rx.Strategy, sizes: Sequence[int], rows: int) -> Callable[[Any], Any]:
    """A replica function: one training step of a Keras model and optimizer, returning the loss."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(n, activation="relu") for n in sizes[1:-1]]
        model = keras.Sequential([keras.Input((sizes[0],)), *hidden, keras.layers.Dense(sizes[-1])])
        optimizer = keras.optimizers.Adam(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(batch: Any) -> Any:
        features, labels = batch
        with rx.GradientTape() as tape:
            per_example = loss_object(labels, model(features, training=True))
            loss = rx.nn.compute_average_loss(per_example, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def distributed_batch(strategy: rx.Strategy, sizes: Sequence[int], rows: int) -> Any:
    """The batch on the strategy's devices."""
    dataset = rx.data.from_arrays(data(sizes, rows)).batch(rows)
    return next(iter(strategy.experimental_distribute_dataset(dataset)))


def by_hand(strategy: rx.Strategy, sizes: Sequence[int], rows: int) -> Callable[[int], None]:
    """The same computation with ``jax.jit(jax.shard_map(...))`` over the same devices, with donated state."""
    mesh = strategy.topology.mesh
    state = jax.device_put(initial_state(sizes), NamedSharding(mesh, PartitionSpec()))
    batch = jax.device_put(data(sizes, rows), NamedSharding(mesh, PartitionSpec("replica")))
    step = hand_written_step(mesh, rows)

    def run(steps: int) -> None:
        nonlocal state
        loss = None
        for _ in range(steps):
            state, loss = step(state, batch)
        jax.block_until_ready(loss)

    return run


def initial_state(sizes: Sequence[int]) -> dict[str, Any]:
    """Parameters, and the state of Adam."""
    rng = np.random.default_rng(0)
    params = []
    for n, m in itertools.pairwise(sizes):
        params += [rng.normal(size=(n, m), scale=0.05).astype(np.float32), np.zeros(m, np.float32)]
    zeros = [np.zeros_like(p) for p in params]
    rate = np.float32(LEARNING_RATE)
    return {"params": params, "m": zeros, "v": [z.copy() for z in zeros], "count": np.int32(0), "rate": rate}


def hand_written_step(mesh: Any, rows: int, *, is_packed: bool = False) -> Callable[..., Any]:
    """One compiled step; with ``is_packed`` the gradients are summed in one buffer."""

    def loss_of(params: Sequence[Any], batch: Any) -> Any:
        x, labels = batch
        for weights, bias in zip(params[0:-2:2], params[1:-2:2], strict=True):
            x = jax.nn.relu(x @ weights + bias)
        logits = x @ params[-2] + params[-1]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -jnp.sum(picked) / rows

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        if is_packed:
            buffer, unpack = jax.flatten_util.ravel_pytree(gradients)
            gradients = unpack(jax.lax.psum(buffer, "replica"))
        else:
            gradients = jax.lax.psum(gradients, "replica")
        count = state["count"] + 1
        time = count.astype(jnp.float32)
        rate = state["rate"] * jnp.sqrt(1 - BETA_2**time) / (1 - BETA_1**time)
        m = [a + (g - a) * (1 - BETA_1) for a, g in zip(state["m"], gradients, strict=True)]
        v = [a + (g * g - a) * (1 - BETA_2) for a, g in zip(state["v"], gradients, strict=True)]
        params = [
            p - rate * a / (jnp.sqrt(b) + EPSILON) for p, a, b in zip(state["params"], m, v, strict=True)
        ]
        return {"params": params, "m": m, "v": v, "count": count, "rate": state["rate"]}, loss[None]

    whole, row = PartitionSpec(), PartitionSpec("replica")
    placed = jax.shard_map(step, mesh=mesh, in_specs=(whole, row), out_specs=(whole, row), check_vma=False)
    return jax.jit(placed, donate_argnums=0)
