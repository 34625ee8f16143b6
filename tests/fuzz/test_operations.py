"""Operations that mix the rows of a batch give the same on several devices as on one device in float64. `table.py`
prints all."""

import pytest

from fuzz import ways
from fuzz.operations import OPERATIONS
from splitting import plan_of

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
# Operations that processes split by rows; all others are rejected.
NAMES = """
    bincount bincount_weighted stack_interleaved repeat merge_rows pairs_softmax meshgrid boolean_rows
    scatter_set scatter_add scatter_pairs segment_sum segment_mean segment_softmax neighbours_sum
    one_hot one_hot_of_rows sum mean var var_all std var_with_ddof max min_all max_with_ties ptp
    logsumexp logsumexp_weighted softmax log_softmax average norm normalised nanmean nansum nanmax
    count_nonzero any all int_sum int_max int_dot uint8_sum bfloat16_max moments covariance correlation
    batch_norm barlow float8_max float16_sum int8_sum int16_max sinkhorn gram_of_columns kron tensordot
    triu diag vander resize resize_down eigh_projection det_of_columns lstsq whitened bitcast
    population_count unpackbits complex_sum dropout random_normal random_gumbel random_gamma
    random_of_rows rbg
"""
BY_ROWS = {*NAMES.split()}


def check(way, names, num_devices, num_rows):
    found = ways.differences(way, names, num_devices, num_rows)
    assert found.keys() == ({*names} & BY_ROWS if way == "by_rows" else {*names})
    assert {name: value for name, value in found.items() if not value <= ways.LIMIT} == {}


@pytest.mark.parametrize(
    ("way", "num_devices", "num_rows"),
    [
        ("fit", 8, 24),
        pytest.param("loop", 3, 11, marks=pytest.mark.rest),
        pytest.param("predict", 2, 11, marks=pytest.mark.rest),
        pytest.param("run", 2, 11, marks=pytest.mark.rest),
    ],
)
def test_operations_at_risk_equal_one_device(way, num_devices, num_rows):
    check(way, AT_RISK, num_devices, num_rows)


@pytest.mark.rest
@pytest.mark.parametrize(("num_devices", "num_rows"), [(3, 11), pytest.param(8, 24, marks=pytest.mark.long)])
def test_these_operations_are_split_by_rows(num_devices, num_rows):
    plans = ways.split_by_rows(plan_of, OPERATIONS, ways.data(num_rows), num_devices)
    assert plans.keys() == BY_ROWS


# (`predict` and `run` are easier to get right; gradients fail more often. `table.py` has all combinations.)
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
    """If float32 rounds the rows in a layer, operations on their last bits differ everywhere."""
    names = [*AT_RISK, "hash_rows", "population_count", "bits_of_neighbours"]
    found = ways.differences("predict", names, 2, 11, is_exact=False)
    apart = [name for name, value in found.items() if value > ways.LIMIT]
    alone = ways.rounding("predict", apart, 2, 11, is_exact=False)
    assert set(apart) >= {"hash_rows", "population_count"}
    assert all(alone[name] > found[name] / 2 for name in apart)
