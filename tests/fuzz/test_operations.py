"""Operations that mix the rows of a batch give on several devices what one device gives in float64. `table.py` prints all."""

import pytest

from fuzz import ways
from fuzz.operations import OPERATIONS

AT_RISK = [
    "sort",
    "sort_without_first",
    "sort_with_more",
    "sort_halved",
    "argsort",
    "argsort_take",
    "pad",
    "var",
    "roll",
    "cdist",
    "bitcast",
    "hard_triplets",
    "xor",
    "or",
    "reduce_of_ones_own",
    "scatter_max_to_more",
]


def check(way, names, num_devices, num_rows):
    found = ways.differences(way, names, num_devices, num_rows)
    assert way == "by_rows" or len(found) == len(names)
    assert {name: value for name, value in found.items() if not value <= ways.LIMIT} == {}


@pytest.mark.parametrize(
    ("way", "num_devices", "num_rows"),
    [
        ("fit", 8, 24),
        pytest.param("loop", 3, 11, marks=pytest.mark.rest),
        pytest.param("predict", 2, 11, marks=pytest.mark.rest),
        ("run", 2, 11),
    ],
)
def test_operations_at_risk_equal_one_device(way, num_devices, num_rows):
    check(way, AT_RISK, num_devices, num_rows)


# (`predict` and `run` are cheaper to get right: the gradients are what goes wrong. `table.py` has all combinations.)
@pytest.mark.long
@pytest.mark.parametrize("names", [list(OPERATIONS)[i::3] for i in range(3)], ids=["one", "two", "three"])
@pytest.mark.parametrize(
    ("way", "num_devices", "num_rows"),
    [
        *(("fit", num_devices, num_rows) for num_devices in ways.DEVICES for num_rows in ways.ROWS),
        ("predict", 8, 11),
        ("run", 8, 11),
        ("by_rows", 3, 11),
    ],
)
def test_all_operations_equal_one_device(way, num_devices, num_rows, names):
    check(way, names, num_devices, num_rows)


@pytest.mark.long
def test_bits_of_rounded_rows_differ_from_float64_on_one_device_too():
    """Where float32 rounds what a layer makes of the rows, operations on its last bits give something else everywhere."""
    names = [*AT_RISK, "hash_rows", "population_count", "bits_of_neighbours"]
    found = ways.differences("predict", names, 2, 11, is_exact=False)
    apart = [name for name, value in found.items() if value > ways.LIMIT]
    alone = ways.rounding("predict", apart, 2, 11, is_exact=False)
    assert set(apart) >= {"hash_rows", "population_count"}
    assert all(alone[name] > found[name] / 2 for name in apart)
