"""Integers that JAX would cut to 32 bits without a word."""

import numpy as np
import pytest

from replicax._src.input import narrowing
from replicax._src.input.narrowing import narrowed_dtype


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(narrowing, "_said", set())


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.array([7, 2**32 + 1]), "has 4294967297, which does not fit into int32: it becomes 1"),
        (np.array([7, -(2**31) - 1]), "has -2147483649"),
        (np.array([2**64 - 1], np.uint64), "does not fit into uint32"),
    ],
    ids=["large", "small", "unsigned"],
)
def test_what_is_lost_is_said_once(caplog, array, says):
    assert narrowed_dtype(array, "What is given").itemsize == 4
    narrowed_dtype(array, "What is given")
    (record,) = caplog.records
    assert says in record.getMessage()
    assert record.getMessage().startswith("What is given has ")
    assert "ids % num_rows" in record.getMessage()


@pytest.mark.parametrize(
    "array",
    [
        np.array([2**31 - 1, -(2**31)]),
        np.array([], np.int64),
        np.array([1e300]),
        np.array([2**31], np.uint32),
    ],
    ids=["bounds", "none", "float", "unsigned"],
)
def test_what_fits_needs_no_word(caplog, array):
    narrowed_dtype(array, "What is given")
    assert not caplog.records
