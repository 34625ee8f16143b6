"""Scatters of uneven rows over logical devices: at any depth their updates are whole, and nothing else changes."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close, tpu_strategy
from replicax._src import jax_compat
from replicax._src.placement import scatters

ROWS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
IDS = np.array([0, 2, 2, 1, 0])


def direct(table, rows, ids):
    return table.at[ids].add(rows)


def in_a_loop(table, rows, ids):
    return jax.lax.scan(lambda t, _: (jax.jit(direct)(t, rows, ids) * 2, None), table, None, length=2)[0]


def in_branches(table, rows, ids):
    return jax.lax.cond(ids[0] > 0, lambda t: t, lambda t: jax.checkpoint(direct)(t, rows, ids), table)


def in_a_gradient(table, rows, ids):
    def loss(table):
        return jnp.sum(jnp.sin(jax.checkpoint(lambda t: t[ids])(table)) * rows)

    return jax.grad(loss)(table)


def until(table, rows, ids):
    constant = jnp.asarray(np.ones(3, np.float32))

    def body(state):
        step, table = state
        return step + 1, table.at[ids].add(rows).at[0].add(constant)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, table))[1]


@pytest.mark.parametrize("fn", [direct, in_a_loop, in_branches, in_a_gradient, until])
def test_updates_are_whole_at_any_depth(fn):
    args = (jnp.ones((4, 3)), ROWS, IDS)
    whole = rx.MirroredStrategy(["cpu:0", "cpu:1"]).topology.replicated
    jaxpr, consts = jax_compat.trace(lambda *args: [fn(*args)], args)
    assert scatters.has_scatter(jaxpr)

    def changed(*args):
        return scatters.evaluate(jaxpr, [*consts, *args], whole)

    found = str(jax.make_jaxpr(changed)(*args))
    assert found.count("sharding_constraint") == found.count("= scatter-add") > 0
    np.testing.assert_allclose(jax.jit(changed)(*args)[0], fn(*args), rtol=1e-6)


@pytest.mark.parametrize("num_rows", [5, pytest.param(11, marks=pytest.mark.long)])
def test_embeddings_equal_one_device(num_rows):
    """XLA would count the row that pads the last replica's."""

    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.Input((2,), dtype="int32"), keras.layers.Embedding(3, 4), keras.layers.Dense(2)]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.SGD(0.5), "mse")
        ids = np.random.default_rng(1).integers(0, 3, (num_rows, 2))
        model.fit(ids, np.ones((num_rows, 2, 2), np.float32), batch_size=num_rows, verbose=0)
        return [np.asarray(v.value) for v in model.trainable_variables]

    assert_close(trained(tpu_strategy(2, 2)), trained(rx.MirroredStrategy(["cpu:0"])), 1e-5)
