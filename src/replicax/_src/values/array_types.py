"""The types of arrays, and of arguments that become arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

HostOrDevice = np.ndarray | jax.Array
"""An array on the host or on devices."""


@runtime_checkable
class SupportsArray(Protocol):
    """Arrays, tensors, tables and variables of any library, which NumPy converts to arrays."""

    def __array__(self) -> Any: ...


class SupportsJaxArray(Protocol):
    """Variables of any library, such as flax nnx, which JAX converts to arrays."""

    def __jax_array__(self) -> Any: ...


ConvertibleToArray: TypeAlias = (
    "npt.ArrayLike | SupportsArray | SupportsJaxArray | Sequence[ConvertibleToArray]"
)
"""A number, an array, a tensor or a variable of any library, or a list of such.

Parameters of public functions that may get results of Keras's operations are ``Any`` instead: a type checker infers
that these also return None (Keras 3.15).
"""


def shape_of(value: ConvertibleToArray) -> tuple[int, ...]:
    """Returns the shape of the array that a value becomes. It may be traced."""
    shape = getattr(value, "shape", None)
    return np.asarray(value).shape if shape is None else tuple(shape)
