"""Tracks optimizer slots (momenta, averages): a slot has the same layout over the devices as its model variable."""

from __future__ import annotations

import weakref
from typing import Any

# Keyed by id: variables compare by value and cannot be keys. An entry is removed with its variable.
_whose: dict[int, weakref.ref[Any]] = {}
_optimizer_slots: dict[int, list[weakref.ref[Any]]] = {}


def note_optimizer_slot(optimizer_slot: Any, variable: Any) -> None:
    """Remembers that an optimizer keeps a slot for a variable."""
    _whose[id(optimizer_slot)] = weakref.ref(variable)
    weakref.finalize(optimizer_slot, _whose.pop, id(optimizer_slot), None)
    if id(variable) not in _optimizer_slots:
        weakref.finalize(variable, _optimizer_slots.pop, id(variable), None)
    _optimizer_slots.setdefault(id(variable), []).append(weakref.ref(optimizer_slot))


def kept_for(optimizer_slot: Any) -> Any | None:
    """Returns the variable that an optimizer slot is kept for; None if the argument is not a slot."""
    reference = _whose.get(id(optimizer_slot))
    return None if reference is None else reference()


def model_variable_of(optimizer_slot: Any) -> Any | None:
    """Returns the variable that an optimizer slot is kept for, if it has the slot's shape; else None."""
    variable = kept_for(optimizer_slot)
    is_alike = variable is not None and tuple(variable.shape) == tuple(optimizer_slot.shape)
    return variable if is_alike else None


def optimizer_slots_of(variable: Any) -> list[Any]:
    """Returns the optimizer slots of a variable that have its shape."""
    alive = [reference() for reference in _optimizer_slots.get(id(variable), ())]
    return [each for each in alive if each is not None and model_variable_of(each) is variable]
