"""The parts of Keras that have no public name, and what replicax needs of them. No other file may use such parts.

``check`` compares each part with the Keras that is installed, by its arguments and by what it does in a small case. So
a version in which a part is different is an error with the name of the part, not other numbers. The small cases make
no array, so that JAX's backend does not start.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any, Final, final

import jax
import keras
import numpy as np

from replicax._src.input.arrays import check_numbers
from replicax._src.keras.overriding import overridden
from replicax._src.packaging.home import install_command
from replicax._src.vocabulary.errors import KerasVersionError

TRIED: Final = ("3.12.0", "3.15.1", "3.16.0.dev2026102704")
"""The versions of Keras with which the tests of replicax have passed."""


def _misfit(part: str, got: str) -> KerasVersionError:
    return KerasVersionError(
        f"Keras {keras.__version__} cannot be used: {part}, which has no public name, is not what replicax needs. {got} "
        f"replicax was tried with Keras {', '.join(TRIED[:-1])} and {TRIED[-1]}. Install a newer replicax, or one of "
        f"these, for example: {install_command(f'keras=={TRIED[-2]}')}"
    )


def _imported(module: str, name: str) -> Any:
    """Returns an object of a module of Keras.

    Raises:
      KerasVersionError: It is not there.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _misfit(f"{module}.{name}", f"It is missing: {error}.") from error


# --- parts that are imported ------------------------------------------------------------------------------

DataAdapter: Any = _imported("keras.src.trainers.data_adapters.data_adapter", "DataAdapter")
"""The base class of objects that Keras's loops take as ``x``."""

Loop: Any = _imported("keras.src.backend.jax.trainer", "JAXEpochIterator")
"""Counts the batches of ``fit``, ``evaluate`` or ``predict``, and makes the iterators over them."""

class_weight_to_sample_weights: Any = _imported(
    "keras.src.trainers.data_adapters.data_adapter_utils", "class_weight_to_sample_weights"
)
current_scope: Any = _imported("keras.src.backend.common.stateless_scope", "get_stateless_scope")
"""Returns the innermost ``keras.StatelessScope``, or None outside of all."""

in_symbolic_scope: Any = _imported("keras.src.backend.common.symbolic_scope", "in_symbolic_scope")
"""True while Keras computes the shapes of outputs."""

_IN_OPS: Final = importlib.util.find_spec("keras.src.backend.jax.ops") is not None

nn: Any = _imported("keras.src.backend.jax.ops" if _IN_OPS else "keras.src.backend.jax", "nn")
"""The functions that losses, metrics and ``keras.ops`` call (3.16: in ``ops``)."""

saving_lib: Any = _imported("keras.src.saving", "saving_lib")
to_snake_case: Any = _imported("keras.src.utils.naming", "to_snake_case")
"""Returns the name that Keras gives to the first layer of a class."""

_global_state: Any = _imported("keras.src.backend.common", "global_state")


# --- variables --------------------------------------------------------------------------------------------


@final
class KerasAccessor:
    """Reads and writes the stored values of Keras variables, without conversion.

    ``value`` and ``assign`` cost 4 µs per variable and step, ``_value`` costs 0.04 µs.
    """

    def get(self, holders: Sequence[Any]) -> list[Any]:
        return [variable._value for variable in holders]

    def set(self, holders: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(holders, values, strict=True):
            variable._value = value

    def late(self, holders: Sequence[Any]) -> None:
        """Returns None: Keras reads its variables unnoticed."""

    def is_built(self, variable: Any) -> bool:
        """True if the variable has a value. Variables made in a ``keras.StatelessScope`` get theirs afterwards."""
        return variable._value is not None


accessor: Final = KerasAccessor()


def stored(variable: Any) -> Any:
    """Returns the stored value of a variable, or None while its ``__init__`` runs."""
    return getattr(variable, "_value", None)


def initializer_of(variable: Any) -> Any:
    """Returns the initializer of a variable that has no value yet."""
    return variable._initializer


def store(variable: Any, value: Any) -> None:
    """Gives a variable its stored value, in place of that of its initializer."""
    variable._value, variable._initializer = value, None


def set_initializer(variable: Any, initializer: Any) -> None:
    """Replaces the initializer of a variable that has no value yet."""
    variable._initializer = initializer


def initialize(variable: Any) -> None:
    """Gives a variable that has no value yet that of its initializer."""
    variable._deferred_initialize()


def stored_dtype(variable: Any) -> Any:
    """Returns the dtype of the stored value, also inside of an autocast scope."""
    return getattr(variable, "_dtype", None) or variable.dtype


def set_shape(variable: Any, shape: tuple[int, ...]) -> None:
    """Makes a variable report another shape."""
    variable._shape = shape


def forget_layout(variable: Any) -> None:
    """Makes Keras store assigned values as they are, not in the layout of the first value."""
    variable._layout = None


def autocast(variable: Any, value: Any) -> Any:
    """Returns the value in the dtype of the current autocast scope."""
    return variable._maybe_autocast(value)


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Leaves all scopes of Keras inside the block."""
    scope = keras.StatelessScope(initialize_variables=False)
    scope.__enter__()
    current, scope.original_scope = scope.original_scope, None
    scope.__exit__()  # no scope is open any more
    try:
        yield
    finally:
        scope.original_scope = current
        scope.__exit__()


_STATE_OF_BUILDING: Final = ("object_name_uids", "uninitialized_variables", "global_seed_generator")


@contextlib.contextmanager
def building_undone() -> Iterator[None]:
    """Restores what building a model changes in Keras's global state: counters of names, variables that await their
    first values, the generator of seeds.
    """
    before = {name: _global_state.get_global_attribute(name) for name in _STATE_OF_BUILDING}
    for name, value in before.items():
        if name != "global_seed_generator" and value is not None:
            _global_state.set_global_attribute(name, value.copy())
    try:
        yield
    finally:
        for name, value in before.items():
            _global_state.set_global_attribute(name, value)


def group_of(store: Any) -> Any:
    """Returns the group of an ``H5IOStore`` that gets the values of the current layer."""
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    return store._h5_entry_group


# --- layers and optimizers --------------------------------------------------------------------------------

ATTRIBUTES_OF_LOOPS: Final = ("_loss_tracker", "_compile_metrics", "_compile_loss", "_functional")
"""Attributes of models with the state of a loop, which restarts each epoch. The last one repeats layers."""

ATTRIBUTES_OF_TRACKERS: Final = (
    "_variables",
    "_trainable_variables",
    "_non_trainable_variables",
    "_layers",
    "_metrics",
)
"""Attributes that list what other attributes hold."""


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """Returns all layers of a model, also those inside of layers."""
    return list(model._flatten_layers(include_self=include_self))


def own_variables(layer: Any) -> list[Any]:
    """Returns the variables of a layer, without those of the layers inside of it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def frozen_variables(model: keras.Layer) -> list[keras.Variable]:
    """Returns the variables that no training changes: those of layers with ``trainable=False``, those that a layer has
    made trainable and are not (LoRA freezes a kernel so), and what ``Normalization`` has computed in ``adapt``.
    """
    frozen: list[keras.Variable] = []
    for layer in layers_of(model):
        is_still = not layer.trainable or isinstance(layer, keras.layers.Normalization)
        own = own_variables(layer) if is_still else layer._trainable_variables
        frozen += [each for each in own if is_still or not each.trainable]
    return frozen


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables that a built optimizer trains."""
    return optimizer._trainable_variables


def accumulators_of(optimizer: Any) -> list[Any]:
    """Returns the variables in which an optimizer accumulates gradients; none before it is built."""
    return getattr(optimizer, "_accumulated_gradients", [])


def accumulator_of(optimizer: Any, variable: Any) -> Any:
    """Returns the variable in which an optimizer accumulates the gradients of a variable."""
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def num_small_batches(optimizer: Any) -> Any:
    """Returns the number of gradients that an optimizer has received; ``iterations`` counts its updates."""
    return optimizer._iterations.value


SOURCE_OF_LAYER: Final = inspect.getfile(keras.Layer)
"""The file that adds the losses of activity regularizers."""


@functools.cache
def adds_sums() -> bool:
    """True if the loss of an activity regularizer is its sum over the rows (Keras 3.12), not their mean (3.15)."""
    return _activity_loss()[0]


# --- the loops of fit, evaluate and predict ---------------------------------------------------------------

GET_STATE: Final = "_get_jax_state"
"""The method of models that gives a loop their state."""


def _first_name(owner: Any, *names: str) -> str:
    return next((name for name in names if getattr(owner, name, None) is not None), names[-1])


SYNC: Final = _first_name(keras.Model, "state_sync", "jax_state_sync")
"""The method of models that takes their state back from a loop (3.16: ``state_sync``)."""

BUILD: Final = _first_name(keras.Model, "_maybe_symbolic_build", "_symbolic_build")
"""The method of models that ``fit`` and ``evaluate`` call with their loop as ``iterator`` before it starts."""


def sync(model: Any) -> None:
    """Gives the variables their values, which are in a loop while it runs."""
    getattr(model, SYNC)()


def purge(model: Any, **groups: bool) -> None:
    """Makes the variables of these groups empty."""
    model._purge_model_variables(**groups)


def initial_epoch(model: Any) -> Any:
    """Returns the epoch in which the next ``fit`` starts; None if its argument decides."""
    return model._initial_epoch


def set_initial_epoch(model: Any, epoch: Any) -> None:
    """Makes the next ``fit`` start in this epoch."""
    model._initial_epoch = epoch


def num_taken(loop: Any) -> int:
    """Returns the number of batches that a loop has taken in this pass."""
    return loop._steps_seen


def set_num_taken(loop: Any, num_batches: int) -> None:
    """Sets the number of batches that a loop has taken in this pass."""
    loop._steps_seen = num_batches


def has_pass(loop: Any) -> bool:
    """True if a loop with ``steps_per_epoch`` continues its pass in the next epoch."""
    return loop._current_iterator is not None


def length(loop: Any) -> int | None:
    """Returns the number of batches after which a loop ends a pass; None if it ends with the data."""
    return loop._num_batches


def set_length(loop: Any, num_batches: int | None) -> None:
    """Sets the number of batches after which a loop ends a pass. None makes it count them again."""
    loop._num_batches = num_batches


def num_in_element(loop: Any) -> int:
    """Returns the number of batches in an element of a loop's iterator. Keras 3.16 stacks those of
    ``steps_per_execution``, unless ``placing_batches`` prevents it.
    """
    is_stacked = "super_batch" in _arguments(DataAdapter.get_jax_iterator) and not _local.places_batches
    return max(1, loop.steps_per_execution) if is_stacked else 1


def pass_number(loop: Any) -> int | None:
    """Returns the number from which Keras shuffles the next pass (3.16); None if it draws random numbers for it."""
    return getattr(loop.data_adapter, "_epoch", None)


def set_pass_number(loop: Any, number: int | None) -> None:
    """Sets the number from which Keras shuffles the next pass, where it uses one."""
    if number is not None and pass_number(loop) is not None:
        loop.data_adapter._epoch = number


class _Local(threading.local):
    """True while this thread runs a loop whose steps place their batches."""

    places_batches = False


_local = _Local()


def placing_batches(is_on: bool) -> contextlib.AbstractContextManager[None]:
    """Makes loops in the block give their steps each batch as the data have it, one by one.

    Otherwise Keras moves batches to a device before the step (3.12 and 3.16 on CPU too), which changes 64-bit numbers
    without an error, and stacks those of ``steps_per_execution`` (3.16).
    """
    return overridden(_local, places_batches=is_on)


def wrapped_get_iterator(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps the method of loops that makes an iterator, for ``placing_batches``."""

    def _get_iterator(self: Any) -> Any:
        if not _local.places_batches:
            return original(self)
        return _first_checked(self.data_adapter.get_jax_iterator())

    return _get_iterator


def _first_checked(batches: Iterable[Any]) -> Iterator[Any]:
    """Yields batches. Keras's error for text names neither the array nor a remedy."""
    batches = iter(batches)
    for batch in batches:
        check_numbers(batch, "batch")
        yield batch
        break
    yield from batches


# --- callbacks --------------------------------------------------------------------------------------------

SHOULD_SAVE: Final = "_should_save_on_batch"
"""The method of callbacks that save files: True if they save after this batch."""

SAVE: Final = "_save_model"
"""The method of callbacks that save files: saves."""


def should_save(callback: Any) -> Callable[[int], bool]:
    """Returns a callback's method ``SHOULD_SAVE``."""
    return callback._should_save_on_batch


# --- what the parts must look like -------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class KerasPart:
    """A part of Keras and a small case of it.

    Attributes:
      name: The part, as the error names it.
      case: Returns what the part gives here.
      allowed: What it may give.
    """

    name: str
    case: Callable[[], Any]
    allowed: tuple[Any, ...]


def check() -> None:
    """Compares all parts with the Keras that is installed.

    Raises:
      KerasVersionError: A part is missing, has other arguments or does something else.
    """
    with building_undone(), jax.check_tracer_leaks(False):  # a small case looks at what a trace holds
        for part in PARTS:
            try:
                # The first strategy, or ``rx.cond`` in a layer, may meet Keras while a model is built in scopes.
                with outside_scopes():
                    got = part.case()
            except Exception as error:
                raise _misfit(part.name, f"A small case failed: {type(error).__name__}: {error}.") from error
            if got not in part.allowed:
                needed = " or ".join(map(repr, part.allowed))
                raise _misfit(part.name, f"A small case gave {got!r}, and replicax needs {needed}.")


def _arguments(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(_unwrapped(function)).parameters)


def _names(code: CodeType) -> frozenset[str]:
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(code.co_freevars, *inner)


def _mentions(function: Any, *names: str) -> bool:
    """True if the code of a function uses all these attributes."""
    return {*names} <= _names(_unwrapped(function).__code__)


def _own_method(owner: type, name: str) -> Any:
    """Returns Keras's method of a class. Classes of replicax come first among the bases of some."""
    return next(vars(cls)[name] for cls in owner.__mro__ if name in vars(cls) and _is_of_keras(cls))


def _unwrapped(method: Any) -> Any:
    """Returns Keras's method behind wrappers of other packages, which hold it in a closure or a global variable.

    Tools that log a training replace public methods, such as ``keras.Model.fit``, in this way.
    """
    for _ in range(_MAX_WRAPPERS):
        method = inspect.unwrap(method)
        if not inspect.isfunction(method) or _is_of_keras(method):
            break
        held = inspect.getclosurevars(method)
        values = (*held.nonlocals.values(), *held.globals.values())
        method = next(
            (each for each in values if inspect.isfunction(each) and each.__name__ == method.__name__), method
        )
    return method


_MAX_WRAPPERS: Final = 8


def _is_of_keras(definition: Any) -> bool:
    return definition.__module__.partition(".")[0] == "keras"


def _no_value(shape: Any, dtype: Any = None) -> Any:
    raise AssertionError("the small case of a variable needs no value")


def _variable_case() -> list[Any]:
    variable = _variable()
    got: list[Any] = [stored(variable), initializer_of(variable) is _no_value, stored_dtype(variable)]
    got += [variable._shape, getattr(variable, "_layout", "missing")]
    value = np.ones(2, np.float32)
    accessor.set([variable], [value])
    set_shape(variable, (3,))
    got += [variable.value is value, autocast(variable, value) is value, tuple(variable.shape)]
    return got


def _variable() -> Any:
    with keras.StatelessScope(initialize_variables=False):
        # Without autocast, a layer in mixed precision around the check makes no difference.
        return keras.Variable(_no_value, shape=(2,), dtype="float32", autocast=False, name="checked")


def _first_values_case() -> list[str]:
    """Lists the variables to which Keras gives first values when a scope ends."""
    calls: list[str] = []
    _global_state.set_global_attribute("uninitialized_variables", [])
    with keras.StatelessScope():
        variable = keras.Variable(_no_value, shape=(2,), dtype="float32", name="checked")
        variable.__dict__["_deferred_initialize"] = lambda: calls.append(variable.name)
    return calls


class _RecordingScope(keras.StatelessScope):
    """Records the reads, and the losses with the function that adds them."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.reads: list[Any] = []
        self.added: list[Any] = []
        self.adders: list[CodeType] = []

    def get_current_value(self, variable: Any) -> Any:
        self.reads.append(variable)
        return np.zeros(2, np.float32)

    def add_loss(self, loss: Any) -> None:
        adder = sys._getframe(2)
        self.added.append(loss)
        self.adders.append(adder.f_code)


def _scopes_case() -> list[Any]:
    variable = _variable()
    scope, inner = keras.StatelessScope(initialize_variables=False), _RecordingScope()
    with scope, inner:
        got: list[Any] = [current_scope() is inner, inner.original_scope is scope]
        with outside_scopes():
            got.append(current_scope())
        got.append(current_scope() is inner)
        _own_method(keras.Variable, "value").fget(variable)
    return [*got, [read is variable for read in inner.reads]]


def _symbolic_scope_case() -> bool:
    with keras.SymbolicScope():
        return in_symbolic_scope()


def _sparse_categorical_case() -> Any:
    """Returns the arguments that ``keras.ops`` gives the function that ``bridge.py`` replaces."""

    def called(target: Any, output: Any, **options: Any) -> Any:
        return target, output, options

    with overridden(nn, sparse_categorical_crossentropy=called):
        return keras.ops.sparse_categorical_crossentropy(1, 2, from_logits=True, axis=-1)


def _activity_loss() -> tuple[bool, bool]:
    """Returns True if Keras adds what an activity regularizer returns, and True if ``Layer.__call__`` adds it."""
    returned: list[Any] = []

    def regularizer(outputs: Any) -> Any:
        returned.append(keras.ops.sum(outputs))
        return returned[-1]

    layer = keras.layers.Identity(activity_regularizer=regularizer, name="checked")
    scope = _RecordingScope()

    def call(inputs: Any) -> Any:
        with scope:
            return layer(inputs)

    jax.eval_shape(call, jax.ShapeDtypeStruct((4, 1), np.float32))
    (added,), (adder,) = scope.added, scope.adders
    is_own = adder.co_name == "__call__" and adder.co_filename == SOURCE_OF_LAYER
    return added is returned[0], is_own


def _layer_case() -> list[Any]:
    model = _CheckedModel()
    own = vars(model.inner)
    return [
        [layer.name for layer in layers_of(model)],
        [layer.name for layer in layers_of(model, include_self=False)],
        own_variables(model.inner),
        [name for name in ATTRIBUTES_OF_TRACKERS[1:] if name not in own],
        [name for name in ATTRIBUTES_OF_LOOPS[:3] if name not in vars(model)],
    ]


class _Held:
    """A variable of ``_CheckedModel``: a number."""

    def __init__(self) -> None:
        self._value: int | None = 1

    @property
    def value(self) -> int | None:
        return self._value

    def assign(self, value: int) -> None:
        self._value = value


class _CheckedModel(keras.Model):
    """A model with one number in each group of variables."""

    def __init__(self) -> None:
        super().__init__(name="checked_model")
        self.inner = keras.layers.Identity(name="checked_layer")
        self.held = {name: _Held() for name in ("trainable", "non_trainable", "optimizer", "metrics")}
        self.optimizer = SimpleNamespace(variables=[self.held["optimizer"]])
        self.built = self.inner.built = self.compiled = True
        self.steps_per_execution = 2

    trainable_variables = property(lambda self: [self.held["trainable"]])
    non_trainable_variables = property(lambda self: [self.held["non_trainable"]])
    metrics_variables = property(lambda self: [self.held["metrics"]])
    metrics = property(lambda self: [])

    def call(self, inputs: Any) -> Any:
        return inputs


class _CheckedData(DataAdapter):
    """Three batches, of 2, 2 and 1 rows. It lists what a loop asks for."""

    num_batches, batch_size, has_partial_batch, partial_batch_size, builtin_prefetch = 3, 2, True, 1, False

    def __init__(self, events: list[Any]):
        self._events = events

    def get_jax_iterator(self) -> Iterator[Any]:
        yield from (np.zeros((rows, 1), np.float32) for rows in (2, 2, 1))

    def on_epoch_begin(self) -> None:
        self._events.append("begin")

    def on_epoch_end(self) -> None:
        self._events.append("end")


_GROUPS: Final = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


def _loop_case(method: str, function: str, groups: Sequence[str]) -> list[Any]:
    """Runs one of Keras's loops with a step of its own, and lists what the loop calls and gives."""
    events: list[Any] = []
    model, data = _CheckedModel(), _CheckedData(events)
    held = [model.held[group.removesuffix("_variables")] for group in groups]
    get_state, take_back = getattr(model, GET_STATE), getattr(model, SYNC)

    def build(*args: Any, **kwargs: Any) -> None:
        loop: Any = kwargs.get("iterator", args[0] if args else None)
        events.append(
            ["build", isinstance(loop, Loop), loop.data_adapter is data, num_taken(loop), has_pass(loop)]
        )

    def give_state(**requested: bool) -> Any:
        events.append(["state", sorted(name for name in requested if requested[name])])
        return get_state(**requested)

    def synced() -> None:
        events.append("sync")
        take_back()

    def step(state: Any, iterator: Iterator[Any]) -> Any:
        batches = list(itertools.islice(iterator, 2))
        rows = [batch.shape for batch in batches]
        events.append(
            ["step", rows, all(type(batch) is np.ndarray for batch in batches), [each.value for each in held]]
        )
        new = tuple([value + 1 for value in group] for group in state)
        return (np.zeros((len(rows), 1)) if method == "predict" else {"loss": 0.0}), new

    setattr(model, function, step)
    options = {"shuffle": False} if method == "fit" else {"return_dict": True} if method == "evaluate" else {}
    hooks = {BUILD: build, GET_STATE: give_state, SYNC: synced}
    own = vars(Loop)["_get_iterator"]
    Loop._get_iterator = wrapped_get_iterator(own)
    try:
        with placing_batches(True), overridden(model, **hooks):
            _unwrapped(_own_method(keras.Model, method))(model, data, verbose=0, **options)
    finally:
        Loop._get_iterator = own
    return [*events, [each.value for each in held]]


def _events(groups: Sequence[str], *, is_built: bool, num_syncs: int) -> list[Any]:
    empty = [None] * len(groups)
    before = [["build", True, True, 0, False], "end"] if is_built else []
    return [
        *before,
        "begin",
        ["state", sorted([*groups, "purge_model_variables"])],
        ["step", [(2, 1), (2, 1)], True, empty],
        ["step", [(1, 1)], True, empty],
        "end",
        *["sync"] * num_syncs,
        [3] * len(groups),
    ]


def _callback_case(cls: type, hook: str) -> list[Any]:
    return [
        _arguments(_own_method(cls, SHOULD_SAVE)),
        _mentions(_own_method(cls, hook), SHOULD_SAVE, SAVE),
        _own_method(cls, SAVE) is not None,
    ]


def _store_case() -> list[Any]:
    store = saving_lib.H5IOStore
    own = ("_h5_entry_initialized", "_create_h5_group", "_h5_entry_path", "_h5_entry_group")
    return [
        _arguments(store.__init__)[:4],
        _mentions(store.__setitem__, *own, "create_dataset"),
        _arguments(saving_lib.is_memory_sufficient),
        _mentions(saving_lib.save_weights_only, "H5IOStore"),
        _mentions(saving_lib._save_model_to_fileobj, "H5IOStore", "is_memory_sufficient"),
    ]


def _optimizer_case() -> list[Any]:
    optimizer = keras.optimizers.Optimizer
    build = _own_method(optimizer, "build")
    return [
        _mentions(build, "_trainable_variables", "_accumulated_gradients", "add_variable_from_reference"),
        "gradient_accumulator" in _unwrapped(build).__code__.co_consts,
        _arguments(_own_method(optimizer, "_get_variable_index")),
        _mentions(_own_method(optimizer, "iterations").fget, "_iterations", "gradient_accumulation_steps"),
    ]


def _applied_case() -> list[Any]:
    optimizer = keras.optimizers.Optimizer
    update = _own_method(optimizer, "_backend_apply_gradients")
    return [
        _arguments(update),
        _mentions(_own_method(optimizer, "apply"), "_backend_apply_gradients"),
        _mentions(_own_method(optimizer, "stateless_apply"), "apply"),
        _mentions(update, "_accumulated_gradients", "gradient_accumulation_steps"),
        _arguments(_own_method(keras.optimizers.LossScaleOptimizer, "apply")),
    ]


def _arrays_case() -> list[Any]:
    """Lists the batches of arrays in a loop, and those of an adapter."""
    arrays = Loop(x=np.zeros((3, 1), np.int64), batch_size=2, steps_per_execution=2)
    with placing_batches(True):
        batches = [*wrapped_get_iterator(vars(Loop)["_get_iterator"])(arrays)]
    data = _CheckedData([])
    return [
        [(type(batch) is np.ndarray, batch.dtype.name, batch.shape) for batch in batches],
        Loop(x=data).data_adapter is data,
        num_taken(arrays),
        _mentions(
            Loop._enumerate_iterator, "_get_iterator", "_steps_seen", "_current_iterator", "_num_batches"
        ),
    ]


class _CheckedDataset(keras.utils.PyDataset):
    """32 batches; each has its number."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return np.full((1, 1), index)


def _shuffle_case(x: Any) -> list[bool]:
    """Makes two passes, and the first one once more from the state that a checkpoint of ``fit`` saves."""
    loop = Loop(x=x, batch_size=None if isinstance(x, _CheckedDataset) else 1, shuffle=True)
    number, states = pass_number(loop), (random.getstate(), np.random.get_state())

    def order() -> list[int]:
        return [int(np.ravel(batch)[0]) for batch in loop.data_adapter.get_jax_iterator()]

    try:
        passes = []
        for _ in range(2):
            passes.append(order())
            loop.data_adapter.on_epoch_end()
        random.setstate(states[0])
        np.random.set_state(states[1])
        set_pass_number(loop, number)
        passes.append(order())
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return [passes[0] == passes[2], passes[0] != passes[1]]


_STATE_ARGUMENTS: Final = ("self", *_GROUPS, "purge_model_variables")
_TRAIN, _TEST, _PREDICT = _GROUPS, (*_GROUPS[:2], _GROUPS[3]), _GROUPS[:2]

PARTS: Final = (
    KerasPart(
        "keras.Variable (_value, _initializer, _dtype, _shape, _layout, _maybe_autocast)",
        _variable_case,
        ([None, True, "float32", (2,), None, True, True, (3,)],),
    ),
    KerasPart("keras.Variable._deferred_initialize", _first_values_case, (["checked"],)),
    KerasPart(
        "keras.StatelessScope (original_scope, get_current_value)",
        _scopes_case,
        ([True, True, None, True, [True]],),
    ),
    KerasPart(
        "keras.Variable.assign, which calls StatelessScope.add_update",
        lambda: [_mentions(_own_method(keras.Variable, "assign"), "add_update")],
        ([True],),
    ),
    KerasPart("keras.SymbolicScope", _symbolic_scope_case, (True,)),
    KerasPart(
        "keras.ops.sparse_categorical_crossentropy",
        _sparse_categorical_case,
        ((1, 2, {"from_logits": True, "axis": -1}),),
    ),
    KerasPart(
        "keras.Layer (_flatten_layers, _trainable_variables, _layers, …)",
        _layer_case,
        ([["checked_model", "checked_layer"], ["checked_layer"], [], [], []],),
    ),
    KerasPart(
        "keras.Layer._maybe_build",
        lambda: [
            _arguments(_own_method(keras.Layer, "_maybe_build")),
            _mentions(_own_method(keras.Layer, "__call__"), "_maybe_build"),
        ],
        ([("self", "call_spec"), True],),
    ),
    KerasPart("the loss of activity regularizers", _activity_loss, ((True, True), (False, True))),
    KerasPart(
        "keras.optimizers.Optimizer.build", _optimizer_case, ([True, True, ("self", "variable"), True],)
    ),
    KerasPart(
        "keras.optimizers.Optimizer._backend_apply_gradients",
        _applied_case,
        (
            [
                ("self", "grads", "trainable_variables"),
                True,
                True,
                True,
                ("self", "grads", "trainable_variables"),
            ],
        ),
    ),
    KerasPart(
        "keras.losses.Loss.__call__",
        lambda: _arguments(_own_method(keras.losses.Loss, "__call__")),
        (("self", "y_true", "y_pred", "sample_weight"),),
    ),
    KerasPart(
        f"keras.Model.{GET_STATE}",
        lambda: _arguments(_own_method(keras.Model, GET_STATE)),
        (_STATE_ARGUMENTS,),
    ),
    KerasPart(
        "keras.Model._purge_model_variables",
        lambda: _arguments(_own_method(keras.Model, "_purge_model_variables")),
        (_STATE_ARGUMENTS[:-1],),
    ),
    KerasPart(f"keras.Model.{SYNC}", lambda: _arguments(_own_method(keras.Model, SYNC)), (("self",),)),
    KerasPart(
        f"keras.Model.{BUILD}",
        lambda: _arguments(_own_method(keras.Model, BUILD)),
        (("self", "iterator", "data_batch"),),
    ),
    KerasPart(
        "keras.Model._initial_epoch",
        lambda: [
            initial_epoch(_CheckedModel()),
            _mentions(_own_method(keras.Model, "fit"), "_initial_epoch"),
        ],
        ([None, True],),
    ),
    KerasPart(
        "JAXEpochIterator, which counts the batches of a loop",
        _arrays_case,
        ([[(True, "int64", (2, 1)), (True, "int64", (1, 1))], True, 0, True],),
    ),
    KerasPart("the shuffle of arrays", lambda: _shuffle_case(np.arange(32)), ([True, True],)),
    KerasPart("the shuffle of a PyDataset", lambda: _shuffle_case(_CheckedDataset()), ([True, True],)),
    KerasPart(
        "the loop of keras.Model.fit",
        functools.partial(_loop_case, "fit", "train_function", _TRAIN),
        (_events(_TRAIN, is_built=True, num_syncs=3),),
    ),
    KerasPart(
        "the loop of keras.Model.evaluate",
        functools.partial(_loop_case, "evaluate", "test_function", _TEST),
        (_events(_TEST, is_built=True, num_syncs=1),),
    ),
    KerasPart(
        "the loop of keras.Model.predict",
        functools.partial(_loop_case, "predict", "predict_function", _PREDICT),
        (_events(_PREDICT, is_built=False, num_syncs=1),),
    ),
    KerasPart(
        "class_weight_to_sample_weights",
        lambda: class_weight_to_sample_weights(np.array([0, 1, 1]), {0: 2.0, 1: 3.0}).tolist(),
        ([2.0, 3.0, 3.0],),
    ),
    KerasPart(
        "to_snake_case",
        lambda: [to_snake_case(name) for name in ("MyLayer", "Conv2D")],
        (["my_layer", "conv2d"],),
    ),
    KerasPart(
        "keras.src.saving.saving_lib",
        _store_case,
        ([("self", "path_or_io", "archive", "mode"), True, ("model",), True, True],),
    ),
    KerasPart(
        "keras.callbacks.ModelCheckpoint",
        lambda: _callback_case(keras.callbacks.ModelCheckpoint, "on_train_batch_end"),
        ([("self", "batch"), True, True],),
    ),
    KerasPart(
        "keras.callbacks.BackupAndRestore",
        lambda: _callback_case(keras.callbacks.BackupAndRestore, "on_train_batch_end"),
        ([("self", "batch"), True, True],),
    ),
)
"""All parts. ``check`` goes through them in this order."""
