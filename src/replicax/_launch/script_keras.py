"""Finds the import of Keras in a script from its syntax tree, without running it."""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replicax._src.keras.backend import VARIABLE

# Modules that are known not to set KERAS_BACKEND.
_KNOWN: Final = frozenset(
    {*sys.stdlib_module_names, "replicax", "jax", "jaxlib", "numpy", "tensorflow", "keras"}
)


@dataclass(frozen=True)
class UseOfKeras:
    """The import of Keras in a script.

    Attributes:
      line: The line of the import.
      is_certain: True if no earlier import can have set KERAS_BACKEND.
    """

    line: int
    is_certain: bool


def script_path(command: Sequence[str]) -> Path | None:
    """Returns the file that ``python`` runs with these arguments; None if it is not found or is not a Python file."""
    if command[0] != "-m":
        return Path(command[0]) if Path(command[0]).is_file() else None
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec = None
    parts = command[1].split(".")
    for number in range(len(parts)):  # find_spec of importlib.util would import the packages
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: number + 1]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    has_file = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    path = Path(spec.origin) if spec is not None and spec.origin is not None and has_file else None
    return path.with_name("__main__.py") if path is not None and path.name == "__init__.py" else path


def use_of_keras(path: Path) -> UseOfKeras | None:
    """Returns the top-level import of Keras in a script that uses replicax; None if the script mentions
    KERAS_BACKEND.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):  # Python will report it
        return None
    imports = list(_imports(tree))
    if VARIABLE in text or "replicax" not in {module for module, _ in imports}:
        return None
    for number, (module, line) in enumerate(imports):
        if module == "keras":
            return UseOfKeras(line, is_certain={before for before, _ in imports[:number]} <= _KNOWN)
    return None


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the packages that a module imports at its top level, with their lines, in order."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield ("" if node.level else (node.module or "").partition(".")[0]), node.lineno
