"""Gives public objects their public name, and makes their errors show the user's lines."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from replicax._src.hooks import load
from replicax._src.parts import PUBLIC
from replicax._src.user.listening import listener
from replicax._src.user.tracebacks import bound_methods, boundary


def publish(module: str, name: str, value: Any) -> Any:
    """Returns the object that a public module has under a name: classes unchanged, functions wrapped.

    A class with several public names keeps the first; an error class keeps ``replicax.errors``.
    """
    if isinstance(value, type):
        _publish_class(module, name, value)
        return value
    if type(value) is FunctionType and value.__module__.startswith("replicax._"):
        return _public_function(module, name, value)
    return value


def publish_all(
    namespace: dict[str, Any],
    places: Mapping[str, str] | None = None,
    *,
    check: Callable[[str], None] | None = None,
) -> Callable[[], list[str]]:
    """Publishes the names of a public module; called at its end.

    Names in ``places``, and those of parts in the registry, are loaded at their first use and join ``__all__``. The
    error for another name says what replicax has for a name of TensorFlow.

    Args:
      namespace: The globals of the module.
      places: The module of each name that is loaded at its first use: it has the name, or is it.
      check: Called with such a name, as users write it, whenever it is asked for.

    Returns:
      Returns the module's ``__dir__``, which lists only these names.
    """
    module = namespace["__name__"]
    lazy = {**(places or {}), **_names_of_parts(module)}
    for name in namespace.setdefault("__all__", []):
        if name in namespace:
            namespace[name] = publish(module, name, namespace[name])
    namespace["__all__"] = sorted({*namespace["__all__"], *lazy})

    def missing(name: str) -> Any:
        if name not in lazy:
            raise listener().missing_name(module, name)
        if check is not None:
            check(f"rx{module.removeprefix('replicax')}.{name}")
        value = _loaded(module, name, lazy[name])
        if check is None:
            namespace[name] = value  # not asked for again
        _publish_loaded(module, lazy)
        return value

    namespace["__getattr__"] = boundary(missing)
    return lambda: sorted(namespace["__all__"])


def _names_of_parts(module: str) -> dict[str, str]:
    return {name: place for place, public, names in PUBLIC if public == module for name in names.split()}


def _loaded(module: str, name: str, place: str) -> Any:
    loaded = load(place)
    return loaded if place == f"{module}.{name}" else publish(module, name, getattr(loaded, name))


def _publish_loaded(module: str, places: Mapping[str, str]) -> None:
    """Publishes the classes of a public module whose private modules are loaded, because users meet their objects
    before the names.
    """
    for name, place in places.items():
        private = sys.modules.get(place)
        # Not getattr: a public module would make its error for a name that it lacks, which reads the migration's table.
        value = None if private is None else vars(private).get(name)
        if isinstance(value, type):
            _publish_class(module, name, value)


def _publish_class(module: str, name: str, cls: type) -> None:
    if cls.__module__.partition(".")[0] != "replicax":
        return
    bound_methods(cls)
    if cls.__module__.startswith("replicax._") and cls.__qualname__ == name:
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
