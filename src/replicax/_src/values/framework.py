"""``Framework``: the interface to frameworks whose objects programs use (Keras, flax nnx). Tracks those in use.

``use_imported`` starts using a framework once the user has imported it. ``rx.Variable`` is one more ``Framework``.
optax needs no ``Framework``, because its states are pytrees of arrays.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from replicax._src.hooks import hook

Close = Callable[[Any], Any]


@final
@dataclass(frozen=True)
class Modules:
    """Turns modules among the arguments of ``run`` into arrays, and back into modules.

    Attributes:
      open: Replaces modules in a pytree by their arrays. Its second result writes new arrays back into the modules. Its
        first result ends with the pytree without its modules and a dict of their arrays by path. Returns None if there
        are no modules.
      enter: Makes modules from traced arrays, inside the function. The second result adds their new state to the
        results.
    """

    open: Callable[[Any], tuple[Any, Close] | None]
    enter: Callable[[Any], tuple[Any, Close]]


class Writes(Protocol):
    """The assignments of one branch of ``rx.cond``."""

    @property
    def writes(self) -> dict[int, tuple[Any, Any, str]]:
        """The variable, its value and the user's line, by ``id`` of the variable."""
        ...


class AssignableState(Protocol):
    """Values of variables that a traced function assigns; ``rx.cond`` passes them through its branches."""

    def branch(self) -> AbstractContextManager[Writes]:
        """Context that keeps assignments separate, for one branch."""
        ...

    def read(self, variable: Any, /) -> Any:
        """Returns the value that a variable has now."""
        ...

    def write(self, variable: Any, value: Any, line: str, /) -> None:
        """Assigns a variable. ``line`` is the user's."""
        ...


@final
@dataclass(frozen=True)
class Tracking:
    """Tells a checkpoint which parts of a framework's objects to save. Each function is called with objects of any
    kind.

    Attributes:
      parts_of: Returns the parts of an object, or the leaf that it is (``checkpoint/tracked.py``); None if it is
        unknown.
      kind_of: Returns a name that distinguishes objects whose equally named parts differ in meaning; "" if unknown.
      is_growing: Returns True if the object will get more parts.
      watch: Takes an object that lacks parts and a restore. Continues the restore when the object gets more parts.
      finish: Called with each restored object, because some objects compute other values from restored ones.
      prepare: Called with each object before its values are copied, because newer ones may be elsewhere.
      in_loop: Returns a function that reads the values of variables that a running loop holds in their place, by ``id``
        of the variable; None if the object has no loop. It changes nothing, unlike ``prepare``.
    """

    parts_of: Callable[[Any], Any]
    kind_of: Callable[[Any], str] = lambda tracked: ""
    is_growing: Callable[[Any], bool] = lambda tracked: False
    watch: Callable[[Any, Any], None] = lambda tracked, restoration: None
    finish: Callable[[Any], None] = lambda tracked: None
    prepare: Callable[[Any], None] = lambda tracked: None
    in_loop: Callable[[Any], Callable[[], Mapping[int, Any]] | None] = lambda tracked: None


@final
@dataclass(frozen=True)
class Framework:
    """A framework whose objects programs use.

    Attributes:
      name: The module that the user imports.
      variable_types: The classes of its variables, which are leaves of pytrees.
      make_binding: Returns the ``Binding`` of one of its variables to a number of replicas (``tracing/bindings.py``).
      trace_scope: Returns the context to enter around every trace, given the ``Capture``.
      modules: The conversion of modules that are arguments of ``run``; None if there are none.
      tracking: The tracking of objects in checkpoints; None if there is none.
      lowering_of: Returns the lowering of a bound method or function for ``Strategy.plan``; None if it is not the
        framework's.
      assignable: Returns the state that the framework's variables are assigned in now; None if that is the capture, or
        the variables themselves.
    """

    name: str
    variable_types: tuple[type, ...] = ()
    make_binding: Callable[[Any, int], Any] | None = None
    trace_scope: Callable[[Any], AbstractContextManager[None]] = contextlib.nullcontext
    modules: Modules | None = None
    tracking: Tracking | None = None
    lowering_of: Callable[[Any], Any] = lambda fn: None
    assignable: Callable[[], AssignableState | None] = lambda: None


# The modules that users import, and the hooks that support them. If two frameworks know an object, the first one handles
# it: with nnx-backed Keras (KERAS_NNX_ENABLED) a layer is an nnx module, too.
_HOOKS: Final = {"keras": "keras", "flax.nnx": "nnx"}
_OWN: Final = "replicax"


class _InUse:
    """The frameworks in use. Replaced as one object, so that threads see a consistent state.

    Attributes:
      frameworks: The frameworks, in the order of ``_HOOKS``.
      variable_types: The variable classes of all of them.
    """

    def __init__(self, frameworks: Sequence[Framework]):
        order = [_OWN, *_HOOKS]
        self.frameworks = tuple(sorted(frameworks, key=lambda framework: order.index(framework.name)))
        self.names = frozenset(framework.name for framework in frameworks)
        self.variable_types = tuple(kind for each in self.frameworks for kind in each.variable_types)


_in_use = _InUse(())
_changing = threading.RLock()  # loading one framework's module may start using another


def use(framework: Framework) -> None:
    """Starts using a framework. Does nothing if it is in use already."""
    global _in_use
    with _changing:
        if framework.name in _in_use.names:
            return
        _in_use = _InUse((*_in_use.frameworks, framework))


def stop_using(name: str) -> None:
    """Stops using a framework until the next ``use_imported``."""
    global _in_use
    _in_use = _InUse([framework for framework in _in_use.frameworks if framework.name != name])


def use_imported() -> None:
    """Starts using the frameworks that the user has imported by now. It is cheap; call it often.

    Callers call it when a program may first pass framework objects to replicax: when it enters a scope, calls ``run``
    or a plan of ``fit``, makes an ``rx.function``, distributes a dataset, or makes a ``Checkpoint`` or a callback of
    ``rx.keras``. The support of a framework stays active from then on, because users call ``fit`` after the ``with``
    block of its scope. Importing replicax or making a strategy does not change Keras.
    """
    if len(_in_use.names) > len(_HOOKS):
        return
    for name, support in _HOOKS.items():
        if name not in _in_use.names and sys.modules.get(name) is not None:
            hook(support).install()


def frameworks_in_use() -> tuple[Framework, ...]:
    """Returns the frameworks in use. If two know an object, the first one handles it."""
    return _in_use.frameworks


def is_variable(value: Any) -> bool:
    """Returns True if a value is a variable, ours or a framework's, and so a leaf of a pytree."""
    return isinstance(value, _in_use.variable_types)


def make_binding(variable: Any, num_replicas: int) -> Any:
    """Returns the ``Binding`` of a variable to a number of replicas."""
    framework = next(each for each in _in_use.frameworks if isinstance(variable, each.variable_types))
    assert framework.make_binding is not None
    return framework.make_binding(variable, num_replicas)


def trackings() -> list[Tracking]:
    """Returns the trackings of the frameworks in use."""
    return [framework.tracking for framework in _in_use.frameworks if framework.tracking is not None]


# --- modules as arguments of run ------------------------------------------------------------------------


def open_modules(pytree: Any) -> tuple[Any, Close | None]:
    """Replaces framework modules in the arguments by their arrays. Returns the function that writes results back, if
    any.
    """
    for modules in _with_modules():
        opened = modules.open(pytree)
        if opened is not None:
            return opened
    return pytree, None


def enter_modules(opened: Any, has_modules: bool) -> tuple[Any, Close]:
    """Returns the arguments with modules, inside the function, and the function that adds their new state to the
    results.
    """
    if not has_modules:
        return opened, _unchanged
    (modules,) = _with_modules()  # one framework has modules
    return modules.enter(opened)


def _with_modules() -> list[Modules]:
    return [framework.modules for framework in _in_use.frameworks if framework.modules is not None]


def _unchanged(result: Any) -> Any:
    return result
