"""Gives public objects their public name, and makes their errors show the user's lines."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from replicax._src.tracebacks import bound_methods, boundary


def publish(module: str, name: str, value: Any) -> Any:
    """Returns the object that a public module has under a name: classes unchanged, functions wrapped.

    A class with several public names keeps the first; an error class keeps ``replicax.errors``.
    """
    if isinstance(value, type):
        _publish_class(module, name, value)
        return value
    if type(value) is FunctionType and value.__module__.startswith("replicax._src."):
        return _public_function(module, name, value)
    return value


def publish_all(namespace: dict[str, Any]) -> Callable[[], list[str]]:
    """Publishes the names in ``__all__`` of a public module; called at its end.

    The error for another name says what replicax has for a name of TensorFlow.

    Returns:
      Returns the module's ``__dir__``, which lists only these names.
    """
    for name in namespace["__all__"]:
        if name in namespace:
            namespace[name] = publish(namespace["__name__"], name, namespace[name])
    missing = functools.partial(_raise_missing, namespace["__name__"])
    namespace["__getattr__"] = boundary(namespace.get("__getattr__", missing))
    return lambda: sorted(namespace["__all__"])


def _raise_missing(module: str, name: str) -> Any:
    raise missing_name(module, name)


def missing_name(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a public module does not have."""
    from replicax._src.migrate.missing_names import in_module  # only for this error

    return in_module(module, name)


def publish_loaded(module: str, places: Mapping[str, str]) -> None:
    """Publishes the classes of a public module whose private modules are loaded, because users meet their objects
    before the names.

    Args:
      places: The module in ``replicax._src`` of each public name.
    """
    for name, place in places.items():
        private = sys.modules.get(f"replicax._src.{place}")
        value = None if private is None else getattr(private, name, None)
        if isinstance(value, type):
            _publish_class(module, name, value)


def _publish_class(module: str, name: str, cls: type) -> None:
    if cls.__module__.partition(".")[0] != "replicax":
        return
    bound_methods(cls)
    if cls.__module__.startswith("replicax._src.") and cls.__qualname__ == name:
        if "__annotations__" in vars(cls):  # typing resolves their names in the class's module
            with contextlib.suppress(NameError):  # of names for type checkers alone
                cls.__annotations__ = inspect.get_annotations(cls, eval_str=True)
        cls.__module__ = module
        # Python 3.13 finds a class's source by its line, and would look for it in the public module's file.
        if "__firstlineno__" in vars(cls):
            del cls.__firstlineno__  # type: ignore[attr-defined]


@functools.cache
def _public_function(module: str, name: str, function: FunctionType) -> Callable[..., Any]:
    public = boundary(function)
    if public is not function:  # of a fixture of pytest, say
        public.__module__, public.__name__, public.__qualname__ = module, name, name
    return public
