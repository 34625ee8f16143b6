"""The sentences with which messages say what to write for a name of TensorFlow. The table of names decides, which the
part ``migrate`` has; without the part messages name no replacement.
"""

from __future__ import annotations

import sys
from typing import Any

from replicax._src.hooks import hook


def table() -> Any:
    """Returns the table of names, a module that reads a long file at its first use; None without the part."""
    try:
        return hook("names_of_tensorflow")
    except ImportError:  # this checkout lacks the part
        return None


def advice(names: list[str], uses_keras: bool) -> str:
    """Returns the advice on replacements of some names."""
    sentences = [text for name in dict.fromkeys(names) if (text := replacement(name, uses_keras))]
    if not sentences:
        sentences.append(
            "Write a function of keras.ops or jax.numpy; the page Migrating from TensorFlow has other names."
        )
    return " ".join([*sentences, "`replicax migrate` finds all such lines of a program."])


def replacement(name: str, uses_keras: bool) -> str | None:
    """Returns the sentence that says what to write for a name; None if the table does not say it."""
    names = table()
    found = names and names.find(name)
    if found is None:
        return None
    row, target = found.rows[0], names.target_of(name, keras=uses_keras)
    if target is not None:
        return " ".join([f"Write {target} in place of {name}.", *([row.remark] if row.remark else [])])
    if row.write:
        return f"For {name}: {row.write}."
    return f"Leave {name} out." if row.kind == "remove" else None


def ops_of_keras(scope: dict[str, Any]) -> Any:
    """Returns ``keras.ops`` for a module that has names of Keras, else None."""
    return getattr(sys.modules.get("keras"), "ops", None) if uses_keras(scope) else None


def uses_keras(scope: dict[str, Any]) -> bool:
    """True if a module has names of Keras."""
    homes = (getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in scope.values())
    return any(isinstance(home, str) and home.partition(".")[0] == "keras" for home in homes)
