"""The parts of Keras without a public name: the check of the installed version, and the one file that uses them."""

import ast
import functools
import itertools
import re
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import replicax as rx
from checks import in_a_process_of_its_own, message
from replicax._src.keras import bridge, internals

PACKAGE = Path(rx.__file__).parent


def test_installed_keras_has_all_parts_and_the_check_takes_milliseconds_and_no_backend():
    program = """
    import time
    import keras
    from jax._src import xla_bridge
    import replicax as rx
    from replicax._src.keras import bridge, internals
    bridge.install()
    assert not xla_bridge.backends_are_initialized()
    seconds = []
    for _ in range(5):
        began = time.process_time()
        internals.check()
        seconds.append(time.process_time() - began)
    assert not xla_bridge.backends_are_initialized()
    print(min(seconds))
    """
    assert float(in_a_process_of_its_own(program, "-W", "error")) < 0.1  # 3 to 8 ms on a quiet machine


def test_check_changes_nothing_in_keras():
    before = keras.layers.Dense(1).name, keras.Sequential().name
    state = np.random.get_state()[1].tolist()
    internals.check()
    assert np.random.get_state()[1].tolist() == state
    number = int(before[0].rpartition("_")[2] or 0) if "_" in before[0] else 0
    assert keras.layers.Dense(1).name == f"dense_{number + 1}"
    assert not rx.has_strategy()


def test_check_passes_in_a_layer_while_a_model_is_built():
    """Keras computes the shapes of outputs in scopes of its own, and casts variables in mixed precision."""

    class Checks(keras.layers.Layer):
        def call(self, x):
            scope = internals.current_scope()
            internals.check()
            assert scope is not None
            assert internals.current_scope() is scope
            assert internals.in_symbolic_scope()
            return x

    Checks(dtype="mixed_float16")(keras.Input((2,)))


def owner_of(cls, name):
    """Returns the class of Keras that defines a method."""
    return next(c for c in cls.__mro__ if name in vars(c) and c.__module__.startswith("keras."))


def other_arguments(self, something_else):
    """A method with other arguments than replicax needs."""


def replaced(cls, name, value=other_arguments):
    return lambda patch: patch.setattr(owner_of(cls, name), name, value)


def called_twice(method):
    """A loop of a version that makes its passes twice."""

    def doctor(patch):
        owner = owner_of(keras.Model, method)
        original = vars(owner)[method]

        def twice(self, *args, **kwargs):
            if self._initial_epoch is None:
                original(self, *args, **kwargs)
            return original(self, *args, **kwargs)

        twice.__module__ = original.__module__  # a function of Keras, and no wrapper of another package
        patch.setattr(owner, method, twice)

    return doctor


def adds_twice_the_loss(patch):
    original = keras.Layer.add_loss
    patch.setattr(keras.Layer, "add_loss", lambda self, loss: original(self, 2 * loss))


def makes_no_first_values(patch):
    variables = pytest.importorskip("keras.src.backend.common.variables")
    patch.setattr(variables, "initialize_all_variables", lambda: None)


def shuffles_by_itself(name):
    """Adapters whose order comes from nothing that a checkpoint saves."""

    def doctor(patch):
        adapter = getattr(pytest.importorskip(f"keras.src.trainers.data_adapters.{name}"), CLASS_OF[name])
        original, orders = adapter.get_jax_iterator, itertools.count()

        def get_jax_iterator(self, **options):
            batches = list(original(self, **options))
            return iter(np.roll(batches, next(orders), 0) if len(batches) == 32 else batches)

        patch.setattr(adapter, "get_jax_iterator", get_jax_iterator)

    return doctor


CLASS_OF = {"array_data_adapter": "ArrayDataAdapter", "py_dataset_adapter": "PyDatasetAdapter"}
DOCTORED = {
    "keras.Variable (": replaced(keras.Variable, "_maybe_autocast", lambda self, value: value + 1),
    "keras.Variable._deferred_initialize": makes_no_first_values,
    "keras.StatelessScope (": replaced(keras.Variable, "value", property(lambda self: self._value)),
    "keras.Variable.assign": replaced(keras.Variable, "assign"),
    "keras.SymbolicScope": lambda patch: patch.setattr(internals, "in_symbolic_scope", lambda: False),
    "keras.ops.sparse_categorical_crossentropy": lambda patch: patch.setattr(
        keras.ops, "sparse_categorical_crossentropy", lambda *labels, **options: None
    ),
    "keras.Layer (": replaced(keras.Layer, "_flatten_layers"),
    "keras.Layer._maybe_build": replaced(keras.Layer, "_maybe_build"),
    "the loss of activity regularizers": adds_twice_the_loss,
    "keras.optimizers.Optimizer.build": replaced(keras.optimizers.Optimizer, "_get_variable_index"),
    "keras.optimizers.Optimizer._backend_apply_gradients": replaced(
        keras.optimizers.Optimizer, "_backend_apply_gradients"
    ),
    "keras.losses.Loss.__call__": replaced(keras.losses.Loss, "__call__"),
    "keras.Model._get_jax_state": replaced(keras.Model, internals.GET_STATE),
    "keras.Model._purge_model_variables": replaced(keras.Model, "_purge_model_variables"),
    f"keras.Model.{internals.SYNC}": replaced(keras.Model, internals.SYNC),
    f"keras.Model.{internals.BUILD}": replaced(keras.Model, internals.BUILD),
    "keras.Model._initial_epoch": replaced(keras.Model, "fit"),
    "JAXEpochIterator": replaced(internals.Loop, "_enumerate_iterator"),
    "the shuffle of arrays": shuffles_by_itself("array_data_adapter"),
    "the shuffle of a PyDataset": shuffles_by_itself("py_dataset_adapter"),
    "the loop of keras.Model.fit": called_twice("fit"),
    "the loop of keras.Model.evaluate": called_twice("evaluate"),
    "the loop of keras.Model.predict": called_twice("predict"),
    "class_weight_to_sample_weights": lambda patch: patch.setattr(
        internals, "class_weight_to_sample_weights", lambda y, class_weight: y
    ),
    "to_snake_case": lambda patch: patch.setattr(internals, "to_snake_case", str.lower),
    "keras.src.saving.saving_lib": lambda patch: patch.setattr(
        internals.saving_lib.H5IOStore, "__init__", other_arguments
    ),
    "keras.callbacks.ModelCheckpoint": replaced(keras.callbacks.ModelCheckpoint, internals.SHOULD_SAVE),
    "keras.callbacks.BackupAndRestore": replaced(keras.callbacks.BackupAndRestore, internals.SAVE, None),
}


def test_each_part_is_tested():
    for part in internals.PARTS:
        assert [name for name in DOCTORED if part.name.startswith(name)], part.name
    assert len(internals.PARTS) == len(DOCTORED)


@pytest.mark.parametrize("name", DOCTORED)
def test_version_with_another_part_is_an_error_that_names_it(name, monkeypatch):
    DOCTORED[name](monkeypatch)
    with pytest.raises(rx.errors.KerasVersionError) as found:
        internals.check()
    assert f"Keras {keras.__version__} cannot be used: {name}" in str(found.value)
    assert all(version in str(found.value) for version in internals.TRIED)
    monkeypatch.undo()
    internals.check()


def in_a_closure(original):
    def wrapper(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    wrapper.__name__ = original.__name__
    return wrapper


def as_functools_does(original):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    return wrapper


PUBLIC = [
    (keras.Model, "fit"),
    (keras.Model, "evaluate"),
    (keras.Model, "predict"),
    (keras.Variable, "assign"),
    (keras.Layer, "__call__"),
    (keras.losses.Loss, "__call__"),
    (keras.optimizers.Optimizer, "build"),
    (keras.callbacks.ModelCheckpoint, "on_train_batch_end"),
]


@pytest.mark.parametrize("wrap", [in_a_closure, as_functools_does])
@pytest.mark.parametrize(("cls", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value))
def test_public_methods_that_another_package_wraps_are_no_other_version(cls, name, wrap, monkeypatch):
    owner = owner_of(cls, name)
    for _ in range(2):
        monkeypatch.setattr(owner, name, wrap(vars(owner)[name]))
    internals.check()


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_check_does_not_call_the_wrappers_of_other_packages(method, monkeypatch):
    owner, models = owner_of(keras.Model, method), []
    original = vars(owner)[method]

    @functools.wraps(original)
    def logged(self, *args, **kwargs):
        models.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, logged)
    internals.check()
    assert not models


def test_check_runs_while_jax_looks_for_leaked_tracers():
    with jax.checking_leaks():
        internals.check()


def test_first_strategy_that_meets_keras_raises_it_and_changes_nothing(monkeypatch):
    bridge.uninstall()
    monkeypatch.setattr(owner_of(keras.Model, internals.SYNC), internals.SYNC, other_arguments)
    try:
        with pytest.raises(rx.errors.KerasVersionError, match=internals.SYNC):
            rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope().__enter__()
        assert not rx.has_strategy()
        assert all(cls.__module__.startswith("keras.") for cls in keras.Model.__mro__ if cls is not object)
    finally:
        monkeypatch.undo()
        bridge.install()


def test_module_that_keras_no_longer_has_is_an_error_that_names_it():
    text = message(rx.errors.KerasVersionError, lambda: internals._imported("keras.src.nowhere", "Loop"))
    assert "keras.src.nowhere.Loop" in text
    text = message(rx.errors.KerasVersionError, lambda: internals._imported("keras.src.trainers", "Loop"))
    assert "keras.src.trainers.Loop" in text


# --- a rule over the source -----------------------------------------------------------------------------

# backend.py looks for an imported Keras, and must not import it.
USERS_OF_MODULES = {"internals.py", "backend.py"}
# Methods that a class of replicax overrides, or that bridge.py replaces. Keras calls them.
HOOKS = {
    "_get_jax_state",
    "_deferred_initialize",
    "_backend_apply_gradients",
    "_maybe_build",
    "_get_iterator",
}
MARKS = {"_getframe", "_replicax_wrapped"}  # of sys, and of replicax on methods of Keras


def private_names(tree):
    """The private names that a file uses as attributes, and where; and those that it defines."""
    used, own = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch("_[a-z]\\w*", node.attr):
            is_assigned = isinstance(node.ctx, ast.Store)
            is_of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if is_assigned and is_of_self:
                own.add(node.attr)
            else:
                used.append((node.attr, node.lineno, is_of_self))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own |= {target.id for target in targets if isinstance(target, ast.Name)}
    return used, own


def test_only_one_file_uses_parts_of_keras_without_a_public_name():
    trees = {
        file: ast.parse(file.read_text())
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.name not in USERS_OF_MODULES and "keras" in file.read_text()
    }
    of_keras = {
        name for name, *_ in private_names(ast.parse((PACKAGE / "_src/keras/internals.py").read_text()))[0]
    }
    in_folder = {file: tree for file, tree in trees.items() if file.parent == PACKAGE / "_src/keras"}
    own = {name for tree in in_folder.values() for name in private_names(tree)[1]} - of_keras
    wrong = [
        (file.name, number)
        for file in trees
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(r"(import|from) keras\.src|import_module\(.keras\.src", line)
    ]
    for file, tree in in_folder.items():
        used, own_here = private_names(tree)
        wrong += [
            (file.name, line, name)
            for name, line, is_of_self in used
            if name not in own | HOOKS | MARKS and not (is_of_self and name in own_here)
        ]
        wrong += [
            (file.name, node.lineno, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in of_keras - HOOKS
        ]
    assert len(in_folder) > 30
    assert not wrong
