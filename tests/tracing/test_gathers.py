"""The places where sharded variables are gathered: results are equal, and each gather waits for the inputs of its
computation."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checks import assert_close
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing import gathers

WIDTH, LAYERS = 8, 3


def chain(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x.sum()


def computed_again(weights, x):
    for weight in weights:
        x = jax.checkpoint(lambda weight, x: jnp.tanh(x @ weight))(weight, x)
    return x.sum()


def in_half_precision(weights, x):
    for weight in weights:
        x = jnp.tanh(x.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16).T)
    return x.astype(jnp.float32).sum()


def in_functions(weights, x):
    layer = jax.jit(lambda x, weight: jax.nn.silu(x @ weight))
    for weight in weights:
        x = layer(x, weight)
    return x.sum()


def of_slices(weights, x):
    for i in range(LAYERS):
        x = jnp.tanh(x @ weights[i])
    return x.sum()


def scanned(weights, x):
    return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0].sum()


def scanned_and_computed_again(weights, x):
    layer = jax.checkpoint(lambda x, weight: (jnp.tanh(x @ weight), None))
    return jax.lax.scan(layer, x, weights.astype(jnp.bfloat16))[0].sum()


def recurrent(weight, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ weight), None), x, length=5)[0].sum()


def shared(weight, x):
    return chain([weight] * 6, x)


def embedding(weight, x):
    return jax.nn.log_softmax(x.mean() + weight[jnp.array([1, 2, 3])] @ weight.T).sum()


def conditional(weight, x):
    return jax.lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ weight), lambda: x @ weight).sum()


def counted(jaxpr, is_in_loop=False):
    """(outside loops, in loops): the number of gathers in a program; checks that each follows a barrier."""
    outside = inside = 0
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            source = made_by.get(eqn.invars[0])
            waits = source is not None and source.primitive.name == "optimization_barrier"
            assert waits or jaxpr.eqns[0] is eqn, "a gather waits for nothing"
            outside, inside = outside + (not is_in_loop), inside + is_in_loop
        for sub in jax_compat.sub_jaxprs(eqn):
            more = counted(jax_compat.inner_jaxpr(sub)[0], is_in_loop or eqn.primitive.name == "scan")
            outside, inside = outside + more[0], inside + more[1]
    return outside, inside


@pytest.mark.parametrize(
    ("function", "is_one", "expected"),
    [
        (chain, False, (5, 0)),  # forward and backward, but for the first one, behind which nothing is learnt
        (computed_again, False, (8, 0)),
        (in_half_precision, False, (5, 0)),
        (in_functions, False, (5, 0)),
        (of_slices, True, (5, 0)),
        (scanned, True, (0, 2)),
        (scanned_and_computed_again, True, (0, 3)),
        (recurrent, False, (2, 0)),
        (shared, False, (1, 0)),  # by six layers: once
        (embedding, False, (3, 0)),
        (conditional, False, (1, 0)),
    ],
)
def test_each_equation_gathers_what_it_needs(monkeypatch, function, is_one, expected):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    mesh = Mesh(np.array(jax.devices()[:4]), ("shard",))
    random = np.random.default_rng(0)
    x = random.normal(size=(4, WIDTH)).astype(np.float32)
    weights = random.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)
    if not is_one:
        weights = weights[0] if expected[0] < 4 else list(weights)

    def step(weights, x):
        spec = PartitionSpec(None, "shard", None) if is_one else PartitionSpec("shard", None)
        marked = jax.tree_util.tree_map(
            lambda w: gathers.sharded_read_p.bind(w, spec=spec, mesh=mesh), weights
        )
        return jax.grad(function)(marked, x)

    leaves = jax.tree_util.tree_leaves((weights, x))
    jaxpr, consts = jax_compat.open_jaxpr(jax.make_jaxpr(step)(weights, x))
    closed = jax.make_jaxpr(lambda *args: gathers.evaluate_gathering(jaxpr, [*consts, *args]))(*leaves)
    assert counted(closed.jaxpr) == expected
    got = jax.jit(jex.jaxpr_as_fun(closed))(*leaves)
    tolerance = 2e-2 if function in (in_half_precision, scanned_and_computed_again) else 1e-5
    assert_close(
        got, jax.tree_util.tree_leaves(jax.jit(jax.grad(function))(weights, x)), tolerance, tolerance
    )


def test_gradients_of_stacked_variables_are_sharded_in_the_loop(monkeypatch):
    """After the loop it is requested replicated, then in shards: no device ever has the stack."""
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    mesh = Mesh(np.array(jax.devices()[:4]), ("shard",))
    whole, pieces = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), (None, "shard")))
    random = np.random.default_rng(0)
    x = random.normal(size=(4, WIDTH)).astype(np.float32)
    weights = random.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)

    def step(weights, x):
        read = gathers.sharded_read_p.bind(weights, spec=PartitionSpec(None, "shard", None), mesh=mesh)
        gradient = 2.0 * jax.grad(scanned)(read, x)
        for sharding in (whole, pieces):
            gradient = jax.lax.with_sharding_constraint(gradient, sharding)
        return gradient, gradient.sum()

    jaxpr, consts = jax_compat.open_jaxpr(jax.make_jaxpr(step)(weights, x))
    closed = jax.make_jaxpr(lambda *args: gathers.evaluate_gathering(jaxpr, [*consts, *args]))(weights, x)
    _, back = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan"]
    asked = [
        eqn.params["sharding"].spec for eqn in _constraints(jax_compat.inner_jaxpr(back.params["jaxpr"])[0])
    ]
    # A gather, and these two.
    assert asked == [PartitionSpec(None, None), PartitionSpec(), PartitionSpec("shard")]
    assert [eqn.params["sharding"] for eqn in _constraints(closed.jaxpr)] == [pieces]
    got = jax.jit(jex.jaxpr_as_fun(closed))(weights, x)
    wanted = 2.0 * jax.jit(jax.grad(scanned))(weights, x)
    assert_close(got, [wanted, wanted.sum()], 1e-5, 1e-5)


def _constraints(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
