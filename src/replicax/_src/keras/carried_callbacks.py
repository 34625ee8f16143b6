"""The attributes of callbacks without ``get_state``, for the replacement of a dead worker.

A restart begins these callbacks anew, in all workers alike. A replacement must go on as the others do: an
``EarlyStopping`` that begins anew would end its training in another epoch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import keras
import numpy as np

from replicax._src.checkpoint.carried_values import NotCarriedError, to_json

log = logging.getLogger("replicax")
_FUNCTIONS: Final = {"keras.ops": keras.ops, "numpy": np}
_NOT_CARRIED: Final = {*vars(keras.callbacks.Callback()), "_model", "params"}


@final
class CarriedCallbacks:
    """The callbacks of a ``fit`` that have no ``get_state``, by class and number.

    The attributes of Keras's own ones travel: numbers, strings, arrays, collections of these, and the function by which
    two values are compared. Those of the user's own do not, because they may be about the process.

    Args:
      callbacks: All callbacks.
    """

    def __init__(self, callbacks: Sequence[Any]):
        counts: Counter[str] = Counter()
        self._callbacks: dict[str, Any] = {}
        self._left_out: list[str] = []
        for one in callbacks:
            name = type(one).__name__
            if callable(getattr(one, "get_state", None)):
                continue
            if type(one).__module__.startswith("keras."):
                self._callbacks[f"{name}/{counts[name]}"] = one
            elif type(one).__module__.partition(".")[0] != "replicax" and _attributes(one):
                self._left_out.append(name)
            counts[name] += 1

    def take(self) -> dict[str, dict[str, Any]]:
        """Returns the attributes by callback."""
        return {name: _attributes(one) for name, one in self._callbacks.items()}

    def give(self, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the attributes that the chief has taken."""
        for name, values in attributes.items():
            if name in self._callbacks:
                for attribute, value in values.items():
                    setattr(self._callbacks[name], attribute, _function_of(value))

    def tell_of_left_out(self) -> None:
        """Logs one warning if a user's callback begins anew, in a replacement."""
        if self._left_out:
            log.warning(
                "This replacement goes on where the other workers are, but %s begin%s anew in it. Give a callback whose "
                "attributes change get_state() and set_state(state), so that its state travels.",
                ", ".join(dict.fromkeys(self._left_out)),
                "s" if len(set(self._left_out)) == 1 else "",
            )


def _attributes(callback: Any) -> dict[str, Any]:
    """Returns the attributes that can travel."""
    taken = {}
    for name, value in vars(callback).items():
        if name in _NOT_CARRIED:
            continue
        value = _named(value)
        try:
            to_json(value, [])
        except NotCarriedError:
            continue
        taken[name] = value
    return taken


def _named(value: Any) -> Any:
    """Returns the name of a function of Keras or NumPy, by which two values are compared; other values unchanged."""
    name = getattr(value, "__name__", "")
    for module, functions in _FUNCTIONS.items():
        if callable(value) and getattr(functions, name, None) is value:
            return {"function": [module, name]}
    return value


def _function_of(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"function"}:
        module, name = value["function"]
        return getattr(_FUNCTIONS[module], name)
    return value
