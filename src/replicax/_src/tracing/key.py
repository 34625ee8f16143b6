"""The identity of a function for the cache of programs: its code, defaults, closure, and the globals it names.

Code objects compare by value and a notebook's model is often a global, so neither the code nor the
function object alone will do. Objects are compared by identity and held weakly; see ``sharp_bits.md``.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import reprlib
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax._src.user.user_code import is_library, place_of
from replicax._src.values.distributed import DistributedValues, is_value

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


def unwrap(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the Python function or bound method behind ``rx.function`` objects."""
    if type(fn) is types.MethodType:
        return types.MethodType(unwrap(fn.__func__), fn.__self__)
    if type(fn) is types.FunctionType:  # functools.wraps copies the attributes of the wrapped function
        return fn
    return _inside(fn) or fn


def _inside(fn: Any) -> Callable[..., Any] | None:
    """Returns the function that an ``rx.function`` was made of.

    A wrapper around an ``rx.function`` has the same attributes, but is a different function.
    """
    inner = getattr(fn, "python_function", None)
    return inner if inner is not None and getattr(fn, "__wrapped__", None) is inner else None


def function_key(
    fn: Callable[..., Any], anchors: list[Any] | None = None, lifted: Collection[str] | None = None
) -> Hashable:
    """Returns a hashable that is equal for functions that share programs.

    Args:
      anchors: A list to which objects are appended that the key names by identity.
      lifted: The names of ``lifted_cells(fn)``, if the caller has them.
    """
    if type(fn) is types.FunctionType:
        return _python_function_key(fn, anchors, (id(fn),), lifted_cells(fn) if lifted is None else lifted)
    return _key(fn, anchors, ())


def _key(value: Any, anchors: list[Any] | None, above: tuple[int, ...]) -> Hashable:
    kind = type(value)
    if kind in _BY_VALUE:
        return (kind, value)
    if kind is types.FunctionType:
        if id(value) in above:
            return "itself"
        return _python_function_key(value, anchors, (*above, id(value)))
    if kind is types.ModuleType:
        if anchors is not None:
            anchors.append(value)
        return ("module", id(value))
    if kind is tuple:
        return (tuple, *(_key(item, anchors, above) for item in value))
    if kind is types.MethodType:
        return ("method", _key(value.__func__, anchors, above), _key(value.__self__, anchors, above))
    if kind is functools.partial:
        return (
            "partial",
            _key(value.func, anchors, above),
            _key(value.args, anchors, above),
            tuple((k, _key(v, anchors, above)) for k, v in value.keywords.items()),
        )
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    inner = _inside(value) if callable(value) and not inspect.isclass(value) else None
    if inner is not None:
        return _key(inner, anchors, above)
    if anchors is not None:
        anchors.append(value)
    return id(value)


def _python_function_key(
    fn: types.FunctionType,
    anchors: list[Any] | None,
    above: tuple[int, ...],
    lifted: Collection[str] = (),
) -> Hashable:
    """Returns the key. The contents of cells in ``lifted`` become inputs of the program, so only their shapes count."""
    code = fn.__code__
    if is_library(code.co_filename):
        if anchors is not None:
            anchors.append(fn)
        return id(fn)
    parts: list[Hashable] = [code]
    if fn.__defaults__:
        parts.append(_key(fn.__defaults__, anchors, above))
    if fn.__kwdefaults__:
        parts.append(tuple((k, _key(v, anchors, above)) for k, v in fn.__kwdefaults__.items()))
    if fn.__closure__:
        parts.extend(
            (name, _cell_key(cell, anchors, above, name in lifted))
            for name, cell in zip(code.co_freevars, fn.__closure__, strict=True)
        )
    scope = fn.__globals__
    for name in global_names(code):
        if name in scope:
            parts.append((name, _key(scope[name], anchors, above)))
    return tuple(parts)


def _cell_key(
    cell: types.CellType, anchors: list[Any] | None, above: tuple[int, ...], is_lifted_cell: bool
) -> Hashable:
    try:
        content = cell.cell_contents
    except ValueError:
        return "empty"
    if is_lifted_cell:
        leaves, tree = jax.tree_util.tree_flatten(content, is_leaf=is_value)
        return (tree, *(array_key(leaf) for leaf in leaves))
    return _key(content, anchors, above)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the global names and attributes that the code of a function, or of one defined in it, looks up."""
    names = dict.fromkeys(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(dict.fromkeys(global_names(const)))
    return tuple(names)


# --- arrays in closures become inputs -----------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Returns True if a value is a JAX or NumPy array of numbers, or a NumPy scalar."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) and _is_numeric(value.dtype)


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the name of a function for messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def _is_numeric(dtype: Any) -> bool:
    return (
        not isinstance(dtype, np.dtype) or dtype.kind in "biufcV"
    )  # typed random keys; V: bfloat16 and similar dtypes


def is_lifted(content: Any) -> bool:
    """Returns True if the content of a closure cell becomes an input: an array, or a tuple or dict of arrays only."""
    if is_array(content) or isinstance(content, DistributedValues):
        return True
    if type(content) in (tuple, dict) and content:
        leaves = jax.tree_util.tree_leaves(content, is_leaf=is_value)
        return bool(leaves) and all(is_array(x) or isinstance(x, DistributedValues) for x in leaves)
    return False


def array_key(value: Any) -> Hashable:
    """Returns the shape and dtype of an array or DistributedValues, as part of a program's key."""
    if isinstance(value, DistributedValues):
        array: Any = value.stored  # type: ignore[attr-defined]
        return (
            type(value),
            array.shape,
            array.dtype,
            getattr(value, "shapes", None),
            getattr(value, "is_equal", None),
        )
    return (value.shape, value.dtype, getattr(value, "weak_type", False))


def lifted_cells(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the contents of the closure cells of ``fn`` that become inputs, by name."""
    if type(fn) is not types.FunctionType or not fn.__closure__ or is_library(fn.__code__.co_filename):
        return {}
    found = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__, strict=True):
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        if is_lifted(content) and not _assigns(fn.__code__, name):
            found[name] = content
    return found


def with_cells(fn: Callable[..., Any], contents: dict[str, Any]) -> Callable[..., Any]:
    """Returns ``fn`` with other contents in some cells of its closure.

    The result is a new function with the same code. Replacing the contents of the shared cells during the trace would
    be
    wrong: a thread that makes batches would find tracers in them. The backward function of a custom derivative, which
    outlives the trace, would find the arrays again and keep them as constants. Python has no other way to call a
    function with other cells (3.11 to 3.14).
    """
    if not contents:
        return fn
    assert isinstance(fn, types.FunctionType)
    cells = tuple(
        types.CellType(contents[name]) if name in contents else cell
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    )
    made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__qualname__ = fn.__qualname__
    return made


@functools.lru_cache(maxsize=4096)
def _assigns(code: types.CodeType, name: str) -> bool:
    """Returns True if the function assigns to the closure variable (``nonlocal``)."""
    return any(i.opname == "STORE_DEREF" and i.argval == name for i in dis.get_instructions(code)) or any(
        isinstance(c, types.CodeType) and name in c.co_freevars and _assigns(c, name) for c in code.co_consts
    )


class Anchors:
    """Calls ``evict`` when an object that a key names by identity is deleted. Holds objects that allow no weak
    reference.
    """

    def __init__(self, objects: list[Any], evict: Callable[[], object]):
        self._held: list[Any] = []
        seen: set[int] = set()
        for value in objects:
            if id(value) in seen:
                continue
            seen.add(id(value))
            try:
                self._held.append(weakref.ref(value, lambda _: evict()))
            except TypeError:
                self._held.append(value)


class KeyDifference(NamedTuple):
    """The first difference between two function keys.

    Attributes:
      name: The name whose value differs; "" if it is the value of no name.
      code: The code that looks the name up.
      old, new: The keys of the two values.
    """

    name: str
    code: types.CodeType | None
    old: Hashable
    new: Hashable

    @property
    def are_values(self) -> bool:
        """True if the values are compared by value, such as numbers and strings."""
        return _is_value_key(self.old) and _is_value_key(self.new)

    @property
    def are_numbers(self) -> bool:
        """True if both values are Python numbers."""
        return self.are_values and all(key[0] in (bool, int, float, complex) for key in (self.old, self.new))  # type: ignore[index]

    def __str__(self) -> str:
        if isinstance(self.new, types.CodeType):
            return f"the code of {self.name!r} changed" if self.name else "its code changed"
        kind = "closure" if self.code is not None and self.name in self.code.co_freevars else "global"
        name = f"the {kind} variable {self.name!r}" if self.name else "a value that it holds"
        if not self.are_values:
            return f"{name} is another object"
        return f"{name} changed: {_shown(self.old)} became {_shown(self.new)}"


def _is_value_key(key: Hashable) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and key[0] in _BY_VALUE


def _shown(key: Any) -> str:
    return reprlib.repr(key[1])


def difference(old: Hashable, new: Hashable) -> KeyDifference | None:
    """Returns the first difference between two function keys; None if they are equal."""
    return next(differences(old, new), None)


def differences(
    old: Hashable, new: Hashable, name: str = "", code: types.CodeType | None = None
) -> Iterator[KeyDifference]:
    """Yields the differences between two function keys.

    Args:
      name, code: The name that the keys belong to, and the code that looks it up.
    """
    if old == new:
        return
    are_tuples = isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new)
    if not are_tuples or (_is_value_key(old) and _is_value_key(new)):
        yield KeyDifference(name, code, old, new)
        return
    assert isinstance(old, tuple)
    assert isinstance(new, tuple)
    if len(old) == 2 and isinstance(old[0], str) and old[0] == new[0] and old[0] != "module":
        yield from differences(old[1], new[1], old[0], code)
        return
    if isinstance(new[0], types.CodeType) and old[0] == new[0]:
        code = new[0]
    for a, b in zip(old, new, strict=True):
        yield from differences(a, b, name, code)


def assignment_of(name: str, key: Hashable) -> str | None:
    """Returns ``file:line in function`` of a statement that assigns a closure or global variable, in the functions of a
    key; None if they do not.
    """
    for code in _codes(key):
        store = f"STORE_{'DEREF' if name in code.co_freevars else 'GLOBAL'}"
        for instruction in dis.get_instructions(code):
            if (
                instruction.opname == store
                and instruction.argval == name
                and instruction.positions is not None
            ):
                return place_of(code.co_filename, instruction.positions.lineno, code.co_name)
    return None


def _codes(key: Any) -> Iterator[types.CodeType]:
    if isinstance(key, tuple):
        for part in key:
            yield from _codes(part)
    elif isinstance(key, types.CodeType):
        yield key
        yield from _codes(key.co_consts)
