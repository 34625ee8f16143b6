"""Sums over replicas that do not wait for one another are computed together, with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from replicax._src.collectives.in_replica import Packing
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.combined_sums import in_rounds

PACKING = Packing(2**20)
X = np.arange(8, dtype="float32").reshape(4, 2)


def total(value):
    return jax.lax.psum(value, "replica")


def gradients_and_metrics(x):
    mean = total(x) / 4
    return {"gradient": mean, "loss": total(jnp.sum(x**2)), "count": total(jnp.ones((), jnp.int32))}


def one_after_the_other(x):
    mean = total(x) / 4
    variance = total((x - mean) ** 2) / 4
    return mean, variance, total(x * 3), total(jnp.where(variance > 0, x, 0))


def under_a_function(x):
    return jax.jit(lambda x: total(x) * 2)(x), total(x + 1)


def of_extremes_too(x):
    return total(x), jax.lax.pmax(x, "replica"), total(x * jax.lax.pmin(x, "replica"))


def over_part_of_them(x):
    return total(x), jax.lax.psum(x, "replica", axis_index_groups=[[0, 1], [2, 3]])


def with_an_effect(x):
    jax.debug.callback(lambda x: None, x)
    return total(x), total(x * 2)


def placed(function):
    mesh = Mesh(np.array(jax.devices()[:4]), ("replica",))
    spec = PartitionSpec("replica")
    stacked = lambda x: jax.tree_util.tree_map(lambda v: v[None], function(x[0]))  # noqa: E731
    return jax.jit(jax_compat.shard_map(stacked, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        (gradients_and_metrics, 3, 2),  # whole numbers by themselves
        (one_after_the_other, 4, 3),
        (under_a_function, 2, 1),
        (of_extremes_too, 4, 3),
        (over_part_of_them, 2, 2),
        (with_an_effect, 2, 2),
        (lambda x: x * 2, 0, 0),
    ],
)
def test_sums_travel_together(function, before, after):
    alone, together = placed(function), placed(in_rounds(function, PACKING))
    counts = [f.lower(X).as_text().count("stablehlo.all_reduce") for f in (alone, together)]
    assert counts == [before, after]
    jax.tree_util.tree_map(np.testing.assert_array_equal, together(X), alone(X))
