"""Modules of frameworks (flax nnx) as arguments of ``run``: where their bridges hook in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Close = Callable[[Any], Any]
# A bridge puts here how it opens modules among the arguments into arrays (and writes the results back), or None if
# there are none, and how it makes modules of the arrays inside the function (and adds their new state to its results).
# What it opens them into ends with the arguments without them, and with a dict of their arrays by path.
module_hooks: list[tuple[Callable[[Any], tuple[Any, Close] | None], Callable[[Any], tuple[Any, Close]]]] = []


def open_modules(nest: Any) -> tuple[Any, Close | None]:
    """Replaces framework modules in the arguments by their arrays; gives what closes the results, if any."""
    for opener, _ in module_hooks:
        opened = opener(nest)
        if opened is not None:
            return opened
    return nest, None


def enter_modules(opened: Any, has_modules: bool) -> tuple[Any, Close]:
    """Inside the function: the arguments with modules again, and what adds their new state to the results."""
    return module_hooks[0][1](opened) if has_modules else (opened, _unchanged)


def _unchanged(result: Any) -> Any:
    return result
