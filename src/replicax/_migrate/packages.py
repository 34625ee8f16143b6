"""The packages that a migrated program needs besides replicax, from its imports and from replicax's names in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Final

# Module -> its package. Other modules are the program's own affair.
_PACKAGES: Final = MappingProxyType(
    {
        "tensorflow": "tensorflow-cpu",  # it only reads data
        "tensorflow_datasets": "tensorflow-datasets",
        "tensorflow_hub": "tensorflow-hub",
        "keras": "keras",
        "optax": "optax",
        "flax": "flax",
    }
)
# Names of replicax, below `rx` -> the extra and its packages that they need.
_FEATURES: Final = (
    (re.compile(r"(keras|tuner)\b"), "keras", ("keras",)),
    (re.compile(r"(Checkpoint|checkpoint\b|experimental\.Preemption)|keras\.(Side|.*Checkpoint)"), "checkpoint", ("tensorstore",)),
    (re.compile(r"summary\b|keras\.callbacks\.TensorBoard"), "summaries", ("tensorboardX",)),
    (re.compile(r"summary\.image\b"), "summaries", ("tensorboardX", "pillow")),
    (re.compile(r"(experimental\.)?ParameterServer|Server\b|coordinator\b"), "ps", ("xxhash", "cloudpickle", "flatbuffers")),
)  # fmt: skip


def packages_of(codes: Iterable[str]) -> list[str]:
    """Returns the requirements of these modules, such as ``keras`` and ``tensorflow-cpu``.

    A module that does not parse needs nothing.
    """
    found: set[str] = set()
    for code in codes:
        try:
            tree = ast.parse(code)
        except SyntaxError:
            continue
        for name in _names(tree):
            module, _, rest = name.partition(".")
            if module in _PACKAGES:
                found.add(_PACKAGES[module])
            for pattern, _, packages in _FEATURES if module == "replicax" else ():
                if pattern.match(rest):
                    found.update(packages)
    return sorted(found, key=str.lower)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yields the modules that a program imports, and the full names of what it takes from them."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in aliases:
                yield ".".join([aliases[first], *rest])
