"""Ambient state: values that a caller sets and a far callee reads, and that no signature shows.

A *switch* is a ``ContextVar``, a thread-local object, or a global that a function assigns or fills. An *accessor* is a
function that only reads switches, or other accessors; it hides the switch, not the reading.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from typing import Final

from house.source import Function, House, defined_names

# The switches that change what other files do, by any use outside their file.
SWITCHES: Final = ("planning", "standing_in")
CHANGES: Final = frozenset(
    [
        "append",
        "add",
        "update",
        "pop",
        "clear",
        "extend",
        "insert",
        "remove",
        "discard",
        "setdefault",
        "popitem",
    ]
)
MOST_STATEMENTS: Final = 6
MAKERS: Final = frozenset(("ContextVar", "local"))


def uses_of_switches(house: House, names: tuple[str, ...] = SWITCHES) -> list[tuple[str, int, str]]:
    """Uses of the named switches outside of the files that define them: (module, line, name)."""
    homes = {
        name: module
        for module in house.private
        for name in defined_names(house.trees[module])
        if name in names
    }
    return _uses(house, {(module, name) for name, module in homes.items()})


def ambient_values(house: House) -> set[str]:
    """The switches, and the functions that only read them, that are used outside of their files."""
    state = set()
    for module in house.private:
        held = set(ambient_names(house, module))
        state |= {(module, name) for name in held | accessors(house.trees[module], held)}
    return {name for _, _, name in _uses(house, state)}


def ambient_names(house: House, module: str) -> Iterator[str]:
    """The switches of a module, whatever their names."""
    tree = house.trees[module]
    local_classes = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(_makes(base, set()) for base in node.bases)
    }
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, ast.Call) and _makes(value.func, local_classes):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target  # type: ignore[union-attr]
            if isinstance(target, ast.Name):
                yield target.id
    for node in house.nodes[module]:
        if isinstance(node, ast.Global):
            yield from node.names
    containers = {
        name for name, value in _assigned(tree) if isinstance(value, (ast.Dict, ast.List, ast.Set, ast.Call))
    }
    for function in tree.body:
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from containers & set(_filled(function))


def _makes(node: ast.expr, local_classes: set[str]) -> bool:
    if isinstance(node, ast.Subscript):  # ContextVar[bool](...)
        node = node.value
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in MAKERS or name in local_classes


def _filled(function: Function) -> Iterator[str]:
    """The names of containers that a function changes."""
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield getattr(node.value, "id", "")
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES
        ):
            yield getattr(node.func.value, "id", "")


def accessors(tree: ast.Module, held: set[str]) -> set[str]:
    """Functions at the top of a module that only read switches, in short bodies, and functions that only read those."""
    found: set[str] = set()
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    while True:
        more = {each.name for each in functions if _only_reads(each, held | found)} - found
        if not more:
            return found
        found |= more


def _only_reads(function: Function, held: set[str]) -> bool:
    if len(function.body) > MOST_STATEMENTS or not any(
        isinstance(each, ast.Return) for each in ast.walk(function)
    ):
        return False
    if any(isinstance(each, (ast.Yield, ast.Raise, ast.Global, ast.Delete)) for each in ast.walk(function)):
        return False
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own |= {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    read = (
        {node.id for node in names if isinstance(node.ctx, ast.Load)}
        - own
        - set(dir(builtins))
        - {"threading"}
    )
    return bool(read & held) and read <= held


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


def _uses(house: House, state: set[tuple[str, str]]) -> list[tuple[str, int, str]]:
    """Where other modules use names: as an imported name, or as an attribute of the module."""
    found = []
    for module in sorted(house.private):
        names: dict[str, str] = {}  # local -> name
        modules: dict[str, str] = {}
        for node in house.nodes[module]:
            if isinstance(node, ast.ImportFrom):
                source = house.absolute(module, node)
                for alias in node.names:
                    if f"{source}.{alias.name}" in house.files:
                        modules[alias.asname or alias.name] = f"{source}.{alias.name}"
                    elif source in house.files:
                        home, name = house.origin(source, alias.name)
                        if (home, name) in state and home != module:
                            names[alias.asname or alias.name] = name
        for node in house.nodes[module]:
            if isinstance(node, ast.Name) and node.id in names:
                found.append((module, node.lineno, names[node.id]))
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in modules
            ):
                origin = house.origin(modules[node.value.id], node.attr)
                if origin in state and origin[0] != module:
                    found.append((module, node.lineno, origin[1]))
    return found
