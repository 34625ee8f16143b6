"""Arguments of a call as source texts: binds them to the parameters of a row, and converts them for templates."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, final

Arguments: TypeAlias = Mapping[str, "str | tuple[str, ...]"]


class BindError(ValueError):
    """A row does not cover this call. A mark shows the message as the reason."""


@final
@dataclass(frozen=True)
class Parameter:
    """A parameter of a TensorFlow function. ``default`` is its source text; None if it is required."""

    name: str
    default: str | None = None
    kind: Literal["positional", "variadic", "keyword_only"] = "positional"


def bound_to(
    parameters: Sequence[Parameter], positional: Sequence[str], keywords: Mapping[str, str]
) -> Iterator[tuple[str, str | tuple[str, ...]]]:
    """Yields each parameter with its argument, bound as Python binds a call."""
    places = [parameter for parameter in parameters if parameter.kind == "positional"]
    rest = next((parameter for parameter in parameters if parameter.kind == "variadic"), None)
    texts = (*positional, *keywords.values())
    written = (*positional[: len(places)], *keywords.values()) if rest else texts
    if any(text.startswith("*") for text in written) or "**" in keywords:
        raise BindError("the arguments are not written out")
    if len(positional) > len(places) and rest is None:
        raise BindError("it has too many arguments")
    yield from ((parameter.name, text) for parameter, text in zip(places, positional, strict=False))
    if rest is not None:
        yield rest.name, tuple(positional[len(places) :])
    by_position = {parameter.name for parameter in places[: len(positional)]}
    known = {parameter.name for parameter in parameters if parameter.kind != "variadic"}
    for name, text in keywords.items():
        if name not in known or name in by_position:
            raise BindError(
                f"the table has no rule for its argument {name}"
                if name not in known
                else f"{name} is given twice"
            )
        yield name, text
    given = by_position | keywords.keys()
    for parameter in parameters:
        if parameter.default is None and parameter.kind != "variadic" and parameter.name not in given:
            raise BindError(f"the argument {parameter.name} is missing")


# Forms of arguments.


def _number(text: str) -> str:
    """Returns the argument. Raises if it contains strings."""
    if holds_text(text):
        raise BindError("JAX has no arrays of strings")
    return text


def holds_text(text: str) -> bool:
    """True for a string, or a list with one."""
    node = parsed(text)
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return any(isinstance(item, ast.JoinedStr) or _is_text(item) for item in items)


def _scalar(text: str) -> str:
    """Returns the argument. Raises unless it is a literal number."""
    node = parsed(text)
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    if not isinstance(node, ast.Constant) or _is_text(node):
        raise BindError("it is not clear that this is one number")
    return text


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _array(text: str) -> str:
    """Returns an array. Functions of ``jax.numpy`` take no lists."""
    is_list = isinstance(parsed(text), ast.List | ast.Tuple | ast.ListComp)
    return f"jnp.asarray({_number(text)})" if is_list else text


def _operand(text: str) -> str:
    """Returns an array, also of what may be a variable, which functions of ``jax.lax`` do not take."""
    is_stored = isinstance(parsed(text), ast.Name | ast.Attribute | ast.Subscript)
    return f"jnp.asarray({text})" if is_stored else _array(text)


def _tensor(text: str) -> str:
    """Returns the same for functions of ``keras.ops`` that take arrays only: of a list, or of an attribute."""
    node = parsed(text)
    is_list = isinstance(node, ast.List | ast.Tuple | ast.ListComp)
    is_attribute = isinstance(node, ast.Attribute) and text.startswith("self.")
    return f"ops.convert_to_tensor({_number(text)})" if is_list or is_attribute else text


def _axes(text: str) -> str:
    """Returns axes as a tuple. TensorFlow also takes a list, or a range."""
    if made := _RANGE.fullmatch(text):
        return f"tuple(range({made[1]}))"
    return _tuple(_elements(text)) if isinstance(parsed(text), ast.List) else text


def _text(text: str) -> str:
    """Returns the argument. Raises unless it is a literal string."""
    if not (_is_text(parsed(text)) or isinstance(parsed(text), ast.JoinedStr)):
        raise BindError("it is not a literal string")
    return text


def _lower(text: str) -> str:
    return text.lower() if _is_text(parsed(text)) else f"{in_brackets(text)}.lower()"


def _spatial(text: str, *, is_first: bool = False) -> str:
    """Returns sizes or strides without those of the batch and the channels, which TensorFlow also has."""
    node = parsed(text)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return text
    if not isinstance(node, ast.List | ast.Tuple):
        raise BindError("sizes or strides are not written out")
    elements = _elements(text)
    if len(elements) > 2:
        elements = elements[2:] if is_first else elements[1:-1]
    return _tuple(elements)


def _pair(text: str, *, is_first: bool = False) -> str:
    """Returns the same as ``_spatial``, for two dimensions."""
    spatial = _spatial(text, is_first=is_first)
    return spatial if isinstance(parsed(spatial), ast.Tuple) else f"({spatial}, {spatial})"


def _sections(text: str) -> str:
    """Returns the number of equal parts, or where parts begin, from TensorFlow's number or sizes."""
    try:
        value = ast.literal_eval(text)
    except ValueError:
        if _NUMBER_OF.match(text):
            return text
        raise BindError("it is not clear if this is a number of parts or a list of sizes") from None
    if isinstance(value, int):
        return text
    if not all(isinstance(size, int) and size >= 0 for size in value):
        raise BindError("one of the sizes is not written out")
    return repr(list(itertools.accumulate(value[:-1])))


def _sizes(text: str) -> str:
    """Returns sizes. Raises if one is -1, which stands for the rest."""
    if isinstance(parsed(text), ast.List | ast.Tuple) and any(e.strip() == "-1" for e in _elements(text)):
        raise BindError("JAX takes no size of -1")
    return text


def _count(text: str) -> str:
    """Returns the length of a list."""
    node = parsed(text)
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.List) and len(node.left.elts) == 1:
        return ast.unparse(node.right)
    return str(len(node.elts)) if isinstance(node, ast.List | ast.Tuple) else f"len({text})"


def _device(text: str) -> str:
    """Returns the argument. Raises for the literal name of a task, such as "/job:ps/task:0"."""
    node = parsed(text)
    if _is_text(node) and _DEVICE.fullmatch(node.value) is None:  # type: ignore[attr-defined]
        raise BindError("this is no device of this process")
    return text


_NUMBER_OF: Final = re.compile(r"(\w+\.)*(num|n)(_\w+)?$|len\(|int\(")
_RANGE: Final = re.compile(r"\w+\.a?range\(([^=]*)\)")
_DEVICE: Final = re.compile(
    r"(/job:localhost)?(/replica:0)?(/task:0)?/?(device:)?(CPU|GPU|TPU)(:\d+)?", re.IGNORECASE
)
FORMS: Final[Mapping[str, Callable[[str], str]]] = MappingProxyType(
    {
        "number": _number,
        "array": _array,
        "operand": _operand,
        "tensor": _tensor,
        "axes": _axes,
        "lower": _lower,
        "text": _text,
        "spatial": _spatial,
        "pair": _pair,
        "spatial_first": functools.partial(_spatial, is_first=True),  # for channels that come first
        "pair_first": functools.partial(_pair, is_first=True),
        "scalar": _scalar,
        "sections": _sections,
        "count": _count,
        "sizes": _sizes,
        "device": _device,
        "braces": str,  # for *inputs: a string with one {} for each of them
    }
)


def _elements(text: str) -> list[str]:
    """Returns the source texts of the elements of a list or a tuple."""
    node = parsed(text)
    assert isinstance(node, ast.List | ast.Tuple)
    return [ast.unparse(element) for element in node.elts]


def _tuple(elements: Sequence[str]) -> str:
    return f"({', '.join(elements)}{',' if len(elements) == 1 else ''})"


# Expressions.


def same_source(text: Any, other: str) -> bool:
    """True if two texts are the same expression, whatever their quotes and spaces."""
    try:
        return isinstance(text, str) and ast.dump(parsed(text)) == ast.dump(parsed(other))
    except SyntaxError:
        return text == other


def is_simple(node: ast.expr) -> bool:
    """True for an expression that may be evaluated twice."""
    if isinstance(node, ast.UnaryOp):
        return is_simple(node.operand)
    if isinstance(node, ast.Subscript):
        return is_simple(node.value) and is_simple(node.slice)
    if isinstance(node, ast.List | ast.Tuple):
        return all(map(is_simple, node.elts))
    return isinstance(node, ast.Name | ast.Constant) or (
        isinstance(node, ast.Attribute) and is_simple(node.value)
    )


_ATOMS: Final = (
    ast.Name,
    ast.Attribute,
    ast.Call,
    ast.Constant,
    ast.Subscript,
    ast.List,
    ast.Dict,
    ast.Set,
    ast.JoinedStr,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
)


def parsed(text: str) -> ast.expr:
    return ast.parse(f"(\n{text}\n)", mode="eval").body


def stands_alone(text: str) -> bool:
    """True for a text that can be an argument beside others."""
    return not isinstance(parsed(text), ast.GeneratorExp | ast.NamedExpr) or text.startswith("(")


def in_brackets(text: str) -> str:
    node = parsed(text)
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, int | float | complex)
    is_closed = text.startswith("(") and isinstance(node, ast.Tuple | ast.GeneratorExp)
    return text if is_closed or (isinstance(node, _ATOMS) and not is_number) else f"({text})"
