"""Types that say nothing, in signatures: parameters, results, and the fields of classes.

``Any`` counts under each of its names: an alias of it (``Value = Any``, ``from typing import Any as X``), an alias that
contains it, and an alias from another file. So that nobody swaps it for something as empty, ``object``, containers and
``Callable`` without arguments, parameters without a type and ``type: ignore`` are counted beside it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from house.source import Function, House

BARE: Final = frozenset(
    [
        "Callable",
        "dict",
        "list",
        "tuple",
        "set",
        "frozenset",
        "type",
        "Mapping",
        "MutableMapping",
        "Sequence",
        "Iterable",
        "Iterator",
        "Collection",
        "Generator",
        "Awaitable",
        "Coroutine",
    ]
)
TYPING: Final = ("typing", "typing_extensions")
TYPES: Final = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.BinOp,
    ast.Constant,
)  # what a type can be written as
IGNORED: Final = re.compile(r"#\s*(type|pyright)\s*:\s*(ignore|basic|strict\s*=\s*false)")
# ``__eq__(self, other: object)`` is what Python asks for.
OF_PYTHON: Final = frozenset(
    ["__eq__", "__ne__", "__exit__", "__aexit__", "__getattr__", "__setattr__", "__contains__"]
)


def modules_in(house: House, *folders: str) -> list[str]:
    """The private modules below folders of ``_src``, or of the part of that name."""
    wanted = {f"_src/{folder}" for folder in folders}
    return [module for module in house.private if house.room_of(module) in wanted]


def annotations_of(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """The annotations of signatures: (the function or class, the annotation); None for a parameter without one."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from ((node.name, each.annotation) for each in _parameters(node))
            if node.returns is not None:
                yield node.name, node.returns
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, each.annotation) for each in node.body if isinstance(each, ast.AnnAssign))


def _parameters(function: Function) -> Iterator[ast.arg]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    yield from (each for each in every if each.arg not in ("self", "cls", "_"))


def names_of_any(house: House) -> dict[str, set[str]]:
    """The names by which each module knows ``Any``: imported, or aliases that contain it, also from other modules."""
    found: dict[str, set[str]] = {module: set() for module in house.files}
    imports = {
        module: [
            (house.absolute(module, node), alias.name, alias.asname or alias.name)
            for node in house.nodes[module]
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        for module in house.files
    }
    aliases = {module: list(_aliases(tree)) for module, tree in house.trees.items()}
    number = -1
    while number < (number := sum(map(len, found.values()))):  # an alias of an alias of an alias
        for module, names in found.items():
            names |= {
                local
                for source, name, local in imports[module]
                if (source in TYPING and name == "Any") or name in found.get(source, ())
            }
            names |= {name for name, value in aliases[module] if name not in names and _count(value, names)}
    return found


def _aliases(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Assignments at the top of a module that could be aliases of types."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, TYPES):
            yield target.id, value


def _parsed(node: ast.expr) -> ast.expr:
    """An annotation in quotes, parsed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return node
    return node


def _count(annotation: ast.expr, names: set[str]) -> int:
    """How often a type says ``Any``, by any of its names."""
    count = 0
    nodes = [_parsed(annotation)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name):
            count += node.id in names
        elif isinstance(node, ast.Attribute):
            count += node.attr == "Any" and getattr(node.value, "id", "") in (
                "typing",
                "t",
                "typing_extensions",
            )
        is_literal = isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"
        if not is_literal:
            nodes += [_parsed(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
    return count


def num_any(house: House, modules: list[str]) -> int:
    known = names_of_any(house)
    return sum(
        _count(annotation, known[module])
        for module in modules
        for _, annotation in annotations_of(house.trees[module])
        if annotation is not None
    )


def num_empty(house: House, modules: list[str]) -> int:
    """The types that say as little as ``Any``, parameters without one, and what checkers are told to ignore."""
    count = 0
    for module in modules:
        count += sum(bool(IGNORED.search(line)) for line in house.texts[module].splitlines())
        for function, annotation in annotations_of(house.trees[module]):
            if annotation is None:
                count += 1
            elif function not in OF_PYTHON:
                count += _num_bare(_parsed(annotation))
    return count


def _num_bare(node: ast.expr) -> int:
    """``object`` and generic types without arguments in a type."""
    if isinstance(node, ast.Name):
        return node.id in BARE or node.id == "object"
    if isinstance(node, ast.Subscript):
        inner = [] if getattr(node.value, "id", "") == "Literal" else [node.slice]
        return sum(_num_bare(_parsed(each)) for each in inner)
    return sum(_num_bare(_parsed(each)) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
