"""Numbers of 64 bits that JAX would silently narrow to 32."""

import warnings

import jax
import numpy as np
import pytest

from checks import message
from replicax._src.values.narrowing import narrowed
from replicax.errors import NarrowingError


def narrowed_one(array):
    (result,) = narrowed([array], jax.tree.structure(0), "batch")
    return result


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.array([7, 2**31]), ("has 2147483648 at [1]", "int32")),
        (np.array([7, -(2**31) - 1]), ("has -2147483649 at [1]",)),
        (np.array([[1, 2], [2**40, 3]]), ("has 1099511627776 at [1, 0]", "become 0")),
        (np.array([2**64 - 1], np.uint64), ("uint32",)),
        (np.int64(2**40), ("has 1099511627776.",)),
        (np.array([1.0, 1e300]), ("has 1e+300 at [1]", "become inf")),
        (np.array([-1e39, np.nan]), ("has -1e+39 at [0]",)),
        (np.array([1e300j]), ("complex64",)),
        (np.float64(1e300), ("become inf",)),
    ],
    ids=[
        "large",
        "small",
        "2d",
        "unsigned",
        "scalar",
        "float",
        "float_small",
        "complex",
        "float_scalar",
    ],
)
def test_number_that_does_not_fit_raises_with_both_remedies(array, says):
    message(NarrowingError, lambda: narrowed_one(array), "batch", "jax_enable_x64", "in the dataset", *says)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([2**31 - 1, -(2**31)]), "int32"),
        (np.array([], np.int64), "int32"),
        (np.array([2**32 - 1], np.uint64), "uint32"),
        (np.array([np.inf, -np.inf, np.nan, 1e-300, 3.4e38]), "float32"),
        (np.array([1 + 2j]), "complex64"),
        (np.int64(5), "int32"),
        (np.arange(6)[::2], "int32"),
    ],
    ids=["bounds", "none", "unsigned", "float", "complex", "scalar", "strided"],
)
def test_numbers_that_fit_are_converted_without_a_warning(array, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = narrowed_one(array)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, np.asarray(array).astype(dtype))


@pytest.mark.parametrize("size", [1, 7, 8, 33, 1000, 100_001])
def test_lost_float_is_found_anywhere(size):
    """NumPy's floating point flags report it: a vectorised loop must not miss the rest of an array."""
    for position in {0, size // 2, size - 1}:
        array = np.ones(size)
        array[position] = 1e300
        message(NarrowingError, lambda array=array: narrowed_one(array), f"at [{position}]")


def test_values_that_jax_keeps_are_not_touched():
    leaves = [np.ones(2, np.float32), np.arange(3, dtype=np.int8), jax.numpy.ones(2), "text", 2**40, None]
    assert narrowed(leaves, None, "batch") is leaves


def test_with_64_bits_everything_stays():
    with jax.enable_x64(True):
        array = np.array([2**40])
        assert narrowed_one(array) is array


def test_the_error_names_the_column():
    leaves, tree = jax.tree.flatten(({"x": np.ones(2), "ids": np.array([2**40])}, np.ones(2)))
    message(NarrowingError, lambda: narrowed(leaves, tree, "batch"), "batch[0]['ids'] has")
    message(NarrowingError, lambda: narrowed(leaves, tree, "x", "y"), "x['ids'] has")
