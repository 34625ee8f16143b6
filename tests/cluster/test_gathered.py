"""The values of an all-gather: a position among them is no number of a task, because tasks may have died."""

import ast
import pathlib

from replicax._src.cluster.gathered import GatheredValues
from replicax._src.cluster.leading import value_of_leader

SOURCES = pathlib.Path(__file__).parents[2] / "src/replicax"
# Figures are those of all tasks.
OF_ALL_TASKS = [SOURCES / "_src/status/job.py"]
NAMES = tuple(f"worker {number}" for number in range(4))


def test_values_are_named_by_the_tasks_that_gave_them():
    found = GatheredValues(["a", "c", "d"], (0, 2, 3), NAMES, 2)
    assert found.named() == [("worker 0", "a"), ("worker 2", "c"), ("worker 3", "d")]
    assert found[found.own] == "c"
    assert found.with_values([1, 2, 3]).named()[1] == ("worker 2", 2)


def test_value_of_a_leader_that_died_is_that_of_the_next_one():
    rounds = iter([[None, None], [None, ["of 3"]]])

    def gather(value):
        value()
        return next(rounds)

    assert value_of_leader(gather, lambda: False, lambda: "own") == "of 3"


def is_of_peers(node, attribute):
    """True for ``peers.names``, ``self._peers.number`` and so on."""
    if not isinstance(node, ast.Attribute) or node.attr != attribute:
        return False
    owner = node.value
    return getattr(owner, "attr", getattr(owner, "id", "")).lstrip("_") == "peers"


def is_wrong(node, path):
    """True for the names of all tasks beside other values, and for a task's number as a position in a list that is
    not one of all tasks.
    """
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "zip":
        return any(is_of_peers(argument, "names") for argument in node.args)
    if not isinstance(node, ast.Subscript) or not is_of_peers(node.slice, "number"):
        return False
    return not is_of_peers(node.value, "names") and path not in OF_ALL_TASKS


def test_no_source_takes_a_position_among_gathered_values_for_the_number_of_a_task():
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}"
        for path in sorted(SOURCES.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if is_wrong(node, path)
    ]
    assert found == [], "use GatheredValues.named(), .names, .numbers or .own"
