"""Which variables optimizers keep for which others: momenta, averages. How they lie over the devices follows these."""

from __future__ import annotations

import weakref
from typing import Any

# By id: entries go with the variables. (Variables compare by value, and cannot be keys.)
_whose: dict[int, weakref.ref[Any]] = {}
_optimizer_slots: dict[int, list[weakref.ref[Any]]] = {}


def note_optimizer_slot(optimizer_slot: Any, variable: Any) -> None:
    """Remembers that one variable is kept for another."""
    _whose[id(optimizer_slot)] = weakref.ref(variable)
    weakref.finalize(optimizer_slot, _whose.pop, id(optimizer_slot), None)
    if id(variable) not in _optimizer_slots:
        weakref.finalize(variable, _optimizer_slots.pop, id(variable), None)
    _optimizer_slots.setdefault(id(variable), []).append(weakref.ref(optimizer_slot))


def kept_for(optimizer_slot: Any) -> Any | None:
    """Returns the variable that one is kept for; None if it is kept for none."""
    reference = _whose.get(id(optimizer_slot))
    return None if reference is None else reference()


def model_variable_of(optimizer_slot: Any) -> Any | None:
    """Returns the variable that one is kept for, if it has its shape; else None."""
    variable = kept_for(optimizer_slot)
    is_alike = variable is not None and tuple(variable.shape) == tuple(optimizer_slot.shape)
    return variable if is_alike else None


def optimizer_slots_of(variable: Any) -> list[Any]:
    """Returns the variables of its shape that are kept for one."""
    alive = [reference() for reference in _optimizer_slots.get(id(variable), ())]
    return [each for each in alive if each is not None and model_variable_of(each) is variable]
