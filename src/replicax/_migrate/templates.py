"""Templates: the replacements of TensorFlow expressions, with their arguments.

A template is an expression with placeholders: ``xp.mean({input_tensor:array}, axis={axis|0})``.

- ``{axis}`` is the argument as written. If it was not given, the template's call leaves out that argument.
- ``{axis|0}`` is ``0`` if the argument was not given.
- ``{axis:axes}`` is the argument in another form: see ``FORMS``.
- ``{*inputs}`` are all arguments of ``*inputs``. ``{self}`` is the object, in a row of a method; ``{owner}`` is the
  object that has it as an attribute.
- ``xp`` is ``keras.ops`` in a file that uses Keras, ``jax.numpy`` otherwise; ``table.ROOTS`` has the other names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

from replicax._migrate.call_arguments import (
    FORMS,
    Arguments,
    BindError,
    in_brackets,
    is_simple,
    parsed,
    stands_alone,
)

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
PLACEHOLDER: Final = re.compile(r"\{(\*?)(\w+)(?::(\w+))?(?:\|([^{}]*))?\}")


def fill(template: str, arguments: Arguments, bound: Mapping[str, str] = _NONE) -> str:
    """Returns the source text of a template, given the arguments from ``Row.bind``.

    Args:
      bound: Parameter -> the name that its first place binds to the argument, for those from ``evaluated_twice``.
    """
    source, placeholders = as_names(template)
    tree = ast.parse(source, mode="eval").body
    seen: set[str] = set()

    def text_of(placeholder: _Placeholder, *, closed: bool) -> str:
        name = bound.get(placeholder.parameter)
        if name is None:
            return placeholder.text(arguments, closed=closed)
        if name in seen:
            return name
        seen.add(name)
        return f"({name} := {placeholder.text(arguments, closed=True)})"

    def has_value(node: ast.AST) -> bool:
        """True for an argument that stays. A call below it leaves out its own arguments."""
        if isinstance(node, ast.Name) and node.id in placeholders:
            return placeholders[node.id].has_value(arguments)
        if isinstance(node, ast.Call):
            return not (below := [*node.args, *node.keywords]) or any(map(has_value, below))
        return all(map(has_value, ast.iter_child_nodes(node)))

    def render(node: ast.AST, *, closed: bool) -> str:
        """Returns the text of a node. ``closed`` is true between brackets or commas, where it needs no brackets of
        its own.
        """
        start, end = _span(source, node)
        if isinstance(node, ast.Name) and node.id in placeholders:
            return text_of(placeholders[node.id], closed=closed)
        children = sorted(
            (child for child in _parts(node) if not (isinstance(node, ast.Call) and child is node.func)),
            key=lambda child: _span(source, child),
        )
        if isinstance(node, ast.Call) and children:
            kept = [child for child in children if has_value(child)]
            first, last = _span(source, children[0])[0], _span(source, children[-1])[1]
            head = render(node.func, closed=False) + source[_span(source, node.func)[1] : first]
            return head + ", ".join(render(c, closed=True) for c in kept) + source[last:end]
        if isinstance(node, ast.Call):
            return render(node.func, closed=False) + source[_span(source, node.func)[1] : end]
        enclosed = isinstance(node, ast.keyword | ast.List | ast.Tuple | ast.Set | ast.Dict)
        text, at = "", start
        for child in children:
            begin, stop = _span(source, child)
            is_index = isinstance(node, ast.Subscript) and child is node.slice
            text += source[at:begin] + render(child, closed=enclosed or is_index)
            at = stop
        return text + source[at:end]

    return render(tree, closed=True)


@final
@dataclass(frozen=True)
class _Placeholder:
    """One ``{...}`` of a template."""

    parameter: str
    form: str
    default: str | None

    def has_value(self, arguments: Arguments) -> bool:
        return self.parameter in arguments or self.default is not None

    def text(self, arguments: Arguments, *, closed: bool) -> str:
        given = arguments.get(self.parameter, self.default)
        assert given is not None, f"{self.parameter} is required by its template"
        if self.form == "braces":
            return '"' + " ".join("{}" for _ in given) + '"'
        if not isinstance(given, str):
            return ", ".join(given)
        if self.form and self.parameter in arguments:
            given = FORMS[self.form](given)
        return given if closed and stands_alone(given) else in_brackets(given)


def as_names(template: str) -> tuple[str, dict[str, _Placeholder]]:
    """Returns the template as Python source, with each placeholder as a name."""
    placeholders: dict[str, _Placeholder] = {}

    def named(match: re.Match[str]) -> str:
        _, parameter, form, default = match.groups()
        name = given_name(parameter) + (f"_{len(placeholders)}" if form or default else "")
        placeholders[name] = _Placeholder(parameter, form or "", default)
        return name

    return PLACEHOLDER.sub(named, template), placeholders


def simplified(template: str, arguments: Arguments) -> str:
    """Returns the template with forms and defaults only where they change the text.

    Raises:
      BindError: A form does not fit its argument.
    """
    twice = evaluated_twice(template, arguments)

    def simple(match: re.Match[str]) -> str:
        _, parameter, form, default = match.groups()
        given = arguments.get(parameter)
        if given is None:
            return match[0] if default is None else default
        if not isinstance(given, str):
            if form and any(text.startswith("*") for text in given):
                raise BindError("the arguments are not written out")
            return match[0]
        if parameter in twice:  # all places get one value, so the form of one is that of all
            forms = [m[3] for m in PLACEHOLDER.finditer(template) if m[2] == parameter and m[3]]
            form = next((each for each in forms if FORMS[each](given) != given), None)
        changed = form and FORMS[form](given) != given
        return "{" + parameter + (f":{form}" if changed else "") + "}"

    return PLACEHOLDER.sub(simple, template)


def evaluated_twice(template: str, arguments: Arguments) -> list[str]:
    """Returns the parameters whose arguments the template would evaluate several times, although they are no names."""
    places = [match[2] for match in PLACEHOLDER.finditer(template)]
    return [
        parameter
        for parameter, given in arguments.items()
        if places.count(parameter) > 1 and isinstance(given, str) and not is_simple(parsed(given))
    ]


def given_name(parameter: str) -> str:
    """Returns the name of an argument in a template that is read as Python."""
    return f"__given_{parameter}"


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes below a node that have a position in the source."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr | ast.keyword | ast.arg):
            yield child
        else:
            yield from _parts(child)


def _span(source: str, node: Any) -> tuple[int, int]:
    """Returns the start and the end of a node. Templates have one line of ASCII characters."""
    return node.col_offset, node.end_col_offset


def dotted(node: ast.AST) -> str | None:
    """Returns ``a.b.c`` for a chain of names; None for other nodes, also for a placeholder."""
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return left and f"{left}.{node.attr}"
    return node.id if isinstance(node, ast.Name) and not node.id.startswith("__given_") else None
