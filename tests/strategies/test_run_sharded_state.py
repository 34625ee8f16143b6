"""Loops that call ``run`` with sharded state: the numbers of one device, and less memory on each."""

import functools
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close, message
from replicax._src.tracing import gathers

ROWS = 61
CPUS = [f"cpu:{i}" for i in range(8)]


def trained(how, strategy):
    """Trains with batches of 24, 24 and 13 rows: 4 replicas have 4, 3, 3 and 3 rows of the last.

    Returns:
      The variables, the losses and the values.
    """
    random = np.random.default_rng(0)
    features = random.normal(size=(ROWS, 12)).astype(np.float32)
    targets = random.normal(size=(ROWS, 1)).astype(np.float32)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(24, "tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=0.5)
        scale = rx.Variable(np.ones((8, 4), np.float32))

    def step(batch):
        inputs, wanted = batch
        with rx.GradientTape() as tape:
            errors = (model(inputs) * scale.value.mean() - wanted)[:, 0] ** 2
            loss = rx.nn.compute_average_loss(errors)
        *of_model, of_scale = tape.gradient(loss, [*model.trainable_variables, scale])
        optimizer.apply(of_model, model.trainable_variables)
        scale.assign_sub(0.1 * rx.get_replica_context().all_reduce("SUM", of_scale))
        return loss

    def total(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    call = rx.function(total) if how == "function" else total
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays((features, targets)).batch(24))
    if how == "steps":
        of_steps = strategy.reduce("SUM", strategy.run_steps(step, iter(dataset), 3), axis=None)
        losses = np.asarray(of_steps).tolist()
    else:
        losses = [float(call(batch)) for batch in dataset]
    variables = [*model.variables, *optimizer.variables, scale]
    return variables, losses, [np.asarray(v.value) for v in variables]


@functools.cache
def on_one_device():
    return trained("run", rx.MirroredStrategy(CPUS[:1]))[1:]


@pytest.mark.parametrize(
    "how",
    [
        "run",
        pytest.param("steps", marks=pytest.mark.rest),
        pytest.param("function", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("state", "size", "least_bytes"),
    [
        pytest.param("optimizer", 4, 1, marks=pytest.mark.long),
        pytest.param("all", 4, 1, marks=pytest.mark.long),
        pytest.param("all", 2, gathers.LEAST_GATHERED_BYTES, marks=pytest.mark.long),
        ("all", 2, 1),
    ],
)
def test_training_equals_one_device_and_shards_memory(how, state, size, least_bytes, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", least_bytes)
    variables, *got = trained(how, rx.MirroredStrategy(CPUS[:4], shard_state=state, shard_size=size))
    assert_close(got, list(on_one_device()), 1e-5, 1e-6)
    for variable in variables:
        is_of_optimizer = any(variable is other for other in variables[4:-1])
        is_sharded = state == "all" or is_of_optimizer
        fits = is_sharded and any(n % size == 0 for n in variable.shape)
        held = [shard.data.nbytes for shard in variable.value.addressable_shards]
        assert held == [variable.value.nbytes // (size if fits else 1)] * 4, variable


def test_assigned_variable_stays_sharded():
    strategy = rx.MirroredStrategy(CPUS[:2], shard_state="all")
    with strategy.scope():
        variable = rx.Variable(np.zeros((6, 3), np.float32))
    strategy.run(lambda: variable.assign_add(np.ones((6, 3), np.float32)))
    variable.assign(np.arange(18, dtype=np.float32).reshape(6, 3))
    assert [shard.data.shape for shard in variable.value.addressable_shards] == [(3, 3)] * 2
    assert [np.asarray(part).shape for part in strategy.experimental_local_results(variable)] == [(6, 3)] * 2
    result = strategy.run(lambda: variable.value.sum())
    assert float(strategy.reduce("MEAN", result, axis=None)) == 153


def test_unsupported_combinations():
    def strategy(**options):
        return lambda: rx.MirroredStrategy(CPUS[:4], **options)

    message(rx.errors.InvalidArgumentError, strategy(shard_state="weights"), "'weights'", "OPTIMIZER, ALL")
    message(rx.errors.InvalidArgumentError, strategy(shard_state="all", shard_size=3), "3", "4", "1, 2, 4")
    message(rx.errors.InvalidArgumentError, strategy(shard_size=2), "shard_state")


def unrolled(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def computed_again(weights, x):
    for weight in weights:
        x = jax.checkpoint(lambda weight, x: jnp.tanh(x.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16)))(
            weight, x
        )
    return x.astype(jnp.float32)


def by_rows(weights, x):
    return jnp.tanh(x @ (weights[0] / len(x)))


def ordered_by_rows(weights, x):
    of_all = {}
    for i in (0, 1) if len(x) > 2 else (1, 0):
        of_all[i] = jnp.tanh(x @ weights[i])
    return of_all[0] - 2 * of_all[1]


def scanned(weights, x):
    return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights[0])[0]


@pytest.mark.parametrize(
    ("function", "shapes", "num_gathers"),
    [
        (unrolled, [(8, 8)] * 3, 5),  # forward and backward, the first only forward
        pytest.param(computed_again, [(8, 8)] * 3, 6, marks=pytest.mark.long),
        # Their gathers depend on their sizes, or are in loops: each replica computes both.
        (by_rows, [(8, 8)], 2),
        (ordered_by_rows, [(8, 8)] * 2, 4),
        (scanned, [(3, 8, 8)], 4),
    ],
)
def test_uneven_batches_gather_where_needed(function, shapes, num_gathers, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    rows = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    results, texts = [], []
    for options in {}, {"shard_state": "all"}:
        strategy = rx.MirroredStrategy(CPUS[:2], **options)
        with strategy.scope():
            weights = [
                rx.Variable(np.random.default_rng(1).normal(size=shape).astype(np.float32))
                for shape in shapes
            ]

        def step(x, weights=weights):
            with rx.GradientTape() as tape:
                outputs = function([weight.value for weight in weights], x)
                loss = rx.nn.compute_average_loss((outputs**2).sum(-1))
            gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss, jnp.float32(len(x))

        inputs = strategy.experimental_distribute_values_from_function(
            lambda context: rows[:4] if context.replica_id_in_sync_group == 0 else rows[4:]
        )
        for _ in range(2):
            losses, sizes = strategy.run(step, args=(inputs,))
        texts.append(strategy.runner.last_launcher.lower([inputs.stored]).as_text())
        total = strategy.reduce("SUM", losses, axis=None)
        results.append([total, *strategy.experimental_local_results(sizes), *(w.numpy() for w in weights)])
    tolerance = 2e-2 if function is computed_again else 1e-5
    assert_close(results[1], results[0], tolerance, tolerance)
    assert results[1][1:3] == [4, 1]
    assert [text.count("stablehlo.all_gather") for text in texts] == [0, num_gathers]
    gathered = re.findall(r"stablehlo.all_gather.* -> tensor<(\d+x\d+)x\w+>\n", texts[1])
    assert gathered == ["8x8"] * num_gathers  # a slice at a time


def test_uneven_batches_call_back_once_for_each_replica(monkeypatch):
    """Also in loops, in which all replicas compute all sizes if there are no callbacks."""
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    strategy = rx.MirroredStrategy(CPUS[:2], shard_state="all")
    with strategy.scope():
        weights = rx.Variable(np.ones((3, 8, 8), np.float32))
    seen = []

    def step(x):
        outputs = scanned([weights.value], x)
        jax.debug.callback(lambda outputs: seen.append(outputs.shape), outputs)
        return outputs.sum()

    rows = np.full((5, 8), 0.01, np.float32)
    inputs = strategy.experimental_distribute_values_from_function(
        lambda context: rows[:4] if context.replica_id_in_sync_group == 0 else rows[4:]
    )
    results = strategy.experimental_local_results(strategy.run(step, args=(inputs,)))
    jax.effects_barrier()
    assert sorted(seen) == [(1, 8), (4, 8)]
    assert_close(results[0], 4 * results[1], 1e-5)
