"""What to write for names of TensorFlow, as messages say it, and the source of the expression that a frame executes."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any


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
    from replicax._src.migrate.table import find, target_of  # reads a file of many names

    found = find(name)
    if found is None:
        return None
    row, target = found.rows[0], target_of(name, keras=uses_keras)
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


def frames_of(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    """Yields the entries of a traceback, from the outermost on."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def expression(frame: types.FrameType, instruction: int, line: int) -> str:
    """Returns the source of the expression that a frame executes, or of its line if Python does not know."""
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    first, last, start, stop = positions(code, instruction)
    if first is None or last is None or start is None or stop is None or last > len(lines):
        return linecache.getline(code.co_filename, line, frame.f_globals).strip()
    rows = [row.encode() for row in lines[first - 1 : last]]
    rows[-1] = rows[-1][:stop]
    rows[0] = rows[0][start:]
    return b"".join(rows).decode()


def positions(code: types.CodeType, instruction: int) -> tuple[int | None, ...]:
    """Returns the first and last line of an instruction, and the columns where it starts and ends, in bytes."""
    return next((p for i, p in enumerate(code.co_positions()) if 2 * i == instruction), (None,) * 4)
