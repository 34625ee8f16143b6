"""The number of shards of a variable; ``tests/parity`` compares the counts with TensorFlow's."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax._src.variables.partitioners import num_shards_of, shard_rows
from replicax.experimental.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

SHAPES = st.lists(st.integers(0, 50), min_size=1, max_size=4).map(tuple)
COUNTS = st.integers(1, 100)


@pytest.mark.parametrize(
    ("partitioner", "shape", "counts"),
    [
        (FixedShardsPartitioner(4), (3, 2), [3, 1]),
        (MinSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(4, max_shards=10), (6, 1), [6, 1]),
        (MinSizePartitioner(10, max_shards=6), (6, 1), [3, 1]),
        (MinSizePartitioner(), (1_000_000,), [1]),
        (MinSizePartitioner(max_shards=100), (1_000_000,), [16]),
        (MaxSizePartitioner(4), (6, 1), [6, 1]),
        (MaxSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (MaxSizePartitioner(4, max_shards=0), (6, 1), [6, 1]),
        (MaxSizePartitioner(10), (6, 1), [3, 1]),
        (MaxSizePartitioner(1024), (6, 1), [1, 1]),
    ],
)
def test_measured_counts(partitioner, shape, counts):
    assert partitioner(shape, "float32") == counts
    assert partitioner(shape=np.zeros(shape).shape, dtype=jnp.float32) == counts


def test_axis():
    assert FixedShardsPartitioner(2)((10, 3), "float32", axis=1) == [1, 2]
    assert MaxSizePartitioner(20)((10, 3), "float32", axis=-1) == [1, 3]
    assert MinSizePartitioner(40, max_shards=9)((10, 3), "float32", axis=1) == [1, 3]


@pytest.mark.parametrize("axis", [2, -3])
def test_invalid_axis(axis):
    for partitioner in (FixedShardsPartitioner(2), MinSizePartitioner(), MaxSizePartitioner(4)):
        with pytest.raises(
            ValueError, match=f"Cannot partition variable along axis {axis} when shape is only"
        ):
            partitioner((10, 3), "float32", axis)


@pytest.mark.parametrize(
    ("dtype", "count"), [("bfloat16", 2), ("int8", 1), ("float64", 8), ("bool", 1), ("complex64", 8)]
)
def test_sizes_of_dtypes(dtype, count):
    assert MaxSizePartitioner(8)((64,), dtype) == [8 * count]
    assert MinSizePartitioner(100, max_shards=100)((100,), dtype) == [count]


@pytest.mark.parametrize("dtype", ["string", str, np.dtype("U3"), object])
def test_strings_have_the_declared_size(dtype):
    assert MinSizePartitioner(16, max_shards=100)((8,), dtype) == [8]
    assert MinSizePartitioner(16, max_shards=100, bytes_per_string=4)((8,), dtype) == [2]
    assert MaxSizePartitioner(16, bytes_per_string=4)((8,), dtype) == [2]


@pytest.mark.parametrize("name", ["min_shard_bytes", "max_shards", "bytes_per_string"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_arguments_of_min_size(name, value):
    with pytest.raises(
        rx.errors.InvalidArgumentError, match=rf"`{name}` must be positive\. Received: {value}"
    ):
        MinSizePartitioner(**{name: value})


def test_arguments_of_the_others():
    with pytest.raises(ValueError, match=r"`max_shard_bytes` must be positive\. Received: 0"):
        MaxSizePartitioner(0)
    with pytest.raises(ValueError, match=r"`max_shards` must be positive\. Received: -1"):
        MaxSizePartitioner(4, max_shards=-1)
    with pytest.raises(ValueError, match=r"`num_shards` must be positive\. Received: 0"):
        FixedShardsPartitioner(0)


@given(shape=SHAPES, max_bytes=COUNTS)
def test_max_size_is_kept_with_the_fewest_shards(shape, max_bytes):
    count, *others = MaxSizePartitioner(max_bytes)(shape, "float32")
    row_bytes = 4 * math.prod(shape[1:])

    def largest(count):
        return max(stop - start for start, stop in shard_rows(shape[0], count)) * row_bytes

    assert others == [1] * (len(shape) - 1)
    assert largest(count) <= max_bytes or largest(count) <= row_bytes
    assert count == 1 or largest(count - 1) > max_bytes


@given(shape=SHAPES, min_bytes=COUNTS, max_shards=COUNTS)
def test_min_size_makes_no_smaller_shards_than_allowed(shape, min_bytes, max_shards):
    count, *others = MinSizePartitioner(min_bytes, max_shards)(shape, "float32")
    total = 4 * math.prod(shape)
    assert others == [1] * (len(shape) - 1)
    assert (count - 1) * min_bytes < max(total, 1)
    assert count in (1, max_shards, shape[0]) or count * min_bytes >= total


# --- the rule for variables ---------------------------------------------------------------------------


@given(num_rows=st.integers(0, 1000), num_shards=COUNTS)
def test_shards_are_all_rows_in_order_the_larger_first(num_rows, num_shards):
    rows = shard_rows(num_rows, num_shards)
    sizes = [stop - start for start, stop in rows]
    assert [i for start, stop in rows for i in range(start, stop)] == list(range(num_rows))
    assert len(rows) == num_shards
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_ten_rows_in_four_shards():
    assert shard_rows(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]


@given(shape=SHAPES, num_shards=COUNTS)
def test_no_shard_of_a_variable_is_empty(shape, num_shards):
    count = num_shards_of(FixedShardsPartitioner(num_shards), shape, "float32")
    assert count == max(1, min(num_shards, shape[0]))


def test_scalars_are_never_sharded():
    def partitioner(shape, dtype):
        raise AssertionError("asked for a scalar")

    assert num_shards_of(partitioner, (), "float32") == 1


def test_without_partitioner_nothing_is_sharded():
    assert num_shards_of(None, (10,), "float32") == 1


def test_more_shards_than_rows():
    assert num_shards_of(lambda shape, dtype: (5, 1), (3, 2), "float32") == 3


def test_partitioner_of_the_user():
    class Halves(Partitioner):
        def __call__(self, shape, dtype, axis=0):
            return [2] + [1] * (len(shape) - 1)

    assert num_shards_of(Halves(), (10, 3), "float32") == 2


@pytest.mark.parametrize(
    "counts", [[], None, 2, [0, 1], [2, 2], [1, 2], [2], [2, 1, 1], [-1, 1], [1.5, 1], "21"]
)
def test_counts_that_are_not_allowed(counts):
    with pytest.raises(ValueError, match="list/tuple") as raised:
        num_shards_of(lambda shape, dtype: counts, (10, 3), "float32")
    assert f"got: {counts!r}" in str(raised.value)
