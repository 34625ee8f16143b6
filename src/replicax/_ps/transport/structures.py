"""The structure of an element as JSON: dicts, lists, tuples, named tuples, dataclasses, None, and the places of
leaves.

Classes are sent by name. The process that rebuilds an element must have them, or gets an error.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from replicax._src.program_kit.errors import InvalidArgumentError

Structure = Any
"""``0`` for a leaf, else ``[kind, ...]``: the result of ``described``."""


def described(element: Any) -> Structure:
    """Returns the structure of a pytree, whose leaves are in the order of ``jax.tree.leaves``.

    Raises:
      InvalidArgumentError: It has a node of another class.
    """
    if element is None:
        return ["none"]
    if isinstance(element, Mapping):
        is_ordered = isinstance(element, OrderedDict)
        keys = list(element) if is_ordered else sorted(element)
        for key in keys:
            _check_key(key)
        return ["ordered" if is_ordered else "dict", [[key, described(element[key])] for key in keys]]
    if isinstance(element, tuple) and type(element) is not tuple:
        return _described_fields("named", element, type(element), [described(child) for child in element])
    if isinstance(element, list | tuple):
        return ["list" if isinstance(element, list) else "tuple", [described(child) for child in element]]
    if dataclasses.is_dataclass(element) and not isinstance(element, type):
        children = [described(getattr(element, field.name)) for field in dataclasses.fields(element)]
        return _described_fields("dataclass", element, type(element), children)
    if not jax.tree_util.all_leaves([element]):
        raise _unknown(type(element))
    return 0


def rebuilt(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Returns the pytree of a structure, with ``leaves`` in it.

    Raises:
      InvalidArgumentError: It names a class that this process does not have.
    """
    return _rebuilt(structure, iter(leaves))


def _rebuilt(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure == 0:
        return next(leaves)
    kind, *rest = structure
    if kind == "none":
        return None
    if kind in ("dict", "ordered"):
        pairs = [(key, _rebuilt(child, leaves)) for key, child in rest[0]]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    if kind in ("list", "tuple"):
        children = [_rebuilt(child, leaves) for child in rest[0]]
        return children if kind == "list" else tuple(children)
    module, name, children = rest
    cls = _class(kind, module, name)
    return cls(*(_rebuilt(child, leaves) for child in children))


def _described_fields(kind: str, element: Any, cls: type, children: list[Structure]) -> Structure:
    if not _is_kind(kind, cls) or "<locals>" in cls.__qualname__:
        raise _unknown(type(element))
    return [kind, cls.__module__, cls.__qualname__, children]


def _class(kind: str, module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not _is_kind(kind, found):
        raise InvalidArgumentError(
            f"Another task sent an object of class {module}.{name}, which this process does not have. Import "
            "its module here, or use dicts or tuples there."
        )
    return found


def _is_kind(kind: str, cls: Any) -> bool:
    """True if a class makes nodes of a kind from its children, and has no other effect."""
    if not isinstance(cls, type):
        return False
    if kind == "named":
        return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)
    return dataclasses.is_dataclass(cls)


def _check_key(key: Any) -> None:
    if not isinstance(key, str | int):
        raise InvalidArgumentError(
            f"A dict with the key {key!r} cannot be sent between tasks. Its keys must be str or int."
        )


def _unknown(cls: type) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"A {cls.__module__}.{cls.__qualname__} cannot be sent between tasks. Allowed are arrays, dicts, "
        "lists, tuples, None, and named tuples and dataclasses that are defined at the top level of a module."
    )
