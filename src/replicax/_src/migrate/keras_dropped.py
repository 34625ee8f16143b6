"""Names and arguments of Keras 2 that Keras 3 does not have: marked, or removed if they have no effect.

Reads ``keras_dropped.toml``.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import libcst as cst

from replicax._src.migrate import table
from replicax._src.migrate.bindings import Source
from replicax._src.migrate.keras_changes import is_of_keras

TABLE: Final = Path(__file__).with_name("keras_dropped.toml")


@final
@dataclass(frozen=True)
class Dropped:
    """A name or argument that Keras 3 does not have.

    Attributes:
      node: The name, or the call.
      what: The text of the mark; "" if an argument is removed.
      write: The code to write instead.
      argument: The argument to remove.
    """

    node: cst.CSTNode
    what: str = ""
    write: str = ""
    argument: cst.Arg | None = None


@functools.cache
def dropped_by_keras() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def _names() -> list[str]:
    return [*dropped_by_keras()["names"], *dropped_by_keras()["private"]]


def find_dropped(source: Source) -> Iterator[Dropped]:
    """Yields the names, calls and arguments of a module that Keras 3 does not have."""
    for chain in source.chains:
        name = source.dotted(chain)
        path = _path(name) if name else None
        if path is None:
            continue
        gone = next((name for name in _names() if f"{path}.".startswith(f"{name}.")), None)
        if gone:
            yield Dropped(
                chain, f"Keras 3 has no keras.{gone}", "write what it does with other layers or functions"
            )
        call = source.parents[chain]
        if isinstance(call, cst.Call) and call.func is chain:
            yield from _of_call(call, path)
    for call in source.calls:
        yield from _of_method(source, call)


def _path(name: str) -> str | None:
    """Returns the name in Keras 3, without ``keras.`` in front."""
    found = table.find(name)
    row = found.rows[0] if found else None
    target = row.bare(keras=True) if row and row.kind == "change" and not row.is_call else None
    if found is None or target is None or not f"{target}.".startswith("keras."):
        return None
    return f"{target}.{found.rest}".strip(".").removeprefix("keras").removeprefix(".")


def _of_call(call: cst.Call, path: str) -> Iterator[Dropped]:
    known = dropped_by_keras()
    removed = known["removed"].get(path, ())
    if path.startswith("optimizers."):
        removed = known["removed"]["optimizers"]
    yield from _of_keywords(call, known["arguments"].get(path, ()), removed)
    num_positional = sum(argument.keyword is None for argument in call.args)
    if num_positional > known["positional"].get(path, num_positional):
        what = f"keras.{path} of Keras 3 has its arguments in another order"
        yield Dropped(call, what, "give them by keyword")


def _of_method(source: Source, call: cst.Call) -> Iterator[Dropped]:
    if (
        not isinstance(call.func, cst.Attribute)
        or source.full_name(call.func)
        or source.definition(call.func)
    ):
        return
    known, method = dropped_by_keras(), call.func.attr.value
    marked, removed = known["methods"].get(method, ()), known["removed"].get(f".{method}", ())
    if removed and not is_of_keras(source, call.func.value):
        marked, removed = (*marked, *removed), ()
        if method == "save":  # any object may have this method
            return
    yield from _of_keywords(call, marked, removed)


def _of_keywords(call: cst.Call, marked: tuple[str, ...], removed: tuple[str, ...]) -> Iterator[Dropped]:
    for argument in call.args:
        keyword = argument.keyword.value if argument.keyword else ""
        if keyword in removed:
            yield Dropped(call, argument=argument)
        elif keyword in marked:
            yield Dropped(
                call, f"Keras 3 has no argument {keyword} here", "leave it out, or write what it did"
            )
