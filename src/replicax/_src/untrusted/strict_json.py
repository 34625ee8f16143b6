"""Reads JSON that another program, a file or a peer has written, and checks its size, depth, types and bounds.

``read_json`` parses. A ``JsonReader`` has a value and its place, and returns the value as its caller needs it. The only
error is ``TextError``; the caller translates it into a public one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar, final

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


# --- the form of a value ------------------------------------------------------------------------------------


@final
class JsonReader:
    """A value of a JSON text, and its place there. Each method checks the form of the value, and returns it.

    A ``Form`` is one of these methods, or a function that calls them. All raise TextError.

    Args:
      value: The value.
      place: Its place, for messages; inside of another value its name or its position there.
      within: The list or object that has it.
    """

    __slots__ = ("_place", "_within", "value")

    def __init__(self, value: Any, place: str | int, within: JsonReader | None = None):
        self.value, self._place, self._within = value, place, within

    @property
    def where(self) -> str:
        """The place of the value in the text."""
        place = f"[{self._place}]" if isinstance(self._place, int) else self._place
        return place if self._within is None else f"{self._within.where}{place}"

    def wrong(self, allowed: str) -> TextError:
        """Returns the error for a value that is not allowed."""
        return wrong(self.where, self.value, allowed)

    def anything(self) -> Any:
        """Accepts every value."""
        return self.value

    def flag(self) -> bool:
        """Accepts true and false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def string(self) -> str:
        """Accepts a string."""
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value

    def number(self) -> float:
        """Accepts a finite number, and returns a float."""
        if isinstance(self.value, (int, float)) and not isinstance(self.value, bool):
            try:
                as_float = float(self.value)
            except OverflowError:
                as_float = math.inf
            if math.isfinite(as_float):
                return as_float
        raise self.wrong("a finite number")

    def whole(self, least: int = 0, most: int = MOST_COUNT) -> int:
        """Accepts whole numbers within bounds."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return self.value

    def count(self) -> int:
        """Accepts the number of anything that has a size."""
        return self.whole()

    def integer(self) -> int:
        """Accepts such a number, also below 0."""
        return self.whole(-MOST_COUNT)

    def crc32(self) -> int:
        """Accepts a checksum."""
        return self.whole(0, 2**32 - 1)

    def optional(self, form: Form[T]) -> T | None:
        """Accepts null, and what ``form`` accepts."""
        return None if self.value is None else form(self)

    def one_of(self, *allowed: Any) -> Any:
        """Accepts these values, of these types."""
        if not any(type(self.value) is type(each) and self.value == each for each in allowed):
            raise self.wrong(f"one of {', '.join(map(repr, allowed))}")
        return self.value

    def items(self, form: Form[T], *, least: int = 0, most: int = MOST_COUNT) -> tuple[T, ...]:
        """Accepts a list, and returns a tuple."""
        if not isinstance(self.value, list) or not least <= len(self.value) <= most:
            bounds = "" if most == MOST_COUNT and not least else f" of {least} to {most}"
            raise self.wrong(f"a list{bounds}")
        return tuple([form(JsonReader(each, position, self)) for position, each in enumerate(self.value)])

    def fixed(self, *forms: Form[Any]) -> tuple[Any, ...]:
        """Accepts a list with one item for each form, and returns a tuple."""
        if not isinstance(self.value, list) or len(self.value) != len(forms):
            raise self.wrong(f"a list of {len(forms)}")
        return tuple(
            [
                form(JsonReader(each, n, self))
                for n, (form, each) in enumerate(zip(forms, self.value, strict=True))
            ]
        )

    def table(self, form: Form[T], names: Form[str] | None = None) -> dict[str, T]:
        """Accepts an object with any names, and returns a dict."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if names is not None:
            for name in self.value:
                names(JsonReader(name, f"a name in {self.where}"))
        return {name: form(JsonReader(each, f"[{name!r:.60}]", self)) for name, each in self.value.items()}

    def record(
        self,
        needed: Mapping[str, Form[Any]],
        may: Mapping[str, Form[Any]] | None = None,
        *,
        others: bool = False,
    ) -> dict[str, Any]:
        """Accepts an object with these fields, and returns a dict.

        Args:
          needed: The fields that it must have.
          may: The fields that it may have.
          others: True if it may have other fields, which are not checked.
        """
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        known = {**needed, **(may or {})}
        missing = [name for name in needed if name not in self.value]
        if missing:
            raise TextError(f"{self.where} has no {missing[0]!r}")
        unknown = [] if others else [name for name in self.value if name not in known]
        if unknown:
            raise TextError(f"{self.where} has {unknown[0]!r:.60}, which is not allowed")
        return {
            name: known.get(name, JsonReader.anything)(JsonReader(each, f".{name}", self))
            for name, each in self.value.items()
        }

    def check_size(self, item_bytes: int) -> None:
        """Checks that an array of this shape is possible, also if it is empty."""
        if math.prod(max(1, size) for size in self.value) * item_bytes > MOST_COUNT:
            raise wrong(self.where, list(self.value), f"the shape of an array of at most {MOST_COUNT} bytes")


T = TypeVar("T")
Form: TypeAlias = Callable[[JsonReader], T]
"""Returns a value in the form that its reader needs."""


def wrong(where: str, value: Any, allowed: str) -> TextError:
    """Returns the error for a value that is not allowed."""
    return TextError(f"{where} is {value!r:.60}, and not {allowed}")
