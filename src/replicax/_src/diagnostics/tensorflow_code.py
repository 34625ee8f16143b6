"""TensorFlow code that a program still has: builds the error that names its line and its replacement.

TensorFlow is never imported: its functions, objects and frames are recognised by their modules. Names of TensorFlow
that JAX, Keras or replicax lack are the subject of ``missing_names``; errors of JAX, of ``explanations``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from replicax._src.diagnostics import missing_names
from replicax._src.diagnostics.advice import advice, uses_keras
from replicax._src.user.tensorflow_values import (
    is_module_of_tensorflow,
    is_object,
    is_tensor,
    is_tensorflow,
    name_of,
)
from replicax._src.user.user_code import expression, frames_of, is_user_code, place_of
from replicax._src.vocabulary.errors import ReplicaxError, UnsupportedError

_MISSING: Final = object()
_MOST_SHOWN: Final = 80


# --- names --------------------------------------------------------------------------------------------


def named_by(path: tuple[str, ...], root: Any) -> tuple[str, Any] | None:
    """Returns the TensorFlow object that an expression such as ``tf.nn.relu`` or ``self.counter.assign`` means.

    Args:
      path: The names of the expression.
      root: The object of the first name.

    Returns:
      Its public name, and the module, function or object of TensorFlow; None if it is not TensorFlow's.
    """
    value, module = root, ""
    for i, name in enumerate(("", *path[1:])):
        if i:
            value = member_of(value, name)
        if isinstance(value, types.ModuleType) and is_module_of_tensorflow(value.__name__):
            module = value.__name__.removeprefix("tensorflow").removeprefix("._api.v2")
            rest = path[i + 1 :]
            for each in rest:
                value = member_of(value, each)
            if value is _MISSING or not is_tensorflow(value):  # for example tf.keras
                return None
            return f"tf{module}" + "".join(f".{each}" for each in rest), value
        if is_tensorflow(value):
            return name_of(value), value
    return None


def member_of(value: Any, name: str) -> Any:
    """Returns an attribute as it is stored, without running code of a class or importing what a module lacks."""
    if isinstance(value, types.ModuleType):
        return vars(value).get(name, sys.modules.get(f"{value.__name__}.{name}", _MISSING))
    return inspect.getattr_static(value, name, _MISSING)


def value_of(path: tuple[str, ...], frame: types.FrameType) -> Any:
    """Returns the object that a dotted name stands for in a frame; a marker of this file if there is none."""
    value = frame.f_locals.get(path[0], frame.f_globals.get(path[0], _MISSING))
    for name in path[1:]:
        value = member_of(value, name)
    return value


def dotted(node: ast.AST) -> tuple[str, ...]:
    """Returns ``("a", "b")`` for the expression ``a.b``; an empty tuple for other expressions."""
    if isinstance(node, ast.Attribute):
        above = dotted(node.value)
        return (*above, node.attr) if above else ()
    return (node.id,) if isinstance(node, ast.Name) else ()


# --- errors that TensorFlow's code causes -------------------------------------------------------------


@contextlib.contextmanager
def explained(*, is_in_trace: bool = True) -> Iterator[None]:
    """Returns a context that replaces the errors of TensorFlow code in a function that is being traced.

    Args:
      is_in_trace: True if all code inside is traced. If not, only JAX's errors count: others may come from tf.data.

    Raises:
      UnsupportedError: It replaces these errors.
    """
    try:
        yield
    except ReplicaxError:
        raise
    except Exception as error:
        missing_names.add_note(error)
        found = None if "tensorflow" not in sys.modules else _error_of(error, is_in_trace)
        if found is None:
            raise
        raise found from None


def _error_of(error: Exception, is_in_trace: bool) -> UnsupportedError | None:
    each: BaseException | None = error
    while each is not None:
        is_of_jax = type(each).__module__.startswith("jax")
        if (is_in_trace and each is error) or is_of_jax:
            is_of_conversion = type(each).__name__ == "TracerArrayConversionError"
            found = _error_at(each.__traceback__, is_of_conversion=is_of_conversion)
            if found is not None:
                return found
        each = each.__cause__ or each.__context__
    return None


def _error_at(traceback: types.TracebackType | None, *, is_of_conversion: bool) -> UnsupportedError | None:
    """Returns the error for the end of a traceback; None if TensorFlow has no part in it.

    Args:
      traceback: The traceback.
      is_of_conversion: True if the failing code needed a NumPy array. Keras may have removed TensorFlow's frames.
    """
    frames = list(frames_of(traceback))
    users = [i for i, entry in enumerate(frames) if is_user_code(entry.tb_frame.f_code.co_filename)]
    if not users:
        return None
    homes = [_package_of(entry.tb_frame) for entry in frames[users[-1] + 1 :]]
    is_in_tensorflow = "tensorflow" in homes and "keras" not in homes[: homes.index("tensorflow")]
    entry = frames[users[-1]]
    frame, line = entry.tb_frame, entry.tb_lineno
    text = expression(frame, entry.tb_lasti, line)
    found = list(_names_in(text, frame))
    if not is_in_tensorflow and not any(is_of_conversion or is_object(value) for _, value in found):
        return None
    code = frame.f_code
    shown = f"`{shortened(text)}`" if text else "the code"  # from standard input, say
    made = _origins_in(text, frame, line)
    names = [name for origin in made for name in origin.names] or [name for name, _ in found]
    where = "".join(
        f" {one.name} is the result of `{shortened(one.text)}` at line {one.line}." for one in made
    )
    error = UnsupportedError(
        f"At {place_of(code.co_filename, line, code.co_name)}, {shown} uses TensorFlow, which cannot compute with the "
        f"arrays and variables of a function that JAX traces.{where} {advice(names, uses_keras(frame.f_globals))}"
    )
    to_user = None  # without the frames of TensorFlow
    for each in reversed(frames[: users[-1] + 1]):
        to_user = types.TracebackType(to_user, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return error.with_traceback(to_user)


class _Origin(NamedTuple):
    """The statement in which a function gave a tensor of TensorFlow its name.

    Attributes:
      name: The name.
      text, line: The source of the value, and its line.
      names: The functions of TensorFlow in it.
    """

    name: str
    text: str
    line: int
    names: list[str]


def _origins_in(text: str, frame: types.FrameType, line: int) -> list[_Origin]:
    """Returns the origins of the tensors that an expression names, if the same function has made them."""
    tensors = {
        path[0] for path in paths_in(text) if len(path) == 1 and is_tensor(frame.f_locals.get(path[0]))
    }
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    try:
        source = textwrap.dedent("".join(inspect.getblock(lines[code.co_firstlineno - 1 :])))
        nodes = list(ast.walk(ast.parse(source))) if tensors else []
    except SyntaxError:  # in the middle of an expression
        return []
    found: dict[str, _Origin] = {}
    for node in nodes:
        number = code.co_firstlineno + getattr(node, "lineno", 1) - 1
        if not isinstance(node, ast.Assign) or number >= line:
            continue
        made = ast.unparse(node.value)
        made_by = [one for one, value in _names_in(made, frame) if not is_object(value)]
        for target in node.targets:
            if made_by and isinstance(target, ast.Name) and target.id in tensors:
                found[target.id] = _Origin(target.id, made, number, made_by)
    return list(found.values())


def shortened(text: str) -> str:
    """Returns a source text in the form of messages."""
    text = " ".join(text.split())
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


def _package_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _names_in(text: str, frame: types.FrameType) -> Iterator[tuple[str, Any]]:
    """Yields the TensorFlow objects that an expression names, as ``named_by`` returns them."""
    for path in paths_in(text):
        root = frame.f_locals.get(path[0], frame.f_globals.get(path[0], _MISSING))
        if found := named_by(path, root):
            yield found


@functools.lru_cache(maxsize=64)
def paths_in(text: str) -> tuple[tuple[str, ...], ...]:
    """Returns the dotted names in an expression."""
    try:
        waiting: list[ast.AST] = [ast.parse(f"(\n{text}\n)", mode="eval").body]
    except SyntaxError:  # it is a statement
        return ()
    found = []
    while waiting:
        node = waiting.pop(0)
        if path := dotted(node):
            found.append(path)
        else:
            waiting += ast.iter_child_nodes(node)
    return tuple(found)


# --- calls of replicax in TensorFlow's functions and tapes --------------------------------------------


def check_not_in_tensorflow(call: str) -> None:
    """Raises if a public call is made in a ``tf.function``, or while a ``tf.GradientTape`` records.

    Raises:
      UnsupportedError: The call is made there. AutoGraph does not change this error.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return
    is_in_function = getattr(tensorflow, "inside_function", None)
    if is_in_function is not None and is_in_function():
        raise in_tf_function(f"{call} was called")
    is_recording = getattr(sys.modules.get("tensorflow.python.eager.record"), "could_possibly_record", None)
    if is_recording is not None and is_recording():
        raise UnsupportedError(
            f"{call} was called while a tf.GradientTape records, which cannot record JAX programs. Open an "
            "rx.GradientTape inside the function that strategy.run or rx.function runs, or use rx.value_and_grad."
        )


def check_no_function_of_tensorflow(call: str, function: Any) -> None:
    """Raises if a function that is to be traced is TensorFlow's own, or belongs to a SavedModel.

    Raises:
      UnsupportedError: It is. A ``tf.function`` of Python code is allowed, because its code is traced.
    """
    if "tensorflow" not in sys.modules or not is_tensorflow(function):
        return
    if is_object(function) and getattr(function, "python_function", None) is not None:
        return
    name = name_of(function)
    raise UnsupportedError(
        f"{call} was given {name}, which TensorFlow runs, so it cannot compute with arrays of JAX. "
        f"{advice([name], uses_keras=True)} A function of a SavedModel runs outside of steps, on values of tf.data or "
        "NumPy."
    )


def in_tf_function(what: str) -> UnsupportedError:
    """Returns the error for an action in or with a ``tf.function``."""
    function = _tf_function_on_the_stack()
    code = getattr(function, "__code__", None)
    place = ""
    if code is not None:
        place = f" {code.co_name}, at {place_of(code.co_filename, code.co_firstlineno, code.co_name).partition(' in ')[0]}"
    error = UnsupportedError(
        f"{what} in the tf.function{place}. TensorFlow traces it, and its graph cannot hold the values or "
        "variables of JAX. Write @rx.function in place of @tf.function, which makes one program "
        "of the code and of the strategy.run in it."
    )
    # TensorFlow 2.21 would raise a StagingError instead.
    error.ag_pass_through = True  # type: ignore[attr-defined]
    return error


def _tf_function_on_the_stack() -> Any:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_module_of_tensorflow(frame.f_globals.get("__name__")) and frame.f_code.co_name == "__call__":
            function = getattr(frame.f_locals.get("self"), "python_function", None)
            if function is not None:
                return function
        frame = frame.f_back
    return None


def is_converted_by_tf_function() -> bool:
    """True while a ``tf.function`` examines the arguments of a call."""
    return "tensorflow" in sys.modules and _tf_function_on_the_stack() is not None
