"""The core and its parts: who imports whom, and how much a part takes.

A public module counts as core. The registry is the only file that may name parts, and holds nothing but a table of
literals, so that no code hides there.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from house.source import House

_ROWS: Final = tomllib.loads(Path(__file__).parents[1].joinpath("parts.toml").read_text())
# A part -> its folder.
PARTS: Final[dict[str, str]] = {row["name"]: row["folder"] for row in _ROWS.values()}
CORE: Final = "core"
PUBLIC: Final = "public"
# What a command may load when it runs: the part -> the parts.
LOADED_BY_COMMANDS: Final = {
    row["name"]: frozenset(part for part, folder in PARTS.items() if folder in row["imports"])
    for row in _ROWS.values()
}


def part_of(house: House, module: str) -> str:
    place = house.place_of(module).removeprefix(f"{house.package}/")
    for part, folder in PARTS.items():
        if f"{place}/".startswith(f"{folder}/"):
            return part
    return PUBLIC if module in house.public else CORE


def is_part(name: str) -> bool:
    return name not in (CORE, PUBLIC)


def imports_of_part(house: House, part: str) -> set[tuple[str, str, str]]:
    """The imports by the core of a part: pairs of files, each kind once. Of public modules those when loaded."""
    found = set()
    for module, edges in house.edges.items():
        importer = part_of(house, module)
        if not is_part(importer):
            kinds = {(edge.target, edge.kind) for edge in edges if importer == CORE or edge.kind == "run"}
            found |= {(module, target, kind) for target, kind in kinds if part_of(house, target) == part}
    return found


def mentions_by_public_modules(house: House) -> set[tuple[str, str]]:
    """Public modules that name a part in a function or a string, which is the registry's task."""
    return {
        (module, edge.target)
        for module in house.public
        if part_of(house, module) == PUBLIC
        for edge in house.edges[module]
        if edge.kind in ("lazy", "string") and is_part(part_of(house, edge.target))
    }


def imports_between_parts(house: House) -> set[tuple[str, str]]:
    """Imports of a part by another, but for those of commands that run."""
    found = set()
    for module, edges in house.edges.items():
        part = part_of(house, module)
        for edge in edges:
            other = part_of(house, edge.target)
            is_allowed = edge.kind == "lazy" and other in LOADED_BY_COMMANDS.get(part, ())
            if is_part(part) and is_part(other) and part != other and not is_allowed:
                found.add((module, edge.target))
    return found


def taken_names(house: House, part: str) -> set[tuple[str, str]]:
    """The names of the core that a part takes: (the module that defines it, the name), however it gets there.

    A module that is taken whole counts as a name where no name of it is; with ``*`` all that it defines counts.
    """
    found: set[tuple[str, str]] = set()
    for module in house.files:
        if part_of(house, module) != part or module in house.public:
            continue
        for edge in house.edges[module]:
            if is_part(part_of(house, edge.target)):
                continue
            if edge.name == "*":
                found |= {(edge.target, name) for name in _all_names(house, edge.target)}
            elif edge.name:
                found.add((edge.target, edge.name))
    return found


def _all_names(house: House, module: str) -> Iterator[str]:
    for node in house.trees[module].body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def imported_modules(house: House, part: str) -> set[str]:
    """The modules of the core that a part's files import themselves."""
    found = set()
    for module in house.files:
        if part_of(house, module) == part and module not in house.public:
            for node in house.nodes[module]:
                if isinstance(node, ast.ImportFrom):
                    source = house.absolute(module, node)
                    each = [f"{source}.{alias.name}" for alias in node.names]
                    found |= {name if name in house.files else source for name in each}
                elif isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
    return {module for module in found if module in house.files and not is_part(part_of(house, module))}


def modules_behind(house: House, part: str) -> set[str]:
    """The modules of the core that define what a part takes, also by way of modules that pass names on."""
    return {
        edge.target
        for module in house.files
        if part_of(house, module) == part and module not in house.public
        for edge in house.edges[module]
        if not is_part(part_of(house, edge.target))
    }


def members_of_taken_names(house: House, part: str) -> set[tuple[str, str]]:
    """Attributes that a part reads of the names that it takes: ``kit.Names.value`` counts, like a name of its own."""
    found = set()
    for module in house.files:
        if part_of(house, module) != part or module in house.public:
            continue
        local: dict[str, str] = {}
        for node in house.nodes[module]:
            if isinstance(node, ast.ImportFrom):
                source = house.absolute(module, node)
                for alias in node.names:
                    if source in house.files and not is_part(part_of(house, source)):
                        full = f"{source}.{alias.name}"
                        if full not in house.files:
                            local[alias.asname or alias.name] = full
        for node in house.nodes[module]:
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in local
            ):
                found.add((local[node.value.id], node.attr))
    return found


def without_files(house: House) -> set[str]:
    """The parts that are in none of their places, so that nobody would count what the core imports of them."""
    return set(PARTS) - {part_of(house, module) for module in house.files}


def registry_lines(house: House) -> int:
    return house.code_lines(house.registry) if house.registry in house.files else 0


def registry_code(house: House) -> list[str]:
    """Statements of the registry that are no docstring and no table of literals."""
    if house.registry not in house.files:
        return []
    found = []
    for node in house.trees[house.registry].body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_import = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "__future__",
            "typing",
            "collections",
        )
        is_table = isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_literal(node.value)
        if not (is_docstring or is_import or is_table):
            found.append(ast.unparse(node).splitlines()[0])
    return found


def _is_literal(node: ast.expr | None) -> bool:
    try:
        ast.literal_eval(node or ast.Constant(None))
    except ValueError:
        return False
    return True


def core_in_registry(house: House) -> set[str]:
    """Modules of the core that the registry names: an import of the core that nobody counts."""
    if house.registry not in house.files:
        return set()
    found = set()
    for node in house.nodes[house.registry]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            place = node.value.partition(":")[0]
            for full in (place, f"{house.package}.{place}", f"{house.package}._src.{place}"):
                if full in house.private and part_of(house, full) == CORE and "." in place:
                    found.add(full)
    return found
