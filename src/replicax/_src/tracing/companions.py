"""Which variables optimizers keep for which others: momenta, averages. How they lie over the devices follows these."""

from __future__ import annotations

import weakref
from typing import Any

# By id: entries go with the variables. (Variables compare by value, and cannot be keys.)
_whose: dict[int, weakref.ref[Any]] = {}
_companions: dict[int, list[weakref.ref[Any]]] = {}


def note_companion(companion: Any, variable: Any) -> None:
    """Remembers that one variable is kept for another."""
    _whose[id(companion)] = weakref.ref(variable)
    weakref.finalize(companion, _whose.pop, id(companion), None)
    if id(variable) not in _companions:
        weakref.finalize(variable, _companions.pop, id(variable), None)
    _companions.setdefault(id(variable), []).append(weakref.ref(companion))


def kept_for(companion: Any) -> Any | None:
    """The variable that one is kept for; None if it is kept for none."""
    reference = _whose.get(id(companion))
    return None if reference is None else reference()


def accompanied_by(companion: Any) -> Any | None:
    """The variable that one is kept for, if it has its shape; else None."""
    variable = kept_for(companion)
    is_alike = variable is not None and tuple(variable.shape) == tuple(companion.shape)
    return variable if is_alike else None


def companions_of(variable: Any) -> list[Any]:
    """The variables of its shape that are kept for one."""
    alive = [reference() for reference in _companions.get(id(variable), ())]
    return [each for each in alive if each is not None and accompanied_by(each) is variable]
