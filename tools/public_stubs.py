"""Writes the stubs (``.pyi``) of the public modules that load names at their first use, for type checkers and editors.

``python tools/public_stubs.py`` writes them, beside the modules; ``make pages`` runs it. A test compares them.
"""

from __future__ import annotations

import ast
import importlib
import pathlib

from replicax._src.parts import PUBLIC

SRC = pathlib.Path(__file__).parents[1] / "src"
HEAD = "# Written by tools/public_stubs.py from the module and src/replicax/_src/parts.py. Do not edit.\n"
# Modules whose imported names are not public.
_MACHINERY = (
    "replicax._src.user.public_names",
    "replicax._src.keras.import_errors",
    "replicax._src.keras.backend",
)


def modules() -> list[str]:
    """Returns the public modules that have stubs."""
    files = [
        path
        for path in SRC.glob("replicax/**/*.py")
        if not any(p.startswith("_") for p in path.relative_to(SRC).parts[:-1])
    ]
    lazy = [path.relative_to(SRC).with_suffix("") for path in files if "_PLACES" in path.read_text()]
    names = {".".join(path.parts).removesuffix(".__init__") for path in lazy}
    return sorted(names | {public for _, public, _ in PUBLIC})


def path_of(module: str) -> pathlib.Path:
    """Returns the path of a module's stub."""
    folder = SRC / module.replace(".", "/")
    return folder / "__init__.pyi" if folder.is_dir() else folder.with_suffix(".pyi")


def text_of(module: str) -> str:
    """Returns the stub of a module."""
    loaded = importlib.import_module(module)
    places: dict[str, str] = dict(vars(loaded).get("_PLACES", {}))
    places |= {name: place for place, public, names in PUBLIC if public == module for name in names.split()}
    imports, aliases = _statements(path_of(module).with_suffix(".py"))
    imports += [(module if place == f"{module}.{name}" else place, name) for name, place in places.items()]
    lines = [f"from {place} import {name} as {name}" for place, name in sorted(imports)]
    listed = "".join(f"    {name!r},\n" for name in loaded.__all__)
    return "\n".join((HEAD, *lines, "", *aliases, f"__all__ = [\n{listed}]", ""))


def _statements(path: pathlib.Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns what a module imports when it is loaded, and its other names for that."""
    nodes = ast.parse(path.read_text()).body
    aliases = [
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Assign) and not ast.unparse(node.targets[0]).startswith("_")
    ]
    imports = [
        (str(node.module), alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module not in _MACHINERY
        for alias in node.names
    ]
    return imports, aliases


def main() -> None:
    """Writes all stubs."""
    for module in modules():
        path_of(module).write_text(text_of(module))


if __name__ == "__main__":
    main()
