"""Python values with arrays as JSON and a list of arrays, for the replacement of a dead process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.jax_internals import jax_compat

_PLAIN = (bool, int, str)
_COLLECTIONS = {"list": list, "tuple": tuple, "set": set}


class NotCarriedError(TypeError):
    """A value has no form as JSON and arrays: it is a function, a file or another object."""


def to_json(value: Any, arrays: list[np.ndarray]) -> Any:
    """Returns the value as JSON, and appends its arrays.

    Raises:
      NotCarriedError: It is or contains something else than numbers, strings, arrays and collections of these.
    """
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind in _COLLECTIONS.values():
        return {kind.__name__: [to_json(each, arrays) for each in value]}
    if kind is dict:
        return {"dict": [[to_json(key, arrays), to_json(each, arrays)] for key, each in value.items()]}
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if is_array and not jax_compat.is_typed_key(value.dtype):
        here = np.asarray(value)
        if here.dtype != object:
            arrays.append(here)
            form = "jax" if isinstance(value, jax.Array) else "scalar" if kind is not np.ndarray else "array"
            return {form: len(arrays) - 1}
    raise NotCarriedError(f"{value!r:.100} ({kind.__name__})")


def from_json(form: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Returns the value of which ``to_json`` has returned the form."""
    if not isinstance(form, dict):
        return form
    ((kind, held),) = form.items()
    match kind:
        case "float":
            return float.fromhex(held)
        case "dict":
            return {from_json(key, arrays): from_json(each, arrays) for key, each in held}
        case "jax":
            return jnp.array(arrays[held])
        case "array":
            return np.array(arrays[held])
        case "scalar":
            return arrays[held].reshape(-1)[0]
    return _COLLECTIONS[kind](from_json(each, arrays) for each in held)
