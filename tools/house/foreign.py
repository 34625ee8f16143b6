"""How much the code leans on the inside of JAX, Keras and Python, and how much of it a program enters."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from house.source import House

PRIVATE_OF_JAX = "replicax._src.jax_internals.jax_compat_names"


def num_users(house: House, *names: str) -> int:
    """The number of files that use one of these names of another module."""
    return sum(
        any(getattr(node, "attr", getattr(node, "id", None)) in names for node in house.nodes[module])
        for module in house.private
    )


def calls_of(house: House, name: str) -> Iterator[ast.Call]:
    """Calls of a function or a method ``name``."""
    for module in house.private:
        for node in house.nodes[module]:
            if isinstance(node, ast.Call) and name in (
                getattr(node.func, "id", None),
                getattr(node.func, "attr", None),
            ):
                yield node


def num_code_copies(house: House, *, other_globals: bool) -> int:
    """Functions that are made of another function's code: ``FunctionType(...)``, with that function's globals or not."""
    made = (list(map(ast.unparse, call.args[:2])) for call in calls_of(house, "FunctionType"))
    return sum(
        (code.removesuffix("__code__") != names.removesuffix("__globals__")) == other_globals
        for code, names in made
    )


def num_lowering_overrides(house: House) -> int:
    """Lowering rules registered for a primitive of JAX. For ours the call's first argument is ``primitive``."""
    return sum(ast.unparse(call.args[0]) != "primitive" for call in calls_of(house, "register_lowering"))


def num_private_names_of_jax(house: House, *, with_reason: bool = False) -> int:
    """How many names of ``jax._src``, in the list of what jax_compat.py uses, have nothing beside them.

    Beside a name stands its issue of JAX, or what one would have to ask for. ``with_reason`` counts the latter.
    """
    text = house.texts.get(PRIVATE_OF_JAX, "")
    if with_reason:
        return text.count("# no upstream issue: ")
    count, module = 0, ""
    for line in text.splitlines():
        module = found[1] if (found := re.match(r'    "([\w.]+)": \(', line)) else module
        if module.startswith("jax._src") and not re.search(
            r"#.*(jax#\d+|https://|no upstream issue: \w+)", line
        ):
            count += sum(name != module for name in re.findall(r'"([\w.]+)"', line))
    return count


def num_own_words(glossary: Path) -> int:
    """The number of entries of the glossary under its heading for our own words; without that heading, all
    entries."""
    own = re.split(r"^## .*\bour own\b.*$", glossary.read_text(), flags=re.MULTILINE | re.IGNORECASE)[-1]
    return len(re.findall(r"^- \*\*", own.split("\n## ")[0], flags=re.MULTILINE))


def attributes_of(package: ModuleType) -> dict[str, object]:
    """All attributes of all classes and modules of ``package``, by dotted name."""
    found: dict[str, object] = {}
    prefix = package.__name__ + "."
    for name, module in list(sys.modules.items()):
        if not name.startswith(prefix) or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if getattr(value, "__module__", None) == name and isinstance(value, type):
                found |= {f"{name}.{attribute}.{key}": member for key, member in list(vars(value).items())}
                found[f"{name}.{attribute}.__bases__"] = value.__bases__
            elif callable(value):
                found[f"{name}.{attribute}"] = value
    return {
        name: value
        for name, value in found.items()
        if not name.endswith(("__abstractmethods__", "_abc_impl"))
    }


def patched_attributes(before: dict[str, object], after: dict[str, object]) -> set[str]:
    """Attributes that have changed; ``result`` of all metrics counts as one, and so does a class among the
    bases of another."""
    changed = {name for name, value in after.items() if name in before and before[name] is not value}
    return {"metrics.result" if name.endswith(".result") else name for name in changed}


def filled_hooks(package: str = "replicax") -> Iterator[str]:
    """Empty lists in the source of loaded modules that contain callables once everything is imported."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(f"{package}._") or getattr(module, "__file__", None) is None:
            continue
        for node in ast.parse(Path(str(module.__file__)).read_text()).body:
            value = getattr(node, "value", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, (ast.List, ast.Dict)):
                target = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
                held = getattr(module, target, [])
                members = held.values() if isinstance(held, dict) else held
                is_empty = not (value.elts if isinstance(value, ast.List) else value.keys)
                if is_empty and any(callable(member) for member in members):
                    yield f"{name.removeprefix(package)}.{target}"
