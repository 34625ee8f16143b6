"""replicax gives TensorFlow's results, case by case; it differs on purpose where the design says so."""

import json
from pathlib import Path

import pytest

import replicax as rx
from parity_cases import CASES
from parity_cases.differences import DIFFERENCES, OPEN
from parity_cases.observing import observe, same
from parity_cases.replicax_side import ReplicaxSide

CASES_IN_RECORDING = json.loads(Path(__file__).with_name("recorded.json").read_text())["cases"]
SAME = [name for name in CASES if name not in DIFFERENCES and name not in OPEN]


@pytest.fixture(autouse=True)
def no_strategy_is_left():
    yield
    rx.experimental_set_strategy(None)


def run(name):
    case = CASES[name]
    if name.startswith("training.keras"):
        pytest.importorskip("keras")
    if "_of_range" in name:
        pytest.importorskip("grain")
    side = ReplicaxSide(case.on)
    return observe(case.run(side), side.distributed_values)


def explain(name, seen, wanted):
    recorded = CASES_IN_RECORDING[name]
    lines = {"replicax": seen, "wanted": wanted, "TensorFlow": recorded["gave"], "spec": recorded["spec"]}
    return "\n".join([name, *(f"  {who}: {json.dumps(what)}" for who, what in lines.items())])


def is_long(name):
    """Trainings on one replica, if those on two run here too."""
    case, _, on = name.rpartition("@")
    return case.startswith("training.") and on == "S1" and f"{case}@S2" in CASES


def is_rest(name):
    """Trainings, which other tests compare too; and cases that also run here on two replicas."""
    case, _, on = name.rpartition("@")
    return case.startswith("training.") or (on in ("S1", "S3", "S4", "C2") and f"{case}@S2" in CASES)


def marks_of(name):
    return [pytest.mark.long] * is_long(name) + [pytest.mark.rest] * is_rest(name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in SAME])
def test_same_as_tensorflow(name):
    seen, wanted = run(name), CASES_IN_RECORDING[name]["gave"]
    assert same(seen, wanted, CASES[name].rtol), explain(name, seen, wanted)


@pytest.mark.parametrize("name", sorted(DIFFERENCES))
def test_differs_on_purpose(name):
    difference = DIFFERENCES[name]
    wanted = CASES_IN_RECORDING[difference.like]["gave"] if difference.like else difference.gives
    seen = run(name)
    assert same(seen, wanted, CASES[name].rtol), f"{difference.row}\n{explain(name, seen, wanted)}"
