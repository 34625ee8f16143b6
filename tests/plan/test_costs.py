"""The requests of programs, compared with counts by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from replicax._plan.costs import costs_of
from replicax._src.devices.plan import Collective

F32 = 4


def traced(fn, *shapes):
    return jax.make_jaxpr(fn)(*[jnp.zeros(shape, jnp.float32) for shape in shapes])


def on_mesh(fn, num_args=1):
    mesh = Mesh(jax.devices()[:4], ("replica",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec("replica"),) * num_args
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("replica"), check_vma=False)


def test_products_in_both_directions():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    costs = costs_of(traced(step, (16, 8), (4, 16)), 1, is_split=False)
    forward, of_weights = 2 * 4 * 16 * 8, 2 * 16 * 4 * 8
    assert costs.flops == {"float32": forward + of_weights}
    assert costs.matrix_bytes == 2 * F32 * (16 * 8 + 4 * 16 + 4 * 8)


def test_convolutions_with_stride_count_no_holes():
    def loss(kernel, x):
        dims = ("NHWC", "HWIO", "NHWC")
        return jnp.sum(jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=dims) ** 2)

    forward = 2 * (2 * 4 * 4 * 5) * (2 * 2 * 3)
    costs = costs_of(traced(loss, (2, 2, 3, 5), (2, 8, 8, 3)), 1, is_split=False)
    assert costs.total_flops == forward
    both = costs_of(traced(jax.grad(loss, argnums=(0, 1)), (2, 2, 3, 5), (2, 8, 8, 3)), 1, is_split=False)
    assert both.total_flops == 3 * forward


def test_loops_count_as_often_as_they_run():
    def step(w, x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=7)[0]

    assert costs_of(traced(step, (8, 8), (4, 8)), 1, is_split=False).total_flops == 7 * 2 * 4 * 8 * 8


def test_loops_of_unknown_length_are_noted():
    def step(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ x, x)

    costs = costs_of(traced(step, (8, 8)), 1, is_split=False)
    assert costs.has_open_loops
    assert costs.total_flops == 2 * 8**3


def test_condition_counts_its_more_expensive_branch():
    def step(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert costs_of(traced(step, (8, 8)), 1, is_split=False).total_flops == 2 * 2 * 8**3


def test_costs_of_the_global_view_are_divided_by_devices():
    jaxpr = traced(lambda w, x: x @ w, (8, 8), (16, 8))
    whole = costs_of(jaxpr, 4, is_split=False)
    assert costs_of(jaxpr, 4, is_split=True).total_flops == whole.total_flops / 4


@pytest.mark.parametrize(
    ("exchange", "kind", "num_bytes", "sent"),
    [
        (functools.partial(jax.lax.psum, axis_name="replica"), "all-reduce", 8 * F32, 2 * 3 / 4),
        (functools.partial(jax.lax.all_gather, axis_name="replica"), "all-gather", 32 * F32, 3 / 4),
        (
            lambda x: jax.lax.psum_scatter(x[0], "replica", tiled=True)[None],
            "reduce-scatter",
            8 * F32,
            3 / 4,
        ),
        (lambda x: jax.lax.ppermute(x, "replica", [(0, 1), (1, 0)]), "collective-permute", 8 * F32, 1),
    ],
)
def test_collectives(exchange, kind, num_bytes, sent):
    (one,) = costs_of(traced(on_mesh(exchange), (4, 8)), 4, is_split=False).collectives
    assert one == Collective(kind, num_bytes, 4, 1, ("replica",))
    assert one.wire_bytes == sent * num_bytes


def test_collectives_in_loops_and_in_groups():
    def step(x):
        def body(h, _):
            return jax.lax.psum(h, "replica", axis_index_groups=[[0, 1], [2, 3]]), None

        return jax.lax.scan(body, x, length=5)[0]

    (one,) = costs_of(traced(on_mesh(step), (4, 8)), 4, is_split=False).collectives
    assert (one.count, one.group_size) == (5, 2)


def test_groups_over_axes_of_several_hosts():
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3
    )

    def step(x):
        return [jax.lax.psum(x, axes) for axes in ("a", "c", ("b", "c"), ("a", "b", "c"))]

    spec = PartitionSpec("a")
    placed = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = costs_of(traced(placed, (4, 8)), 8, is_split=False, domain_size=4).collectives
    assert {one.axes: (one.group_size, one.num_domains) for one in found} == {
        ("a",): (2, 2),
        ("c",): (2, 1),
        ("b", "c"): (4, 1),
        ("a", "b", "c"): (8, 2),
    }
