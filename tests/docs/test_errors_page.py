"""docs/reference/errors.md has an entry for every exception, and no other entry."""

import importlib
import pathlib
import pkgutil
import re

import pytest

import replicax
from replicax._src.vocabulary.errors import ReplicaxError

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "reference" / "errors.md").read_text()
ENTRIES = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
TREE = PAGE.split("```")[1]

for module in pkgutil.walk_packages(replicax.__path__, "replicax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def with_subclasses(cls: type) -> list[type]:
    return [cls, *(c for sub in cls.__subclasses__() for c in with_subclasses(sub))]


CLASSES = {cls.__name__: cls for cls in with_subclasses(ReplicaxError)}


@pytest.mark.parametrize("name", CLASSES)
def test_every_exception_has_an_entry_and_stands_in_the_tree(name):
    assert ENTRIES.count(name) == 1
    assert re.search(rf"\b{name}\b", TREE)


def test_there_are_no_entries_for_exceptions_that_do_not_exist():
    assert set(ENTRIES) <= set(CLASSES)


def test_every_entry_says_something():
    for entry in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        assert len(entry.split()) > 8, entry


def test_the_tree_names_the_built_in_exceptions_truly():
    for name, builtin in re.findall(r"(\w+) \((\w+)\)", TREE):
        assert issubclass(CLASSES[name], getattr(__import__("builtins"), builtin)), name
