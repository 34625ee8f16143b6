"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import flax.nnx  # noqa: F401
import keras  # noqa: F401
import pytest

import replicax
from replicax._src.bridges import ensure_bridges

ensure_bridges()  # a bridge is imported once its framework has been, as by a user, and never first

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(replicax.__path__, "replicax.")
    if not info.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not results.failed
