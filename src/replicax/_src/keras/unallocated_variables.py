"""Large Keras variables without values, for programs that need only their shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import keras

_LEAST_BYTES: Final = 1 << 20


def make(
    original: Any, variable: Any, initializer: Any, shape: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Runs ``keras.Variable.__init__``, given as ``original``. A variable of 1 MB and more gets no value."""
    if (callable(initializer) or isinstance(initializer, str)) and _is_large(shape):
        with keras.StatelessScope(initialize_variables=False):
            original(variable, initializer, shape, *args, **kwargs)
    else:
        original(variable, initializer, shape, *args, **kwargs)


def initialize(original: Any, variable: Any) -> None:
    """Runs ``_deferred_initialize``, given as ``original``, unless the variable stays without a value."""
    if not _is_large(variable.shape):
        original(variable)


def _is_large(shape: Iterable[int] | None) -> bool:
    return shape is not None and 4 * math.prod(shape) >= _LEAST_BYTES
