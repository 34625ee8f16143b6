"""Compares a step in bfloat16 with the same step written by hand with ``shard_map``: its numbers, and on GPUs the
time."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax as rx

pytestmark = pytest.mark.rest

ROWS, WIDTH, RATE, STEPS = 96, 64, 0.1, 10
TIMED_STEPS = 50


def initial():
    rng = np.random.default_rng(0)
    shapes = [(WIDTH, WIDTH), (WIDTH,), (WIDTH, 1)]
    return [jnp.asarray(0.1 * rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def batch(num_replicas):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS * num_replicas, WIDTH))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(x[:, :1], jnp.bfloat16)


def squares(weights, x, y):
    kernel, bias, last = weights
    return (((jax.nn.relu(x @ kernel + bias) @ last) - y) ** 2)[:, 0]


def by_hand(devices):
    """Returns a function that runs a step and returns its loss, and one that returns the weights."""
    mesh = Mesh(devices, ("replica",))
    whole, rows = PartitionSpec(), PartitionSpec("replica")
    num_rows = ROWS * len(devices)

    def step(weights, x, y):
        loss, gradients = jax.value_and_grad(lambda w: jnp.sum(squares(w, x, y)) / num_rows)(weights)
        loss, gradients = jax.lax.psum((loss, gradients), "replica")
        return [w - jnp.asarray(RATE, w.dtype) * g for w, g in zip(weights, gradients)], loss

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(whole, rows, rows), out_specs=whole, check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=0)
    state = jax.device_put(initial(), NamedSharding(mesh, whole))
    x, y = jax.device_put(batch(len(devices)), NamedSharding(mesh, rows))

    def run():
        nonlocal state
        state, loss = jitted(state, x, y)
        return loss

    return run, lambda: state


def with_replicax(devices):
    strategy = rx.MirroredStrategy(devices)
    with strategy.scope():
        weights = [rx.Variable(value) for value in initial()]

    def step(x, y):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(squares([w.value for w in weights], x, y))
        gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        for weight, gradient in zip(weights, gradients):
            weight.assign_sub(jnp.asarray(RATE, weight.dtype) * gradient)
        return rx.get_replica_context().all_reduce("SUM", loss)

    (rows,) = strategy.experimental_distribute_dataset([batch(len(devices))])

    def run():
        return strategy.experimental_local_results(strategy.run(step, args=rows))[0]

    return run, lambda: [weight.value for weight in weights]


def median_ms(run):
    jax.block_until_ready(run())
    times = []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def test_a_step_in_bfloat16_equals_the_one_written_by_hand(names, platform):
    devices = [jax.local_devices(backend=platform)[index] for index in range(len(names))]
    (hand, hand_state), (ours, our_state) = by_hand(devices), with_replicax(devices)
    losses = [(float(hand()), float(ours())) for _ in range(STEPS)]
    expected, got = zip(*losses)
    assert expected[-1] < expected[0] / 2
    # Sums of a step may be added in another order: two numbers of 8 bits apart.
    np.testing.assert_allclose(got, expected, rtol=2**-6)
    for value, wanted in zip(our_state(), hand_state(), strict=True):
        assert value.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(value, "float32"), np.asarray(wanted, "float32"), rtol=2**-6, atol=2**-8
        )
    if platform == "gpu":
        print(
            f"a step in bfloat16 on {len(devices)} GPU(s): replicax {median_ms(ours):.3f} ms, by hand {median_ms(hand):.3f} ms"
        )
