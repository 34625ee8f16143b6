"""Warns of side effects in traced functions: Python counters, kept values, random numbers, TensorFlow.

Such code runs while the function is traced, not in each step. The source shows which lines may be wrong. Each is
reported once, if the trace confirms it.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import inspect
import linecache
import logging
import random
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import numpy as np

from replicax._src.diagnostics import tensorflow_code
from replicax._src.diagnostics.tensorflow_code import dotted
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing import key
from replicax._src.user.tensorflow_values import OF_VARIABLE, is_variable
from replicax._src.user.user_code import is_user_code, place_of
from replicax._src.vocabulary.errors import UnsupportedError

log = logging.getLogger("replicax")

_MISSING: Final = object()
_LOCAL: Final = object()
_NUMBERS: Final = (bool, int, float)
_CONTAINERS: Final = (list, dict, set, collections.deque)
_ADDING: Final = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}
_GENERATORS: Final = (np.random.Generator, np.random.RandomState, random.Random)
_DRAWS_NOTHING: Final = {"seed", "get_state", "set_state", "getstate", "setstate", "spawn"}
_DRAWS_OF_TENSORFLOW: Final = {
    "categorical",
    "gamma",
    "normal",
    "poisson",
    "shuffle",
    "truncated_normal",
    "uniform",
}
_CALLS: Final = ("__call__", "call")
_MOST_ITEMS_LOOKED_AT: Final = 64


@dataclass(frozen=True)
class _Site:
    """An expression that may have a side effect.

    Attributes:
      kind: "counts", "keeps" (a value), "calls" or "reads".
      path: The names of the object that it changes or calls: ``("self", "losses")``.
      item: The constant key of a subscript; else the marker ``_MISSING``.
      line: The line number in the file.
      text: The user's source text.
    """

    kind: str
    path: tuple[str, ...]
    item: Any
    line: int
    text: str


@dataclass
class _LineWatch:
    """The lines of some functions that ran in the latest trace."""

    codes: set[types.CodeType] = field(default_factory=set)
    lines: set[tuple[types.CodeType, int]] = field(default_factory=set)


class _NextTrace(threading.local):
    watch: _LineWatch | None = None  # of the functions that this thread is about to trace


_next = _NextTrace()


@contextlib.contextmanager
def _watching(watch: _LineWatch | None) -> Iterator[None]:
    before, _next.watch = _next.watch, watch
    try:
        yield
    finally:
        _next.watch = before


@contextlib.contextmanager
def reported(*fns: Callable[..., Any], is_key: bool = True) -> Iterator[None]:
    """Context that warns of the side effects of functions that are traced inside: of each once in a process.

    Each trace is in ``noting_lines``. Only the last one counts, because earlier ones may create variables.

    Args:
      *fns: The functions.
      is_key: True if a program is selected by what the functions are, with their closures and globals.

    Raises:
      UnsupportedError: A function has used a ``tf.Variable``.
    """
    has_tensorflow = "tensorflow" in sys.modules
    found = [
        _Seen(function, site)
        for function in _functions(fns)
        for site in _sites(_code(function))
        if (site.kind != "reads" or has_tensorflow) and (site.kind != "keeps" or not _is_call(function))
    ]
    found = [seen for seen in found if seen.is_possible()]
    before = list(map(key.function_key, fns))
    watch = _LineWatch({_code(seen.function) for seen in found if seen.site.kind in ("calls", "reads")})
    with _watching(watch):
        yield
    selecting: set[str] = set()  # a counter that selects the program is told after some compilations
    if is_key and any(seen.site.kind == "counts" for seen in found):
        after = map(key.function_key, fns)
        selecting = {
            one.name for old, new in zip(before, after, strict=True) for one in key.differences(old, new)
        }
    for seen in sorted(found, key=lambda seen: seen.site.kind != "reads"):  # errors first
        if seen.site.kind != "counts" or seen.site.path[1:] or seen.site.path[0] not in selecting:
            seen.report(watch.lines)


@contextlib.contextmanager
def noting_lines() -> Iterator[None]:
    """Context of one trace: notes the lines of the reported functions that it runs; none while a debugger is active."""
    watch = _next.watch
    with _watching(None):  # a trace inside of this one has functions of its own
        if watch is None:
            yield
            return
        watch.lines.clear()
        if not watch.codes or sys.gettrace() is not None:
            yield
            return
        with _noting(watch.codes, watch.lines):
            yield


@contextlib.contextmanager
def _noting(codes: set[types.CodeType], lines: set[tuple[types.CodeType, int]]) -> Iterator[None]:

    def on_line(frame: types.FrameType, event: str, arg: Any) -> Any:
        lines.add((frame.f_code, frame.f_lineno))
        return on_line

    sys.settrace(lambda frame, event, arg: on_line(frame, event, arg) if frame.f_code in codes else None)
    try:
        yield
    finally:
        sys.settrace(None)


class _Seen:
    """A site in a function, and the state of its object before the trace."""

    def __init__(self, function: Callable[..., Any], site: _Site):
        self.function, self.site = function, site
        self._before = _contents(function, site)

    def is_possible(self) -> bool:
        if self.site.kind == "reads":
            return is_variable(self._before)
        if self.site.kind == "calls":
            return _draws(self._before) or self._name_in_tensorflow is not None
        return self._before is not _LOCAL

    @property
    def _name_in_tensorflow(self) -> str | None:
        """Returns the public name of the TensorFlow function that the site calls.

        Returns None if it calls no such function, or one that behaves like its counterpart.
        """
        found = tensorflow_code.named_by(self.site.path, _named(self.function, self.site.path[0]))
        if found is None or getattr(found[1], "__module__", None) in _HARMLESS:
            return None
        return found[0]

    def report(self, lines: set[tuple[types.CodeType, int]]) -> None:
        code, site = _code(self.function), self.site
        place = (code.co_filename, site.line)
        where = place_of(code.co_filename, site.line, code.co_name)
        if not self._has_happened(lines):
            return
        if site.kind == "reads":
            raise UnsupportedError(f"{where}: `{site.text}` is a tf.Variable: {OF_VARIABLE}")
        if place in _reported:
            return
        _reported.add(place)
        if site.kind == "calls" and not _draws(self._before):
            names = [self._name_in_tensorflow or ""]
            scope = getattr(self.function, "__func__", self.function).__globals__
            advice = tensorflow_code.advice(names, tensorflow_code.uses_keras(scope))
            log.warning(_OF_TENSORFLOW, where, tensorflow_code.shortened(site.text), advice)
        else:
            log.warning(_TEXTS[site.kind], where, site.text)
        if site.kind == "keeps":
            _kept.append(f"{where}: `{site.text}`")

    def _has_happened(self, lines: set[tuple[types.CodeType, int]]) -> bool:
        if self.site.kind in ("calls", "reads"):
            return (_code(self.function), self.site.line) in lines
        after = _contents(self.function, self.site)
        if self.site.kind == "counts":
            return (
                isinstance(self._before, _NUMBERS) and isinstance(after, _NUMBERS) and self._before != after
            )
        known = set(map(id, _tracers(self._before)))
        return any(id(tracer) not in known for tracer in _tracers(after))


_reported: set[tuple[str, int]] = set()
_kept: Final[collections.deque[str]] = collections.deque(maxlen=3)
OF_TRACER: Final = (
    jax.errors.UnexpectedTracerError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_TEXTS: Final = {
    "counts": "%s: `%s` runs once, while the function is traced, and not in each step. Count outside of the function, or in "
    "an rx.Variable: variable.assign_add(1).",
    "keeps": "%s: `%s` keeps a value of the function, which is traced once: the value is JAX's placeholder, not a "
    "number, and the same for all steps. Return the value from the function, or assign it to an rx.Variable.",
    "calls": "%s: `%s` draws once, while the function is traced: all replicas and all steps get the same numbers. Draw "
    "outside and pass the numbers as an argument, or use keras.random with a SeedGenerator, or jax.random with a key.",
}
_OF_TENSORFLOW: Final = "%s: `%s` runs in TensorFlow once, while the function is traced, and is not part of the program that runs in each step. %s"
# The modules of functions that work on Python values.
_HARMLESS: Final = frozenset(
    {
        "tensorflow.python.util.nest",
        "tensorflow.python.framework.tensor_shape",
        "tensorflow.python.framework.tensor",
        "tensorflow.python.framework.dtypes",
    }
)


def add_note(error: BaseException) -> None:
    """Adds to an error of JAX about a tracer the lines that kept values of a trace, if there are some."""
    if isinstance(error, OF_TRACER) and _kept:
        error.add_note(
            f"A function kept a value while it was traced: {', '.join(_kept)}. Such a value is JAX's placeholder and no number. "
            "Return it from the function instead, and keep what the call returns."
        )


def _code(fn: Any) -> types.CodeType:
    return getattr(fn, "__func__", fn).__code__


def _functions(fns: Sequence[Any]) -> list[Callable[..., Any]]:
    """Returns those of the functions that are the user's and, recursively, the functions that they name."""
    found: dict[types.CodeType, Callable[..., Any]] = {}
    waiting = list(fns)
    while waiting:
        fn = waiting.pop()
        fn = key.unwrap(fn.func if isinstance(fn, functools.partial) else fn)
        function = getattr(fn, "__func__", fn)
        if not isinstance(function, types.FunctionType):
            waiting += _calls_of(fn)
            continue
        if not is_user_code(function.__code__.co_filename):
            continue
        code = function.__code__
        if code not in found:
            found[code] = fn
            named = [_named(fn, name) for name in (*key.global_names(code), *code.co_freevars)]
            waiting += [value for value in named if callable(value)]
    return list(found.values())


def _calls_of(value: Any) -> list[types.MethodType]:
    """Returns the methods that run when an object is called. Keras layers and models run ``call``."""
    methods = [inspect.getattr_static(type(value), name, None) for name in _CALLS]
    return [types.MethodType(method, value) for method in methods if isinstance(method, types.FunctionType)]


def _is_call(function: Any) -> bool:
    """Returns True for a method that runs when an object is called. It may keep values for the rest of the step."""
    return isinstance(function, types.MethodType) and function.__name__ in _CALLS


def _named(fn: Any, name: str) -> Any:
    """Returns the object that a name in the source of a function stands for; _MISSING if the name is local."""
    function = getattr(fn, "__func__", fn)
    code = function.__code__
    if name in code.co_freevars:
        with contextlib.suppress(ValueError):  # an empty cell
            return function.__closure__[code.co_freevars.index(name)].cell_contents
    elif isinstance(fn, types.MethodType) and code.co_argcount and name == code.co_varnames[0]:
        return fn.__self__
    elif name not in code.co_varnames and name not in code.co_cellvars:
        return function.__globals__.get(name, _MISSING)
    return _MISSING


def _contents(fn: Any, site: _Site) -> Any:
    """Returns the object at a site's path, or a copy of a container.

    Returns _LOCAL if the path begins in the function, and _MISSING if the object does not exist yet.
    """
    root, *names = site.path
    value = _named(fn, root)
    if value is _MISSING:
        return _LOCAL
    for name in names:
        if isinstance(value, types.ModuleType):  # a module may import attributes lazily
            value = vars(value).get(name, sys.modules.get(f"{value.__name__}.{name}", _MISSING))
        elif isinstance(value, _GENERATORS):
            value = getattr(value, name, _MISSING)
        else:
            value = inspect.getattr_static(value, name, _MISSING)
    if site.item is not _MISSING:
        value = value.get(site.item, _MISSING) if isinstance(value, dict) else _MISSING
    if isinstance(value, _CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        return list(items)[-_MOST_ITEMS_LOOKED_AT:]
    return value


def _tracers(value: Any) -> list[Any]:
    """Returns the tracers among the items of a container, or the value itself if it is a tracer."""
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return [tracer for item in items for tracer in _tracers(item)]
    return [value] if isinstance(value, jax_compat.Tracer) else []


def _draws(function: Any) -> bool:
    """Returns True if a NumPy or TensorFlow function returns different random numbers at each call."""
    name = getattr(function, "__name__", "")
    if isinstance(getattr(function, "__self__", None), _GENERATORS):
        return name not in _DRAWS_NOTHING
    home = getattr(function, "__module__", None) or ""
    return home.startswith("tensorflow.") and name.removeprefix("random_") in _DRAWS_OF_TENSORFLOW


# --- reading the source ------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _sites(code: types.CodeType) -> tuple[_Site, ...]:
    try:
        tree = ast.parse(textwrap.dedent(_source(code)))
    except SyntaxError:  # in the middle of an expression
        return ()
    if code.co_name == "<lambda>":  # its source is the statement that contains it
        functions: list[Any] = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    else:
        functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if len(functions) != 1:
        return ()
    found = []
    for node in _run_with(functions[0]):
        line = code.co_firstlineno + getattr(node, "lineno", 1) - 1
        text = ast.unparse(node) if isinstance(node, (ast.AugAssign, ast.Assign, ast.Call)) else ""
        if isinstance(node, ast.AugAssign):
            for path, item in _targets(node.target):
                found.append(_Site("keeps", path, _MISSING, line, text))
                found.append(_Site("counts", path, item, line, text))
        elif isinstance(node, ast.Assign):
            read = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found += [_Site("counts", (name,), _MISSING, line, text) for name in names if name in read]
            found += [
                _Site("keeps", path, _MISSING, line, text)
                for target in node.targets
                for path, _ in _targets(target)
            ]
        elif isinstance(node, ast.Call) and (path := dotted(node.func)):
            if path[-1] in _ADDING and len(path) > 1:
                found.append(_Site("keeps", path[:-1], _MISSING, line, text))
            else:
                found.append(_Site("calls", path, _MISSING, line, text))
        if isinstance(node, (ast.Name, ast.Attribute)) and (path := dotted(node)):
            found.append(_Site("reads", path, _MISSING, line, ".".join(path)))
    return tuple(found)


def _source(code: types.CodeType) -> str:
    """Returns the source of a function; "" if it is unknown, as for code typed at a prompt.

    ``inspect.getsource`` would search all imported modules, which takes 0.2 s with Keras.
    """
    lines = linecache.getlines(code.co_filename)
    return "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))


def _run_with(function: Any) -> Iterator[ast.AST]:
    """Yields the nodes of a function that run whenever their line runs: no branches within a line and no inner
    functions.
    """
    waiting: list[ast.AST] = function.body if isinstance(function.body, list) else [function.body]
    while waiting:
        node, *waiting = waiting
        yield node
        if isinstance(node, _RUN_LATER):
            continue
        inner = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.stmt):  # ``if noisy: draw()``
            inner = [each for each in inner if not isinstance(each, ast.stmt) or each.lineno > node.lineno]
        waiting += inner


_RUN_LATER: Final = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.IfExp,
    ast.BoolOp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def _targets(node: ast.expr) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the paths of assigned objects that may outlive a function, with the constant key of an item."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return [found for each in node.elts for found in _targets(each)]
    item = _MISSING
    if isinstance(node, ast.Subscript):
        item = node.slice.value if isinstance(node.slice, ast.Constant) else _MISSING
        node = node.value
    path = dotted(node)
    return [(path, item)] if path else []
