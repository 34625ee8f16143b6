"""Modules of frameworks (flax nnx) as arguments of ``run``."""

from __future__ import annotations

from typing import Any

from replicax._src.framework import Close, Modules, frameworks_in_use


def open_modules(nest: Any) -> tuple[Any, Close | None]:
    """Replaces framework modules in the arguments by their arrays; gives what closes the results, if any."""
    for modules in _in_use():
        opened = modules.open(nest)
        if opened is not None:
            return opened
    return nest, None


def enter_modules(opened: Any, has_modules: bool) -> tuple[Any, Close]:
    """Inside the function: the arguments with modules again, and what adds their new state to the results."""
    if not has_modules:
        return opened, _unchanged
    (modules,) = _in_use()  # one framework has modules
    return modules.enter(opened)


def _in_use() -> list[Modules]:
    return [framework.modules for framework in frameworks_in_use() if framework.modules is not None]


def _unchanged(result: Any) -> Any:
    return result
