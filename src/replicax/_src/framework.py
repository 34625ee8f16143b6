"""``Framework``: the interface to a framework whose objects programs use (Keras, flax nnx). Tracks those in use.

``use_imported`` starts using a framework once the user has imported it. ``rx.Variable`` is one more ``Framework``.
optax needs none: its states are pytrees of arrays.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, final

Close = Callable[[Any], Any]


@final
@dataclass(frozen=True)
class Modules:
    """Turns modules among the arguments of ``run`` into arrays, and back into modules.

    Attributes:
      open: Replaces modules in a pytree by their arrays; the second result writes new arrays back into them. The first
        one ends with the pytree without its modules, and with a dict of their arrays by path. None if there are none.
      enter: In the function: makes modules from traced arrays; the second result adds their new state to the results.
    """

    open: Callable[[Any], tuple[Any, Close] | None]
    enter: Callable[[Any], tuple[Any, Close]]


@final
@dataclass(frozen=True)
class Tracking:
    """Tells a checkpoint what to save of a framework's objects. Each function is asked about objects of every kind.

    Attributes:
      parts_of: What is below an object, or the leaf that it is (``checkpoint/tracked.py``); None if it is unknown.
      kind_of: Tells objects apart whose parts have the same names and other meanings; "" if it is unknown.
      is_growing: Whether the object is going to have more parts than it has.
      watch: Given an object that lacks parts and a restoration: has that advance when the object has got more.
      finish: Called with each restored object: some compute other values from what was restored.
      prepare: Called with each object before its values are copied: newer ones may be elsewhere.
    """

    parts_of: Callable[[Any], Any]
    kind_of: Callable[[Any], str] = lambda tracked: ""
    is_growing: Callable[[Any], bool] = lambda tracked: False
    watch: Callable[[Any, Any], None] = lambda tracked, restoration: None
    finish: Callable[[Any], None] = lambda tracked: None
    prepare: Callable[[Any], None] = lambda tracked: None


@final
@dataclass(frozen=True)
class Framework:
    """A framework whose objects programs use.

    Attributes:
      name: The module that the user imports.
      variable_types: The classes of its variables: leaves of pytrees.
      make_binding: Binds one of its variables to a number of replicas: gives the ``Binding`` (``tracing/bindings.py``).
      trace_scope: A context entered around every trace, made of the ``Capture``.
      modules: For those that have modules which are arguments of ``run``.
      tracking: For those with objects that checkpoints see into.
      lowering_of: What places a bound method or function for ``Strategy.plan``; None if it is not the framework's.
    """

    name: str
    variable_types: tuple[type, ...] = ()
    make_binding: Callable[[Any, int], Any] | None = None
    trace_scope: Callable[[Any], AbstractContextManager[None]] = contextlib.nullcontext
    modules: Modules | None = None
    tracking: Tracking | None = None
    lowering_of: Callable[[Any], Any] = lambda fn: None


# Where each framework's module is. Where two know an object, the first one has it: with nnx-backed Keras
# (KERAS_NNX_ENABLED) a layer is an nnx module, too.
_PLACES: Final = {
    "keras": "replicax._src.keras.bridge",
    "flax.nnx": "replicax._src.frameworks.nnx",
}


_OWN: Final = "replicax"


class _InUse:
    """The frameworks in use. One object, replaced as a whole, so that threads see all of it or nothing.

    Attributes:
      frameworks: In the order of ``_PLACES``.
      variable_types: Of all of them.
    """

    def __init__(self, frameworks: Sequence[Framework]):
        order = [_OWN, *_PLACES]
        self.frameworks = tuple(sorted(frameworks, key=lambda framework: order.index(framework.name)))
        self.names = frozenset(framework.name for framework in frameworks)
        self.variable_types = tuple(kind for each in self.frameworks for kind in each.variable_types)


_in_use = _InUse(())
_changing = threading.RLock()  # loading one framework's module may use another


def use(framework: Framework) -> None:
    """Starts using a framework. Does nothing if it is in use."""
    global _in_use
    with _changing:
        if framework.name in _in_use.names:
            return
        _in_use = _InUse((*_in_use.frameworks, framework))


def stop_using(name: str) -> None:
    """Forgets a framework; ``use_imported`` would use it again."""
    global _in_use
    _in_use = _InUse([framework for framework in _in_use.frameworks if framework.name != name])


def use_imported() -> None:
    """Starts using the frameworks that the user has imported by now. Cheap; call it often.

    It is called where a program first gives replicax something of a framework's: when a scope is entered, ``run``, a
    function of ``rx.function`` or ``fit`` of a plan is called, a dataset is distributed, a ``Checkpoint`` or a callback
    of ``rx.keras`` is made. What a framework needs stays in place from then on: ``fit`` is called after the ``with``
    block of its scope has ended. Importing replicax, and making a strategy, change nothing of Keras.
    """
    if len(_in_use.names) > len(_PLACES):
        return
    for name, place in _PLACES.items():
        if name not in _in_use.names and sys.modules.get(name) is not None:
            importlib.import_module(place).install()


def frameworks_in_use() -> tuple[Framework, ...]:
    """Returns the frameworks in use; where two know an object, the first one has it."""
    return _in_use.frameworks


def is_variable(value: Any) -> bool:
    """Returns True if a value is a variable, ours or a framework's, and so a leaf of a pytree."""
    return isinstance(value, _in_use.variable_types)


def make_binding(variable: Any, num_replicas: int) -> Any:
    """Binds a variable to a number of replicas: returns its ``Binding``."""
    framework = next(each for each in _in_use.frameworks if isinstance(variable, each.variable_types))
    assert framework.make_binding is not None
    return framework.make_binding(variable, num_replicas)


def trackings() -> list[Tracking]:
    """Returns what frameworks in use say of what is saved."""
    return [framework.tracking for framework in _in_use.frameworks if framework.tracking is not None]


# --- modules as arguments of run ------------------------------------------------------------------------


def open_modules(pytree: Any) -> tuple[Any, Close | None]:
    """Replaces framework modules in the arguments by their arrays; gives what closes the results, if any."""
    for modules in _with_modules():
        opened = modules.open(pytree)
        if opened is not None:
            return opened
    return pytree, None


def enter_modules(opened: Any, has_modules: bool) -> tuple[Any, Close]:
    """Inside the function: the arguments with modules again, and what adds their new state to the results."""
    if not has_modules:
        return opened, _unchanged
    (modules,) = _with_modules()  # one framework has modules
    return modules.enter(opened)


def _with_modules() -> list[Modules]:
    return [framework.modules for framework in _in_use.frameworks if framework.modules is not None]


def _unchanged(result: Any) -> Any:
    return result
