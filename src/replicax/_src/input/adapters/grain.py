"""grain datasets."""

from __future__ import annotations

import sys
from typing import Any, final

import jax
import numpy as np

from replicax._src.input.elements import (
    Elements,
    LengthCheck,
    Pass,
    Traits,
    as_arrays,
    check_same_dataset,
    first_element,
)
from replicax._src.input.order import INFINITE, Cardinality
from replicax._src.input.specs import ArraySpec


def open_grain(dataset: Any) -> Elements | None:
    """Opens a ``grain.MapDataset`` or ``grain.IterDataset``; None if it is neither.

    A MapDataset is read in order, in the calling thread. Grain's own default, 16 threads, costs ten times as
    much where elements are cheap to make; to read with threads pass
    ``dataset.to_iter_dataset(grain.ReadOptions(...))``.
    """
    grain = sys.modules.get("grain")
    if grain is None:
        return None
    if isinstance(dataset, grain.MapDataset):
        num_elements = len(dataset)
        cardinality = INFINITE if num_elements == sys.maxsize else num_elements  # repeat() for ever
        return GrainElements(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)), cardinality, dataset)
    if isinstance(dataset, grain.IterDataset):
        return GrainElements(dataset, None, dataset)
    return None


@final
class GrainElements(Elements):
    """The elements of a grain dataset."""

    def __init__(self, ordered: Any, cardinality: Cardinality | None, dataset: Any):
        self._ordered, self._cardinality, self._dataset = ordered, cardinality, dataset

    @property
    def traits(self) -> Traits:
        kind = "MapDataset" if self._cardinality is not None else "IterDataset"
        return Traits(f"a grain.{kind}")

    @property
    def cardinality(self) -> Cardinality | None:
        return self._cardinality

    def iterate(self) -> Pass:
        return _GrainPass(iter(self._ordered), self._cardinality)

    def declared_spec(self) -> Any:
        grain = sys.modules["grain"]
        try:
            specs = grain.experimental.get_element_spec(self._dataset)
        except (ValueError, NotImplementedError):  # a map function does not say
            return None
        return jax.tree.map(lambda spec: ArraySpec(tuple(spec.shape), np.dtype(spec.dtype)), specs)

    def first(self) -> Any:
        return first_element(map(as_arrays, self._ordered))


@final
class _GrainPass(Pass):
    """A pass through a grain dataset; its state is grain's, and the number of the next element."""

    def __init__(self, iterator: Any, cardinality: Cardinality | None):
        self._iterator = iterator
        self._count = LengthCheck(cardinality)

    def __next__(self) -> Any:
        return as_arrays(self._count.next_of(self._iterator))

    def get_state(self) -> Any:
        return {"position": self._count.num_elements, "grain": self._iterator.get_state()}

    def set_state(self, state: Any) -> None:
        check_same_dataset(state, {})
        self._iterator.set_state(state["grain"])
        self._count.num_elements = int(state["position"])
