"""The examples in docstrings run."""

import doctest
import importlib
import inspect
import pkgutil

import flax.nnx  # noqa: F401
import keras  # noqa: F401
import pytest

import replicax
from replicax._src.values.framework import use_imported

use_imported()  # a bridge is imported once its framework has been, as by a user, and never first

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(replicax.__path__, "replicax.")
    if not info.name.endswith("__main__")
)


class Finder(doctest.DocTestFinder):
    """Finds the objects that a module defines, also classes that show their public module, and wrapped methods."""

    def _from_module(self, module, object):
        if inspect.isclass(object):
            return getattr(module, object.__name__, None) is object and is_defined_in(module, object)
        return super()._from_module(module, inspect.unwrap(object) if inspect.isfunction(object) else object)


def is_defined_in(module, cls):
    if cls.__module__ == module.__name__:
        return True
    own = [inspect.unwrap(value) for value in vars(cls).values() if inspect.isfunction(value)]
    return any(fn.__code__.co_filename == module.__file__ for fn in own)


def examples_of(name):
    return [test for test in Finder().find(importlib.import_module(name)) if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples_of(name):
        assert not runner.run(test).failed


def test_examples_of_public_classes_are_found():
    replicax.Variable  # it says its public name from now on
    assert [test.name for test in examples_of("replicax._src.variables.variable")]
