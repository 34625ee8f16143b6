"""What one step of a loop takes from a dataset: a global batch, or one element for each replica.

Nothing is placed on devices here, and no dataset is opened that ``elements.py`` does not know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from replicax._src.errors import InvalidArgumentError
from replicax._src.input.arrays import ArrayDataset, common_num_rows
from replicax._src.input.elements import END, Elements, EmptyDatasetError, element_spec, open_elements
from replicax._src.input.order import INFINITE, Cardinality
from replicax._src.input.specs import PerReplicaSpec, is_static, spec_of


class UnbatchedDatasetError(InvalidArgumentError):
    """A dataset of single rows was given where global batches are needed."""

    def __init__(self, num_replicas: int):
        # TensorFlow's text. It promises a ValueError, and raises an IndexError.
        super().__init__(
            "Call the `batch` method on the input Dataset in order to be able to split your input across "
            f"{num_replicas} replicas. Each element must consist of arrays [global_batch, ...], not of "
            "numbers (and a Python list is a nest of numbers: use np.asarray)."
        )


def open_source(dataset: Any, *, num_replicas: int = 1) -> GlobalBatches:
    """Opens a dataset of global batches.

    Args:
      dataset: What ``open_elements`` accepts, each element a nest of arrays ``[global_batch, ...]``.
      num_replicas: R, which the batches will be cut over.

    Raises:
      UnbatchedDatasetError: It is an ArrayDataset without ``batch``.
      UnsupportedSourceError: It is no dataset.
    """
    if isinstance(dataset, ArrayDataset) and not dataset.is_batched:
        raise UnbatchedDatasetError(num_replicas)
    return GlobalBatches(open_elements(dataset), num_replicas)


class Source(Protocol):
    """The steps of a loop: what a strategy places on its replicas, one step at a time."""

    @property
    def num_replicas(self) -> int: ...

    @property
    def cardinality(self) -> Cardinality | None:
        """The number of steps, INFINITE, or None if it is not known beforehand."""
        ...

    def iterate(self) -> Iterator[Any]:
        """Starts from the first step."""
        ...

    def element_spec(self) -> Any:
        """A nest of PerReplicaSpecs."""
        ...


class GlobalBatches:
    """Steps that are nests of arrays ``[global_batch, ...]``, to be cut over R replicas."""

    def __init__(self, elements: Elements, num_replicas: int):
        self._elements = elements
        self.num_replicas = num_replicas

    @property
    def cardinality(self) -> Cardinality | None:
        return self._elements.cardinality

    def iterate(self) -> Iterator[Any]:
        """Yields the global batches.

        Raises:
          UnbatchedDatasetError: An element has a scalar in it.
          InconsistentRowsError: The arrays of an element have different numbers of rows.
          UnsupportedElementError: An element has no array in it, or something that is none.
        """
        return map(self._checked, self._elements.iterate())

    def element_spec(self) -> Any:
        specs = element_spec(self._elements)
        if any(not spec.shape for spec in jax.tree.leaves(specs)):
            raise UnbatchedDatasetError(self.num_replicas)
        return jax.tree.map(lambda spec: PerReplicaSpec.of_batch(spec, self.num_replicas), specs)

    def _checked(self, batch: Any) -> Any:
        if any(array.ndim == 0 for array in jax.tree.leaves(batch)):
            raise UnbatchedDatasetError(self.num_replicas)
        common_num_rows(batch)
        return batch


class PerReplicaPulls:
    """Steps that are lists of R nests, one per replica, each an element as the dataset yields it.

    At the end of the data replicas for which there is no element get one with 0 rows, so that no row is
    lost. Where elements have one fixed shape (``drop_remainder``, or single rows) a program may rely on
    it, and an incomplete last step is left out instead. Both are TensorFlow's rules.
    """

    def __init__(self, elements_of_replicas: Sequence[Elements]):
        """Takes the elements of each replica; those that replicas share are dealt out in turn."""
        self._elements_of_replicas = tuple(elements_of_replicas)

    @classmethod
    def from_one(cls, dataset: Any, num_replicas: int) -> PerReplicaPulls:
        """Deals the elements of one dataset out to the replicas, R to a step."""
        return cls([open_elements(dataset)] * num_replicas)

    @classmethod
    def from_each(cls, datasets: Iterable[Any]) -> PerReplicaPulls:
        """Gives each replica the elements of its own dataset, one to a step."""
        return cls([open_elements(dataset) for dataset in datasets])

    @property
    def num_replicas(self) -> int:
        return len(self._elements_of_replicas)

    @property
    def cardinality(self) -> Cardinality | None:
        counts = [elements.cardinality for elements in self._distinct()]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        if len(known) > 1:
            shortest, longest = min(known), max(known)
            return shortest if shortest == longest or self._is_fixed() else longest
        if known[0] in (0, INFINITE):
            return known[0]
        full, remainder = divmod(int(known[0]), self.num_replicas)
        return full + bool(remainder and not self._is_fixed())

    def iterate(self) -> Iterator[list[Any]]:
        """Yields for each step the list of R elements."""
        iterators = {id(elements): elements.iterate() for elements in self._distinct()}
        return self._steps([iterators[id(elements)] for elements in self._elements_of_replicas])

    def element_spec(self) -> Any:
        return jax.tree.map(
            lambda spec: PerReplicaSpec.of_replica(spec, self.num_replicas), self._replica_spec()
        )

    def _distinct(self) -> list[Elements]:
        return list({id(elements): elements for elements in self._elements_of_replicas}.values())

    def _is_fixed(self) -> bool:
        return is_static(self._replica_spec())

    def _replica_spec(self) -> Any:
        """The nest of ArraySpecs of the first dataset that is not empty."""
        *others, last = self._distinct()
        for elements in others:
            with contextlib.suppress(EmptyDatasetError):
                return element_spec(elements)
        return element_spec(last)

    def _steps(self, iterators: list[Iterator[Any]]) -> Iterator[list[Any]]:
        while True:
            parts = [next(iterator, END) for iterator in iterators]
            present = [part for part in parts if part is not END]
            if not present:
                return
            if len(present) < len(parts):
                declared = self._elements_of_replicas[0].declared_spec()
                if is_static(spec_of(present[0]) if declared is None else declared):
                    return
                empty = jax.tree.map(_without_rows, present[0])
                parts = [empty if part is END else part for part in parts]
            yield parts


def _without_rows(array: Any) -> Any:
    return array[:0] if array.ndim else np.zeros((), array.dtype)
