"""Elements of a dataset on the host, as arrays that another process or a program may get: narrow, contiguous, owned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax._src.devices import memory
from replicax._src.input.elements import END, EmptyDatasetError, as_arrays
from replicax._src.input.opening import open_elements
from replicax._src.input.sources import PerReplicaPulls
from replicax._src.values.narrowing import narrowed
from replicax._src.vocabulary.errors import InvalidArgumentError


@final
class HostElements:
    """The leaves of each element of a dataset, as arrays that no other code writes to.

    Args:
      dataset: Any dataset that ``opening.py`` opens.
      num_pulled: The number of elements that make one, as a list; None for the elements themselves.

    Attributes:
      tree: The structure of the elements; None before the first one.
    """

    def __init__(self, dataset: Any, num_pulled: int | None = None):
        if num_pulled is None:
            opened = open_elements(dataset)
            self._elements, self._is_immutable = opened.iterate(), opened.is_immutable
        else:  # which are copied there
            self._elements = PerReplicaPulls.from_one(dataset, num_pulled).iterate()
            self._is_immutable = True
        self.tree: Any = None

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return self

    def __next__(self) -> list[np.ndarray]:
        """Returns the leaves of the next element.

        Raises:
          InvalidArgumentError: It has another structure than the first one.
          EmptyDatasetError: There is no element.
        """
        element = next(self._elements, END)
        if element is END and self.tree is None:
            raise EmptyDatasetError(
                "The dataset has no elements, so the inputs of a scheduled function are unknown."
            )
        if element is END:
            raise StopIteration
        leaves, tree = jax.tree.flatten(element)
        if self.tree is None:
            self.tree = tree
        elif tree != self.tree:
            raise InvalidArgumentError(
                f"The first element of the dataset has the structure {self.tree}, and a later one "
                f"{tree}. All must have the same structure; only shapes may differ."
            )
        return _own_narrowed(leaves, tree, "batch", is_immutable=self._is_immutable)


def host_value(value: Any) -> tuple[list[np.ndarray], Any]:
    """Returns the leaves of a pytree of numbers and arrays, as arrays that only the caller has, and its structure."""
    leaves, tree = jax.tree.flatten(as_arrays(value))
    return _own_narrowed(leaves, tree, "value", is_immutable=False), tree


def _own_narrowed(leaves: Sequence[Any], tree: Any, root: str, *, is_immutable: bool) -> list[np.ndarray]:
    """Applies ``narrowed`` and ``_own``. An array that was narrowed is new, so it is not copied again."""
    pairs = zip(leaves, narrowed(leaves, tree, root), strict=True)
    return [_own(leaf, is_immutable or leaf is not before) for before, leaf in pairs]


def _own(leaf: Any, is_immutable: bool) -> np.ndarray:
    """Returns a leaf as it is sent or given to a program: C-contiguous, and not writable by other code."""
    array = np.asarray(leaf)
    if not array.flags.c_contiguous:
        return np.array(array, order="C")
    return array if is_immutable or isinstance(leaf, jax.Array) else memory.copy(array)
