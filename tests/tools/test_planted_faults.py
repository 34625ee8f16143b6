"""The lists of planted faults fit the sources, so that `make planted-faults` can run each of them."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import planted_faults
from planted_faults import ROOT, Fault

FOLDERS = {"core": "src/replicax/_src/", "servers": "src/replicax/_ps/"}
FAULTS = {name: planted_faults.read_faults(name) for name in planted_faults.LISTS}
ALL = [fault for faults in FAULTS.values() for fault in faults]


def test_each_fault_changes_one_place_of_its_part_and_compiles():
    for name, faults in FAULTS.items():
        for fault in faults:
            assert fault.file.startswith(FOLDERS[name]), fault.name
            text = fault.text()
            assert text != (ROOT / fault.file).read_text(), fault.name
            compile(text, fault.file, "exec")


def test_each_fault_names_tests_that_exist():
    for fault in ALL:
        path, _, function = fault.tests.partition("::")
        assert (ROOT / path).exists(), fault.name
        assert not function or f"def {function.partition('[')[0]}(" in (ROOT / path).read_text(), fault.name


def test_all_faults_have_names_of_their_own():
    assert max(Counter(fault.name for fault in ALL).values()) == 1


@pytest.mark.parametrize("name", planted_faults.LISTS)
def test_each_list_has_thirty_faults_and_equivalent_ones_have_a_reason(name):
    faults = FAULTS[name]
    assert sum(not fault.is_equivalent for fault in faults) >= 30
    assert all(fault.kind in ("", "equivalent") for fault in faults)
    assert all(bool(fault.reason) == fault.is_equivalent for fault in faults)


@pytest.fixture
def linked(tmp_path):
    """A file, and a tree with a hard link to it."""
    root, tree = tmp_path / "root", tmp_path / "tree"
    for folder in (root, tree):
        folder.mkdir()
    (root / "rule.py").write_text("limit = 1\n")
    (tree / "rule.py").hardlink_to(root / "rule.py")
    return root, tree


def test_a_fault_is_planted_in_the_tree_only_and_taken_out_again(linked):
    root, tree = linked
    fault = Fault("limit", "The limit is two.", "rule.py", "limit = 1", "limit = 2", "tests")
    with planted_faults.planted(fault, tree, root):
        assert (tree / "rule.py").read_text() == "limit = 2\n"
        assert (root / "rule.py").read_text() == "limit = 1\n"
    assert (tree / "rule.py").samefile(root / "rule.py")


@pytest.mark.parametrize("old", ["limit = 3", "i"])
def test_an_old_text_that_does_not_occur_once_is_an_error(linked, old):
    root, _ = linked
    with pytest.raises(ValueError, match="not once"):
        Fault("limit", "", "rule.py", old, "x", "tests").text(root)


def test_the_test_that_failed_is_read_from_pytests_summary():
    output = "..F\nFAILED tests/a.py::test_b[x y-1] - AssertionError: 1 - 2\nERROR tests/c.py - ImportError\n1 failed"
    assert planted_faults.failed_tests(output) == ["tests/a.py::test_b[x y-1]", "tests/c.py"]
