"""The result of a case as plain JSON, and the comparison of two observations.

float32, int32 and bool arrays are nested lists (1.0 is floating, 1 is integer); other dtypes are named:
``{"dtype": "float64", "value": 2.5}``. ``{"per_replica": [...]}``, ``{"tuple": [...]}``,
``{"raises": "ValueError", "message": "..."}``. nan and infinities are strings.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

PLAIN_DTYPES = ("float32", "int32", "bool")
EVERY_ERROR = ("Exception", "BaseException", "object")


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception as an observation; ``types`` are the names of its class and its bases."""

    types: tuple[str, ...]
    message: str


def attempt(fn: Callable[[], Any]) -> Any | Raised:
    """The result of ``fn``, or the exception that it raises, as a value."""
    try:
        return fn()
    except Exception as error:  # whatever it is, it is the observation
        types = tuple(t.__name__ for t in type(error).__mro__ if t is not object)
        return Raised(types, str(error))


def discard(*_: Any) -> None:
    """Drops its arguments: for calls that are made for their effect."""


def observe(value: Any, distributed_values: Callable[[Any], tuple[Any, ...] | None]) -> Any:
    """Turns the result of a case into plain JSON."""

    def visit(x: Any) -> Any:
        if x is None or isinstance(x, (bool, int, str)):
            return x
        if type(x) is float:  # numpy.float64 is a subclass of it, and is an array
            return _number(x)
        if isinstance(x, Raised):
            bases = [name for name in x.types[1:] if name not in EVERY_ERROR]
            return {"raises": x.types[0], "is_a": bases, "message": _stable(x.message)}
        if isinstance(x, dict):
            return {str(key): visit(item) for key, item in x.items()}
        if isinstance(x, tuple):
            return {"tuple": [visit(item) for item in x]}
        if isinstance(x, list):
            return [visit(item) for item in x]
        values = distributed_values(x)
        if values is not None:
            return {"per_replica": [visit(item) for item in values]}
        return _array(np.asarray(x))

    return visit(value)


TYPE_OF_FRAMEWORK = ("OpError",)
NOT_MEANT = ("AssertionError", "AttributeError", "IndexError")


def _same_error(seen: Any, wanted: dict[str, Any]) -> bool:
    """Errors agree by built-in type.

    Any error is accepted if TensorFlow's type is its own (InvalidArgumentError) or an accident (a bare
    AssertionError). A TypeError may be a ValueError: both are mistakes of the caller.
    """
    if not isinstance(seen, dict) or "raises" not in seen:
        return False
    types = {wanted["raises"], *wanted.get("is_a", ())}
    if wanted["raises"] in NOT_MEANT or types.intersection(TYPE_OF_FRAMEWORK):
        return True
    accepted = {"TypeError", "ValueError"} if wanted["raises"] == "TypeError" else {wanted["raises"]}
    return bool(accepted.intersection((seen["raises"], *seen["is_a"])))


def same(seen: Any, wanted: Any, rtol: float) -> bool:
    """True if ``seen`` equals the observation ``wanted``: numbers to ``rtol``, errors by type, not by text."""
    if isinstance(wanted, dict) and "raises" in wanted:
        return _same_error(seen, wanted)
    if type(seen) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return seen.keys() == wanted.keys() and all(same(seen[k], wanted[k], rtol) for k in wanted)
    if isinstance(wanted, list):
        return len(seen) == len(wanted) and all(map(same, seen, wanted, [rtol] * len(seen)))
    if isinstance(wanted, float):
        return math.isclose(seen, wanted, rel_tol=rtol, abs_tol=rtol)
    return seen == wanted


def _array(x: np.ndarray) -> Any:
    if x.dtype.kind == "f":
        # The shortest text that reads back as the same float32.
        value = _nested(x, lambda item: _number(float(np.format_float_scientific(item))))
    else:
        value = x.tolist()
    return value if x.dtype.name in PLAIN_DTYPES else {"dtype": x.dtype.name, "value": value}


def _nested(x: np.ndarray, fn: Callable[[Any], Any]) -> Any:
    return [_nested(item, fn) for item in x] if x.ndim else fn(x[()])


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)


def _stable(message: str) -> str:
    """The first 120 characters of a message, without parts that differ between runs or places."""
    message = re.sub(r"\{\{.*?\}\} |0x[0-9a-f]{6,}", "", " ".join(message.split()))
    message = message.partition(" Detected at node ")[0]
    if 'File "' in message:  # a traceback from inside a traced function
        message = re.split(r"\w+Error: ", message)[-1]
    return message[:120]
