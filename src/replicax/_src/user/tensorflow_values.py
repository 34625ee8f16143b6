"""TensorFlow's functions and objects among the user's values, known by their modules; TensorFlow is not imported."""

from __future__ import annotations

import types
from typing import Any, Final

_PLAIN: Final = frozenset({"DType", "TensorShape", "TensorSpec"})
OF_VARIABLE: Final = (
    "programs of JAX neither read nor assign it. Make an rx.Variable of it, which they do; or pass its "
    "value as it is now, as an argument: variable.numpy()."
)


def is_tensorflow(value: Any) -> bool:
    """True for a module or function of TensorFlow, and for objects of its classes."""
    return is_module_of_tensorflow(_home_of(value)) or is_object(value)


def is_object(value: Any) -> bool:
    """True for a tensor, a variable, a tape, or another object of TensorFlow, but not for dtypes and shapes."""
    return is_module_of_tensorflow(type(value).__module__) and type(value).__name__ not in _PLAIN


def is_variable(value: Any) -> bool:
    """True for a ``tf.Variable``."""
    return any(
        b.__name__ == "Variable" and is_module_of_tensorflow(b.__module__) for b in type(value).__mro__
    )


def is_tensor(value: Any) -> bool:
    """True for a tensor or variable of numbers."""
    name = getattr(getattr(value, "dtype", None), "name", "string")
    return name not in ("string", "resource", "variant") and is_object(value)


def is_module_of_tensorflow(module: Any) -> bool:
    """True for the dotted name of a module of TensorFlow."""
    return isinstance(module, str) and module.partition(".")[0] == "tensorflow"


def _home_of(value: Any) -> Any:
    """Returns the module of a function or class, or the name of a module."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    return getattr(value, "__module__", None) if callable(value) and not is_object(value) else None


def name_of(value: Any) -> str:
    """Returns the public name of a TensorFlow function or class, or of an object's class: ``tf.reduce_mean``."""
    if not is_object(value):
        return f"tf.{_exported(value) or getattr(value, '__name__', '')}"
    if getattr(value, "python_function", None) is not None:
        return "tf.function"
    bases = [base for base in type(value).__mro__ if is_module_of_tensorflow(base.__module__)]
    names = [name for base in bases if (name := _exported(base)) and not name.startswith("__")]
    return f"tf.{next(iter(names), bases[0].__name__)}"


def python_function_of(value: Any) -> Any:
    """Returns the Python function of a ``tf.function``; other values unchanged."""
    return value.python_function if is_object(value) and name_of(value) == "tf.function" else value


def _exported(value: Any) -> str | None:
    """Returns the shortest name under which TensorFlow exports a function or class."""
    while value is not None:
        names = getattr(value, "__dict__", {}).get("_tf_api_names")
        if names:
            return min(names, key=len)
        value = getattr(value, "__wrapped__", None)
    return None
