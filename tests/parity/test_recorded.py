"""The recording is complete and up to date with the cases, and the comparison works."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from parity_cases import CASES
from parity_cases.differences import DIFFERENCES, OPEN
from parity_cases.observing import Raised, attempt, observe, same

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
GAVE = {name: entry["gave"] for name, entry in RECORDED["cases"].items()}
# The cases of the specification's table that one process can show.
SPEC = [
    *range(1, 13),
    14,
    *range(17, 26),
    27,
    29,
    31,
    32,
    33,
    34,
    *range(37, 42),
    43,
    45,
    46,
    47,
    48,
    49,
    51,
    53,
]
SPEC += [54, 55, 56, 59, 60, 61, 63, 65, 67, 68, 69]
SPEC += [85, 95, 96]


def test_every_case_is_recorded():
    assert sorted(CASES) == list(GAVE), "run record.py with a Python that has TensorFlow"


@pytest.mark.parametrize("number", SPEC)
def test_spec_case_has_a_program(number):
    assert any(number in case.spec for case in CASES.values())


@pytest.mark.parametrize("name", sorted(DIFFERENCES))
def test_recorded_difference_is_a_difference(name):
    difference = DIFFERENCES[name]
    gives = GAVE[difference.like] if difference.like else difference.gives
    assert not same(gives, GAVE[name], CASES[name].rtol), "TensorFlow gave the same: no difference"


def test_open_cases_exist_and_are_not_differences():
    assert set(OPEN) <= set(CASES)
    assert not set(OPEN) & set(DIFFERENCES)


def test_no_case_met_a_broken_collective():
    broken = re.compile("Collective ops is aborted|joining a group|restart", re.IGNORECASE)
    assert [name for name, gave in GAVE.items() if broken.search(json.dumps(gave))] == []


def test_recording_names_no_place_and_no_mistake_of_ours():
    ours = re.compile(r"/tmp|/home|/work|site-packages|Side' object")
    assert [name for name, gave in GAVE.items() if ours.search(json.dumps(gave))] == []


def test_versions_are_named():
    assert RECORDED["tensorflow"].startswith("2.21.")
    assert RECORDED["keras"].startswith("3.")


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (np.float32(0.1), 0.1),
        (np.float32([[1, np.nan]]), [[1.0, "nan"]]),
        (np.int32([1, 2]), [1, 2]),
        (np.float64(0.5), {"dtype": "float64", "value": 0.5}),
        (np.int64([3]), {"dtype": "int64", "value": [3]}),
        (np.bool_(True), True),
        ((1, [None, "a"]), {"tuple": [1, [None, "a"]]}),
        (
            Raised(("KeyError", "LookupError", "Exception"), "m"),
            {"raises": "KeyError", "is_a": ["LookupError"], "message": "m"},
        ),
    ],
)
def test_observation(value, seen):
    assert observe(value, lambda x: None) == seen


def test_observation_of_values_per_replica():
    class Two:
        pass

    seen = observe({"a": Two()}, lambda x: (1.0, 2.0) if isinstance(x, Two) else None)
    assert seen == {"a": {"per_replica": [1.0, 2.0]}}


@pytest.mark.parametrize(
    ("seen", "wanted", "expected"),
    [
        (1.0, 1.0 + 1e-8, True),
        (1.0, 1.1, False),
        (1.0, 1, False),
        (True, 1, False),
        ("nan", "nan", True),
        ("nan", 1.0, False),
        ([1.0], [1.0, 2.0], False),
        ([1.0], {"tuple": [1.0]}, False),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}, False),
        ({"dtype": "float64", "value": 1.0}, 1.0, False),
    ],
)
def test_comparison(seen, wanted, expected):
    assert same(seen, wanted, rtol=1e-6) is expected


def test_error_is_compared_by_built_in_type():
    def fail():
        raise NotImplementedError("text")

    seen = observe(attempt(fail), lambda x: None)
    accepted = ["NotImplementedError", "RuntimeError", "AssertionError", "AttributeError"]
    for kind in [*accepted, "ValueError", "TypeError"]:
        assert same(seen, {"raises": kind, "is_a": []}, rtol=0) is (kind in accepted)
    assert same(seen, {"raises": "InvalidArgumentError", "is_a": ["OpError"]}, rtol=0)
    assert not same(1.0, {"raises": "AssertionError", "is_a": []}, rtol=0)
    assert not same(seen, 1.0, rtol=0)
