"""The variables that are sharded over replicas, and along which dim."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from checks import message
from replicax._src.variables.state_shards import StateShards
from replicax._src.vocabulary.options import ShardState

SHAPES = st.lists(st.integers(0, 64), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((8, 16), 1),
        ((16, 8), 0),
        ((8, 8), 0),  # the first one on a tie
        ((10, 12), 1),
        ((12, 10), 0),
        ((3, 3, 8, 64), 3),
        ((7, 4), 1),
        ((4,), 0),
        ((7, 5), None),
        ((2,), None),
        ((0, 3), None),
        ((), None),
    ],
)
def test_largest_divisible_dim_is_sharded(shape, dim):
    assert StateShards(ShardState.ALL, 4).dim_of(shape) == dim


@given(SHAPES, st.integers(1, 16), st.integers(1, 8))
def test_shards_are_equal_long_enough_and_along_the_largest_dim(shape, count, least_rows):
    dim = StateShards(ShardState.ALL, count).dim_of(shape, least_rows=least_rows)
    fits = [n for n in shape if n % count == 0 and n // count >= least_rows]
    if count == 1 or not fits:
        assert dim is None
    else:
        assert shape[dim] == max(fits)
        assert dim == shape.index(max(fits))


@given(st.integers(1, 5000))
def test_by_default_a_group_is_the_largest_divisor_up_to_256(num_replicas):
    size = StateShards.of("all", None, num_replicas).num_shards
    assert num_replicas % size == 0
    assert size <= 256
    assert all(num_replicas % larger for larger in range(size + 1, min(256, num_replicas) + 1))


def test_many_replicas_are_in_groups():
    assert StateShards.of("all", None, 4096).num_shards == 256
    assert StateShards.of("all", 64, 4096).num_shards == 64
    assert StateShards.of("all", None, 257).num_shards == 1  # a prime: nothing to divide by


@pytest.mark.parametrize(
    ("state", "is_trainable", "is_of_optimizer", "divides"),
    [
        ("optimizer", True, False, False),
        ("optimizer", False, True, True),
        ("optimizer", False, False, False),
        ("all", True, False, True),
        ("ALL", False, True, True),
        (ShardState.ALL, False, False, False),  # moving statistics, seeds, metrics
    ],
)
def test_sharded_variables(state, is_trainable, is_of_optimizer, divides):
    shards = StateShards.of(state, None, 8)
    assert shards.divides(is_trainable=is_trainable, is_of_optimizer=is_of_optimizer) is divides


def test_no_shard_state():
    assert StateShards.of(None, None, 8) is None


def test_unsupported_values():
    def of(shard_state, shard_size):
        return lambda: StateShards.of(shard_state, shard_size, 12)

    message(rx.errors.InvalidArgumentError, of("parameters", None), "'parameters'", "OPTIMIZER, ALL")
    message(rx.errors.InvalidArgumentError, of("all", 5), "shard_size=5", "12", "1, 2, 3, 4, 6, 12")
    message(rx.errors.InvalidArgumentError, of("all", 0), "shard_size", "at least 1", "got 0")
    message(rx.errors.InvalidArgumentError, of("all", 2.0), "shard_size", "2.0")
    message(rx.errors.InvalidArgumentError, of(None, 4), "shard_size=4", "shard_state='optimizer' or 'all'")


def test_bytes_per_device_fall_by_the_number_of_shards():
    shards = StateShards(ShardState.ALL, 4)
    shapes = [(784, 512), (512,), (512, 10), (10,)]
    whole = sum(math.prod(shape) for shape in shapes)
    held = sum(math.prod(s) // (1 if shards.dim_of(s) is None else 4) for s in shapes)
    assert held == (whole - 10) // 4 + 10
