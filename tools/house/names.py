"""Names and places: files, classes, lists of the public names, locks of other objects."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from house.source import House

LOCK: Final = re.compile(r"(^|_)(lock|condition|mutex|guard)$")
LOCKS: Final = frozenset(["Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"])
LOCK_OPERATIONS: Final = frozenset(
    ["acquire", "release", "wait", "wait_for", "notify", "notify_all", "locked"]
)
# Files with lists that a program writes and a test compares; no others may be left out.
GENERATED: Final = frozenset(("__init__.pyi",))
# A file with this share of the public names has a list of them.
LIST_SHARE: Final = 0.25


def repeated_file_names(house: House) -> list[str]:
    names = Counter(house.files[module].name for module in house.private)
    return sorted(name for name, number in names.items() if number > 1 and name != "__init__.py")


def repeated_concepts(house: House) -> list[str]:
    """File names that mean the same: without digits, plurals and the words of their folder, and a folder's own."""
    owners: dict[str, set[str]] = defaultdict(set)
    folders = {house.files[module].parent for module in house.private}
    for module in house.private:
        path = house.files[module]
        if path.name == "__init__.py":
            continue
        folder = {_singular(word) for word in path.parent.name.split("_")}
        words = [_singular(word) for word in re.sub(r"\d+", "", path.stem).split("_") if word]
        own = [word for word in words if word not in folder]
        owners["_".join(own or words)].add(path.as_posix())
    for folder in folders:
        owners["_".join(_singular(word) for word in folder.name.split("_") if word)].add(folder.as_posix())
    return sorted(name for name, places in owners.items() if len(places) > 1)


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def repeated_class_names(house: House) -> list[str]:
    names = Counter(
        node.name
        for module in house.files
        for node in house.nodes[module]
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, number in names.items() if number > 1)


def loose_files(house: House) -> list[str]:
    """The files beside the folders of ``_src``, but for its ``__init__``."""
    return sorted(
        module
        for module in house.private
        if house.room_of(module) == "_src" and house.files[module].name != "__init__.py"
    )


def largest_room(house: House, modules: Iterable[str]) -> int:
    """The number of files in the folder that has most of them, so that one folder does not become the house."""
    return max(Counter(house.room_of(module) for module in modules).values(), default=0)


def lists_of_public_names(house: House) -> dict[str, float]:
    """How often a public name is written by hand, on average, in each file that has a list of them.

    Names of imports count, and strings at the top of a module; also several in one string.
    """
    public = public_names(house)
    found: dict[str, float] = {}
    paths = sorted((house.source / house.package).rglob("*.py*"))
    for path in paths:
        if path.suffix not in (".py", ".pyi") or path.name in GENERATED:
            continue
        mentions = Counter(name for name in _names_at_top(ast.parse(path.read_text())) if name in public)
        if len(mentions) > LIST_SHARE * len(public):
            found[path.relative_to(house.source).as_posix()] = sum(mentions.values()) / len(public)
    return found


def public_names(house: House) -> set[str]:
    """``__all__`` of the package; without it, the names that its stub imports."""
    trees = [house.trees[house.package]]
    stub = house.files[house.package].with_suffix(".pyi")
    if stub.exists():
        trees.append(ast.parse(stub.read_text()))
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                try:
                    return set(ast.literal_eval(node.value))
                except ValueError:
                    continue  # it is computed
    return {
        alias.asname or alias.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _names_at_top(tree: ast.Module) -> Iterator[str]:
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split() if len(node.value) < 10_000 else ()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            nodes += [
                each
                for each in ast.iter_child_nodes(node)
                if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))  # a docstring
            ]


def assignments_to_modules(house: House) -> list[tuple[str, int, str]]:
    """Where a file sets an attribute of another module, and so changes it without being imported: ``setattr`` too."""
    found = []
    for module in sorted(house.private):
        modules = {
            alias.asname or alias.name
            for node in house.nodes[module]
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{house.absolute(module, node)}.{alias.name}" in house.files
        }
        for node in house.nodes[module]:
            target = None
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                target = node.value
            elif (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") in ("setattr", "vars")
                and node.args
            ):
                target = node.args[0]
            if isinstance(target, ast.Name) and target.id in modules:
                found.append((module, getattr(node, "lineno", 0), ast.unparse(node)))
    return found


def uses_of_foreign_locks(house: House) -> list[tuple[str, int]]:
    """Where a lock of another object is used: entered, taken, waited for, kept under another name or passed on.

    Locks are attributes with a lock's name, and those to which any class of the same folder assigns a lock.
    """
    locks: dict[str, set[str]] = defaultdict(set)
    for module in house.private:
        for node in house.nodes[module]:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
                function = node.value.func
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if name in LOCKS:
                    locks[house.room_of(module)] |= {
                        each.attr for each in targets if isinstance(each, ast.Attribute)
                    }
    return [
        (module, node.lineno)
        for module in sorted(house.private)
        for outer in house.nodes[module]
        for node in _possible_locks(outer)
        if isinstance(node, ast.Attribute)
        and (LOCK.search(node.attr) or node.attr in locks[house.room_of(module)])
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def _possible_locks(node: ast.AST) -> list[ast.expr]:
    """The expressions in a node that are used as a lock, if they are one."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [item.context_expr for item in node.items]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return)):
        return [node.value] if node.value else []
    if isinstance(node, ast.Call):
        passed = [*node.args, *(each.value for each in node.keywords)]
        if isinstance(node.func, ast.Attribute) and node.func.attr in LOCK_OPERATIONS:
            passed.append(node.func.value)
        return passed
    return []
