"""Work that other modules run in the background, and that must end before a checkpoint of preemption is saved."""

from __future__ import annotations

from collections.abc import Callable

Join = Callable[[], None]

_joins: list[Join] = []


def join_before_saves(join: Join) -> None:
    """Registers a function that waits for the work of one module."""
    _joins.append(join)


def join_all() -> None:
    """Waits for all registered work. Raises the errors of that work."""
    for join in _joins:
        join()
