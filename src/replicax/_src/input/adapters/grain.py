"""grain datasets."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any, Final, final

import jax
import numpy as np

from replicax._src.input.elements import (
    Elements,
    LengthCheck,
    NotResumableError,
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
        return Traits(f"a {self._kind}")

    @property
    def cardinality(self) -> Cardinality | None:
        return self._cardinality

    def iterate(self) -> Pass:
        length = (
            None if self._cardinality is None or self._cardinality == INFINITE else int(self._cardinality)
        )
        fingerprint = {
            "kind": self._kind,
            "length": length,
            "transformations": _transformations(self._dataset),
        }
        return _GrainPass(iter(self._ordered), self._cardinality, fingerprint)

    def declared_spec(self) -> Any:
        grain = sys.modules["grain"]
        try:
            specs = grain.experimental.get_element_spec(self._dataset)
        except (ValueError, NotImplementedError):  # a map function does not say
            return None
        return jax.tree.map(lambda spec: ArraySpec(tuple(spec.shape), np.dtype(spec.dtype)), specs)

    def first(self) -> Any:
        return first_element(map(as_arrays, self._ordered))

    @property
    def _kind(self) -> str:
        return "grain.MapDataset" if self._cardinality is not None else "grain.IterDataset"


@final
class _GrainPass(Pass):
    """A pass through a grain dataset; its state is grain's, the number of the next element, and the fingerprint."""

    def __init__(self, iterator: Any, cardinality: Cardinality | None, fingerprint: dict[str, Any]):
        self._iterator, self._fingerprint = iterator, fingerprint
        self._count = LengthCheck(cardinality)

    def __next__(self) -> Any:
        return as_arrays(self._count.next_of(self._iterator))

    def get_state(self) -> Any:
        position = self._count.num_elements
        return {"position": position, "grain": self._iterator.get_state(), **self._fingerprint}

    def set_state(self, state: Any) -> None:
        check_same_dataset(state, self._fingerprint)
        position, before = state["position"], self._iterator.get_state()
        try:
            if position < 0 or type(state["grain"]) is not type(before):
                raise ValueError(f"position {position!r}, grain {state['grain']!r:.200}")
            self._iterator.set_state(state["grain"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self._iterator.set_state(before)
            raise NotResumableError(
                f"grain does not take the state ({type(error).__name__}: {error}). Give back what get_state returned "
                "for a dataset that is made in the same way."
            ) from error
        self._count.num_elements = position


# --- what a dataset is made of ------------------------------------------------------------------------

_WITH_NUMBERS: Final = ("Batch", "Interleave", "Limit", "Mixed", "Range", "Rebatch", "Repeat", "Slice")
"""Transformations whose text has their sizes in it. Those of others have addresses, line numbers or thread counts."""
_MAX_TEXT: Final = 1_000


def _transformations(dataset: Any) -> str:
    """Returns what a dataset is made of, as text: the last transformation first, and lengths where they are known.

    Functions are left out: a program that was edited goes on with the data of before.
    """
    text = " < ".join(_texts(dataset))
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"


def _texts(dataset: Any) -> Iterator[str]:
    text = name = type(dataset).__name__
    if name.startswith(_WITH_NUMBERS):
        text = str(dataset)
    elif "Shuffle" in name:
        text = f"{name}(seed={vars(dataset).get('_seed')})"
    is_map = isinstance(dataset, sys.modules["grain"].MapDataset)
    yield f"{text} of {len(dataset)}" if is_map else text
    for parent in dataset.parents:
        yield from _texts(parent)
