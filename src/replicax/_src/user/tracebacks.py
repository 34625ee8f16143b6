"""Shortens tracebacks to the user's lines: removes frames of replicax, JAX and Keras when an error leaves a public
call.

``REPLICAX_TRACEBACK=full`` keeps all frames, and so does ``JAX_TRACEBACK_FILTERING=off``.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType, FunctionType, TracebackType
from typing import Any, Final, TypeVar

from replicax._src.user.user_code import is_standard_library

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

_HIDDEN: Final = frozenset({"replicax", "jax", "jaxlib", "keras"})
# Hidden if the packages above call them; shown if the user's code does.
_HIDDEN_BELOW: Final = frozenset(
    {"absl", "cloudpickle", "etils", "flax", "grain", "ml_dtypes", "numpy", "opt_einsum", "optax", "optree"}
    | {"orbax", "pyarrow", "rich", "scipy", "tensorboardX", "tensorstore", "tree"}
)
# These are called very often, or where Python expects no error.
_NOT_WRAPPED: Final = frozenset(
    {"__class_getitem__", "__copy__", "__deepcopy__", "__del__", "__dir__", "__getattribute__", "__hash__"}
    | {
        "__init_subclass__",
        "__new__",
        "__reduce__",
        "__repr__",
        "__set_name__",
        "__str__",
        "__subclasshook__",
    }
    | {"__getstate__", "__setstate__", "__instancecheck__", "__getnewargs__", "__reduce_ex__", "__sizeof__"}
)
# The note that JAX adds after the message, where users look for advice.
_JAX_NOTE: Final = "JAX has removed its internal frames"

_bound: set[type] = set()


def is_full_requested() -> bool:
    """True if the environment asks replicax for all frames."""
    return os.environ.get("REPLICAX_TRACEBACK") == "full"


def is_full() -> bool:
    """True if tracebacks keep all frames."""
    if is_full_requested():
        return True
    jax = sys.modules.get("jax")
    return getattr(getattr(jax, "config", None), "jax_traceback_filtering", None) == "off"


def boundary(fn: _Callable) -> _Callable:
    """Wraps a public function, so that errors that leave it have short tracebacks. It costs 60 ns without an error."""
    if getattr(fn, "_replicax_boundary", False):
        return fn

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except StopIteration:  # not an error: the end of a loop
            raise
        except Exception as error:
            shorten(error)
            raise

    call._replicax_boundary = True  # type: ignore[attr-defined]
    call.autograph_info__ = {}  # type: ignore[attr-defined]  # TensorFlow's AutoGraph does not rewrite it (2.21)
    return call  # type: ignore[return-value]


def called_often(fn: _Callable) -> _Callable:
    """Marks a public method that each step calls and no user: ``bound_methods`` leaves it as it is."""
    fn._replicax_boundary = True  # type: ignore[attr-defined]
    return fn


def bound_methods(cls: type) -> None:
    """Wraps each public method, operator and property that a class of replicax defines or inherits from one."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != "replicax" or base in _bound:
            continue
        _bound.add(base)
        for name, member in list(vars(base).items()):
            is_special = name.startswith("__") and name.endswith("__")
            if name in _NOT_WRAPPED or (name.startswith("_") and not is_special):
                continue
            wrapped = bounded(member)
            if wrapped is not member:
                setattr(base, name, wrapped)


def bounded(member: Any) -> Any:
    """Wraps a member of a class, if it is a function, a method or a property."""
    if type(member) is FunctionType:
        return boundary(member)
    if type(member) in (classmethod, staticmethod):
        return (
            type(member)(boundary(member.__func__)) if isinstance(member.__func__, FunctionType) else member
        )
    if type(member) is property and isinstance(member.fget, FunctionType):
        return property(boundary(member.fget), member.fset, member.fdel, member.__doc__)
    return member


def shorten(error: BaseException) -> None:
    """Removes the hidden frames from the traceback of an error that leaves a public call, and from its causes.

    Errors that the callers of the public call are handling stay unchanged: they do not belong to this call.
    """
    if is_full():
        return
    callers: set[FrameType] = set()
    frame = sys._getframe(1).f_back
    while frame is not None:
        callers.add(frame)
        frame = frame.f_back
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        trace = each.__traceback__
        if trace is not None and trace.tb_frame in callers:  # the caller that has caught the error
            continue
        BaseException.with_traceback(each, _shown(trace))  # works also for errors that refuse assignments
        notes = getattr(each, "__notes__", [])
        notes[:] = [note for note in notes if _JAX_NOTE not in note]
        waiting += (each.__cause__, each.__context__)
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _shown(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    is_below = False
    while trace is not None:
        is_below = _is_hidden(trace.tb_frame, is_below)
        if not is_below:
            kept.append(trace)
        trace = trace.tb_next
    shown = None
    for each in reversed(kept):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def _is_hidden(frame: FrameType, is_below: bool) -> bool:
    """``is_below`` is true if the frame that has called this one is hidden."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package in _HIDDEN:
        return True
    return is_below and (package in _HIDDEN_BELOW or is_standard_library(frame.f_code.co_filename))
