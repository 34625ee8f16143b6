"""``RemoteArray``: what a variable stores in place of an array if its values live elsewhere."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


class RemoteArray:
    """An array whose values live elsewhere. A variable stores it instead of its value.

    It is no ``abc.ABC``, because each read of a Keras variable calls ``isinstance``, which would take longer.

    Attributes:
      holder: The place where the values live. Its ``read(arrays)`` returns the values of several arrays, of one moment.
      name: The name that messages show.
      shape, dtype: The shape and dtype of the full value.
    """

    holder: Any
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    @abc.abstractmethod
    def is_table(self) -> bool:
        """True if only the rows that are looked up should travel."""

    @abc.abstractmethod
    def make(self) -> None:
        """Makes the first value, if it has not been made. Communicates, and blocks."""

    @abc.abstractmethod
    def read(self) -> jax.Array:
        """Returns the current value as a JAX array. Communicates, and blocks."""

    @abc.abstractmethod
    def read_rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the current rows for valid ids, [*ids.shape, ...]. Communicates, and blocks."""

    @abc.abstractmethod
    def assign(self, value: np.ndarray | jax.Array) -> None:
        """Replaces the value. Communicates, and blocks."""

    @property
    @abc.abstractmethod
    def places(self) -> Sequence[tuple[str, tuple[int, int] | None, int]]:
        """The place, rows and bytes of each shard; empty before the value is made.

        Each is the name of its place, the (start, stop) of its rows or None for all, and its size in bytes.
        """

    def __jax_array__(self) -> jax.Array:
        return self.read()
