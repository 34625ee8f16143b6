"""Specs: which axes of a mesh shard each dim of an array, the outermost axis first."""

import pytest
from jax.sharding import PartitionSpec as P

from replicax._src.devices.sharding_specs import axes_of, dim_of, spec_of, without

PAIRS = [
    (P(), ()),
    (P(None, "replica"), ((), ("replica",))),
    (P(("rows", "replica"), None, "columns"), (("rows", "replica"), (), ("columns",))),
    (P(("replica", "rows")), (("replica", "rows"),)),
]


@pytest.mark.parametrize(("spec", "axes"), PAIRS, ids=str)
def test_a_spec_and_its_axes_say_the_same_in_the_same_order(spec, axes):
    assert axes_of(spec) == axes
    assert spec_of(axes) == spec


def test_the_dim_of_an_axis_is_found_beside_other_axes():
    spec = P(None, ("rows", "replica"), "columns")
    assert [dim_of(spec, axis) for axis in ("rows", "replica", "columns", "other")] == [1, 1, 2, None]


def test_a_spec_without_an_axis_keeps_the_other_axes_in_their_order():
    spec = P(("rows", "replica", "columns"), "other")
    assert without(spec, "replica") == P(("rows", "columns"), "other")
    assert without(spec, "other") == P(("rows", "replica", "columns"), None)
