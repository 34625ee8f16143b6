"""Public classes and functions show the name that users write, and modules list no other."""

import importlib
import inspect
import pickle
import subprocess
import sys
import typing

import pytest

import replicax as rx
from replicax import errors

MODULES = [
    "replicax",
    "checkpoint",
    "cluster_resolver",
    "config",
    "coordinator",
    "data",
    "errors",
    "experimental",
    "experimental.layouts",
    "experimental.partitioners",
    "experimental.rpc",
    "keras",
    "keras.callbacks",
    "nn",
    "optax",
    "planning",
    "ray",
    "summary",
    "summary.experimental",
    "testing",
    "tpu",
    "tpu.experimental",
]
MODULES = ["replicax", *(f"replicax.{name}" for name in MODULES[1:])]


def names_of(module):
    return [(name, getattr(module, name)) for name in module.__all__]


@pytest.mark.parametrize("path", MODULES)
def test_classes_and_functions_show_a_public_name(path):
    module = importlib.import_module(path)
    for name, value in names_of(module):
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        assert "_src" not in value.__module__, (name, value.__module__)
        if value.__module__.startswith("replicax"):
            home = importlib.import_module(value.__module__)
            assert getattr(home, value.__qualname__) is value, name
            assert pickle.loads(pickle.dumps(value)) is value


@pytest.mark.parametrize("path", MODULES)
def test_dir_lists_public_names_only(path):
    module = importlib.import_module(path)
    assert dir(module) == sorted(module.__all__)


def test_errors_show_replicax_errors_when_first_raised():
    script = "import replicax as rx\nrx.RunOptions(donate_args='x')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "\nreplicax.errors.InvalidArgumentError: " in done.stderr


def test_names_are_found_without_the_table_of_the_migration():
    program = (
        "import sys, replicax as rx; rx.data; rx.coordinator; rx.experimental; rx.Server; rx.MirroredStrategy; "
        "print([name for name in sys.modules if '_migrate' in name])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


def test_pickles_by_the_private_path_still_load():
    assert pickle.loads(b"creplicax._src.vocabulary.errors\nKerasLossError\n.") is errors.KerasLossError


@pytest.mark.parametrize("cls", [rx.RunOptions, rx.InputOptions, rx.MirroredStrategy])
def test_annotations_are_found_though_a_class_names_its_public_module(cls):
    assert typing.get_type_hints(cls) is not None


@pytest.mark.parametrize("path", MODULES)
def test_no_class_shows_another_source(path):
    """Python looks for a class in the file of the module that it names, which only re-exports it; its methods have the
    right place."""
    for _, cls in names_of(importlib.import_module(path)):
        if inspect.isclass(cls) and cls.__module__.startswith("replicax"):
            with pytest.raises(OSError, match=r"not available|not find class"):
                inspect.getsource(cls)


def test_the_source_of_a_method_is_found():
    assert inspect.getsource(rx.MirroredStrategy.run).startswith("    def run(\n")


def test_methods_of_the_strategy_name_the_class():
    """Most of them are defined in classes that it consists of. Python's errors about wrong calls, and pickles, name it."""
    methods = [getattr(rx.Strategy, name) for name in dir(rx.Strategy) if not name.startswith("_")]
    functions = [method for method in methods if inspect.isfunction(method)]
    assert {function.__qualname__.partition(".")[0] for function in functions} == {"Strategy"}
    assert all(pickle.loads(pickle.dumps(function)) is function for function in functions)
    with pytest.raises(TypeError, match=r"^Strategy\.experimental_distribute_dataset\(\) missing 1 required"):
        rx.get_strategy().experimental_distribute_dataset()
