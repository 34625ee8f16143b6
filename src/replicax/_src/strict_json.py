"""Reads JSON that another program, a file or a peer has written, and checks its size, depth, types and bounds.

``read_json`` parses. A ``Check`` takes a value and its place, and returns the value as the reader needs it. The only
error is ``TextError``; the reader translates it into a public one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

MOST_DEPTH: Final = 200
"""The deepest nesting of lists and objects. Python's own limit, about 1000, depends on the caller's depth."""

MOST_COUNT: Final = 2**62
"""The largest number of anything that has a size: bytes, rows, files."""

_MOST_BYTES: Final = 256 << 20


class TextError(ValueError):
    """A text is not what its writer should have written. The message says where, what it has, and what is allowed."""


def read_json(
    text: str | bytes,
    *,
    most_bytes: int = _MOST_BYTES,
    most_depth: int = MOST_DEPTH,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Returns the value of a JSON text.

    Args:
      text: The text, or its bytes in UTF-8.
      most_bytes: The largest length of the text.
      most_depth: The deepest nesting of lists and objects.
      object_pairs_hook: As in ``json.loads``.

    Raises:
      TextError: It is not JSON, or too large, or nested too deeply. Its cause is ``json.JSONDecodeError`` for text
        that is not JSON.
    """
    if len(text) > most_bytes:
        raise TextError(f"it has {len(text)} bytes, and at most {most_bytes} are allowed")
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError as error:
        raise _too_deep(most_depth) from error
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise TextError(f"it is not JSON ({error})") from error
    num_openings = (
        text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    )
    if num_openings > most_depth and _is_deeper(value, most_depth):
        raise _too_deep(most_depth)
    return value


def _too_deep(most_depth: int) -> TextError:
    return TextError(f"it is nested more deeply than {most_depth} lists and objects")


def _is_deeper(value: Any, most_depth: int) -> bool:
    level = [value]
    for _ in range(most_depth):
        inside: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inside += [child for child in each.values() if isinstance(child, (dict, list))]
            elif isinstance(each, list):
                inside += [child for child in each if isinstance(child, (dict, list))]
        if not inside:
            return False
        level = inside
    return True


# --- checks -------------------------------------------------------------------------------------------------

Check = Callable[[Any, str], Any]
"""Returns a value in the form that its reader needs. Its second argument is the place of the value."""


def wrong(where: str, value: Any, allowed: str) -> TextError:
    """Returns the error for a value that is not allowed."""
    return TextError(f"{where} is {value!r:.60}, and not {allowed}")


def anything(value: Any, where: str) -> Any:
    """Accepts every value."""
    del where
    return value


def flag(value: Any, where: str) -> bool:
    """Accepts true and false."""
    if not isinstance(value, bool):
        raise wrong(where, value, "true or false")
    return value


def string(value: Any, where: str) -> str:
    """Accepts a string."""
    if not isinstance(value, str):
        raise wrong(where, value, "a string")
    return value


def number(value: Any, where: str) -> float:
    """Accepts a finite number, and returns a float."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            as_float = float(value)
        except OverflowError:
            as_float = math.inf
        if math.isfinite(as_float):
            return as_float
    raise wrong(where, value, "a finite number")


def whole(least: int = 0, most: int = MOST_COUNT) -> Check:
    """Accepts whole numbers within bounds."""

    def check(value: Any, where: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise wrong(where, value, f"a whole number from {least} to {most}")
        return value

    return check


count: Final = whole()
integer: Final = whole(-MOST_COUNT)
crc32: Final = whole(0, 2**32 - 1)


def optional(check: Check) -> Check:
    """Accepts null, and what ``check`` accepts."""
    return lambda value, where: None if value is None else check(value, where)


def one_of(*allowed: Any) -> Check:
    """Accepts these values, of these types."""

    def check(value: Any, where: str) -> Any:
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise wrong(where, value, f"one of {', '.join(map(repr, allowed))}")
        return value

    return check


def items(check: Check, *, least: int = 0, most: int = MOST_COUNT) -> Check:
    """Accepts a list, and returns a tuple."""

    def check_items(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            bounds = "" if most == MOST_COUNT and not least else f" of {least} to {most}"
            raise wrong(where, value, f"a list{bounds}")
        return tuple([check(each, f"{where}[{position}]") for position, each in enumerate(value)])

    return check_items


def fixed(*checks: Check) -> Check:
    """Accepts a list with one item for each check, and returns a tuple."""

    def check(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(checks):
            raise wrong(where, value, f"a list of {len(checks)}")
        return tuple(
            each(item, f"{where}[{n}]") for n, (each, item) in enumerate(zip(checks, value, strict=True))
        )

    return check


def table(check: Check, names: Check = string) -> Check:
    """Accepts an object with any names, and returns a dict."""

    def check_table(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(where, value, "an object")
        return {
            names(name, f"a name in {where}"): check(each, f"{where}[{name!r:.60}]")
            for name, each in value.items()
        }

    return check_table


def record(
    needed: Mapping[str, Check], may: Mapping[str, Check] | None = None, *, others: bool = False
) -> Check:
    """Accepts an object with these fields, and returns a dict.

    Args:
      needed: The fields that it must have.
      may: The fields that it may have.
      others: True if it may have other fields, which are not checked.
    """
    known = {**needed, **(may or {})}

    def check(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(where, value, "an object")
        missing = [name for name in needed if name not in value]
        if missing:
            raise TextError(f"{where} has no {missing[0]!r}")
        unknown = [] if others else [name for name in value if name not in known]
        if unknown:
            raise TextError(f"{where} has {unknown[0]!r:.60}, which is not allowed")
        return {name: known.get(name, anything)(each, f"{where}.{name}") for name, each in value.items()}

    return check


def check_size(shape: Sequence[int], item_bytes: int, where: str) -> None:
    """Checks that an array of a shape is possible, also if it is empty.

    Raises:
      TextError: It has too many bytes.
    """
    if math.prod(max(1, size) for size in shape) * item_bytes > MOST_COUNT:
        raise wrong(where, list(shape), f"the shape of an array of at most {MOST_COUNT} bytes")
