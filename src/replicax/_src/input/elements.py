"""What a dataset may be (arrays, grain, anything iterable), read as nests of NumPy and JAX arrays."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from typing import Any, Final, Protocol, final, runtime_checkable

import jax
import numpy as np

from replicax._src.errors import InvalidArgumentError, ReplicaxError
from replicax._src.input.arrays import ArrayDataset, as_array
from replicax._src.input.order import INFINITE, Cardinality
from replicax._src.input.specs import ArraySpec, spec_of


class UnsupportedSourceError(ReplicaxError, TypeError):
    """Something was given as a dataset that is none."""


class OneShotSourceError(ReplicaxError, RuntimeError):
    """A generator or other iterator was to be iterated a second time."""


class DatasetLengthError(InvalidArgumentError):
    """A dataset yields another number of elements than its ``len()`` says."""


class EmptyDatasetError(InvalidArgumentError):
    """A dataset without elements was asked what its elements look like."""


class Elements(abc.ABC):
    """The elements of one dataset, as nests of NumPy and JAX arrays."""

    @property
    @abc.abstractmethod
    def cardinality(self) -> Cardinality | None:
        """The number of elements, INFINITE, or None if it is not known beforehand."""

    @abc.abstractmethod
    def iterate(self) -> Iterator[Any]:
        """Starts from the first element.

        Raises:
          OneShotSourceError: The dataset cannot start again.
        """

    @abc.abstractmethod
    def declared_spec(self) -> Any:
        """Returns the nest of ArraySpecs that the dataset itself declares, or None."""

    @abc.abstractmethod
    def first(self) -> Any:
        """Returns the first element; ``iterate`` yields it all the same.

        Raises:
          EmptyDatasetError: There is none.
        """


def element_spec(elements: Elements) -> Any:
    """Returns the nest of ArraySpecs that is declared, or else that of the first element."""
    declared = elements.declared_spec()
    return spec_of(elements.first()) if declared is None else declared


@final
class ArrayElements(Elements):
    """The elements of an ArrayDataset."""

    def __init__(self, dataset: ArrayDataset):
        self._dataset = dataset

    @property
    def cardinality(self) -> Cardinality | None:
        return self._dataset.cardinality

    def iterate(self) -> Iterator[Any]:
        return iter(self._dataset)

    def declared_spec(self) -> Any:
        return self._dataset.element_spec

    def first(self) -> Any:
        # Of a dataset derived from it, so that looking does not use up an order of its shuffle.
        return _first(iter(self._dataset.take(1)))


@final
class IterableElements(Elements):
    """The elements of an iterable that starts again each time."""

    def __init__(
        self,
        iterable: Iterable[Any],
        cardinality: Cardinality | None,
        declare_spec: Callable[[], Any] = lambda: None,
    ):
        self._iterable = iterable
        self._cardinality = cardinality
        self._declare_spec = declare_spec

    @property
    def cardinality(self) -> Cardinality | None:
        return self._cardinality

    def iterate(self) -> Iterator[Any]:
        elements = map(as_arrays, self._iterable)
        if self._cardinality is None or self._cardinality == INFINITE:
            return elements
        return _counted(elements, int(self._cardinality))

    def declared_spec(self) -> Any:
        return self._declare_spec()

    def first(self) -> Any:
        return _first(map(as_arrays, self._iterable))


@final
class IteratorElements(Elements):
    """The elements of an iterator, which can be gone through once."""

    def __init__(self, iterator: Iterator[Any]):
        self._rest = map(as_arrays, iterator)
        self._peeked: list[Any] = []
        self._is_spent = False

    @property
    def cardinality(self) -> Cardinality | None:
        return None

    def iterate(self) -> Iterator[Any]:
        if self._is_spent:
            raise OneShotSourceError(
                "This dataset is an iterator (a generator, or an object with __next__), and it has been "
                "iterated: it cannot start again. For several epochs pass an object whose __iter__ starts "
                "again: a list of batches, rx.data.from_arrays(...).batch(n), a grain dataset."
            )
        self._is_spent = True
        return self._elements()

    def declared_spec(self) -> Any:
        return None

    def first(self) -> Any:
        if not self._peeked:
            if self._is_spent:
                raise OneShotSourceError(
                    "This dataset is an iterator that has been iterated, so its first element is gone; ask "
                    "for element_spec before."
                )
            self._peeked.append(_first(self._rest))
        return self._peeked[0]

    def _elements(self) -> Iterator[Any]:
        yield from self._peeked
        yield from self._rest


@runtime_checkable
class _SupportsArray(Protocol):
    """Arrays, tensors and tables of any library. They are iterable too, over their rows."""

    def __array__(self) -> Any: ...


def open_elements(dataset: Any) -> Elements:
    """Opens any dataset: an ArrayDataset, a grain dataset, an iterable, or (once) an iterator.

    Raises:
      UnsupportedSourceError: It is none of these.
    """
    if isinstance(dataset, ArrayDataset):
        return ArrayElements(dataset)
    _refuse_what_is_no_dataset(dataset)
    grain = sys.modules.get("grain")  # a grain dataset exists only if the user has imported it
    if grain is not None and isinstance(dataset, grain.MapDataset):
        return _open_grain_map(grain, dataset)
    if grain is not None and isinstance(dataset, grain.IterDataset):
        return IterableElements(dataset, None, lambda: _grain_spec(grain, dataset))
    if isinstance(dataset, Iterator):
        return IteratorElements(dataset)
    if isinstance(dataset, Iterable):
        return IterableElements(dataset, _length(dataset))
    raise UnsupportedSourceError(
        f"Got {dataset!r} of type {type(dataset).__name__}, which is no dataset. Allowed are "
        "rx.data.from_arrays(...).batch(n), grain datasets, and iterables of batches (a list, a generator, "
        "an object with __iter__)."
    )


END: Final = object()
"""What ``next(iterator, END)`` returns after the last element; an element can be None."""


def as_arrays(element: Any) -> Any:
    """Returns an element with all its leaves as arrays."""
    return jax.tree.map(as_array, element)


def _first(elements: Iterator[Any]) -> Any:
    element = next(elements, END)
    if element is END:
        raise EmptyDatasetError("The dataset has no elements, so what they look like is not known.")
    return element


def _counted(elements: Iterator[Any], length: int) -> Iterator[Any]:
    """The elements, as many as were promised: other processes and Keras count on it."""
    num_elements = 0
    for num_elements, element in enumerate(elements, start=1):
        if num_elements > length:
            raise DatasetLengthError(_length_text(length, "goes on after them"))
        yield element
    if num_elements < length:
        raise DatasetLengthError(_length_text(length, f"ended after {num_elements}"))


def _length_text(length: int, what: str) -> str:
    return (
        f"len() of the dataset says {length} elements, and it {what}. Let __len__ count what __iter__ yields "
        "(batches, not rows), or leave it out; after a filter on a grain.MapDataset, call to_iter_dataset()."
    )


def _length(iterable: Iterable[Any]) -> int | None:
    if not isinstance(iterable, Sized):
        return None
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):  # torch's and TensorFlow's way to say that it is not known
        return None


def _open_grain_map(grain: Any, dataset: Any) -> Elements:
    """Reads a ``grain.MapDataset`` in order, in the calling thread.

    Grain's own default, 16 threads, costs ten times as much where elements are cheap to make; to read with
    threads pass ``dataset.to_iter_dataset(grain.ReadOptions(...))``.
    """
    num_elements = len(dataset)
    cardinality = INFINITE if num_elements == sys.maxsize else num_elements  # repeat() for ever
    ordered = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0))
    return IterableElements(ordered, cardinality, lambda: _grain_spec(grain, dataset))


def _grain_spec(grain: Any, dataset: Any) -> Any:
    """The nest of ArraySpecs that grain infers, or None where a map function does not say."""
    try:
        specs = grain.experimental.get_element_spec(dataset)
    except (ValueError, NotImplementedError):
        return None
    return jax.tree.map(lambda spec: ArraySpec(tuple(spec.shape), np.dtype(spec.dtype)), specs)


def _refuse_what_is_no_dataset(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, _SupportsArray):
        raise UnsupportedSourceError(
            f"Got {name}, an array and no dataset: arrays need a batch size: use "
            "rx.data.from_arrays(x).batch(n)."
        )
    if isinstance(dataset, tuple | Mapping):
        raise UnsupportedSourceError(
            f"Got a {name}, which is a nest and no dataset: arrays need a batch size: use "
            "rx.data.from_arrays(x).batch(n). A series of batches is given as a list."
        )
    if dataset is None or isinstance(dataset, str | bytes | bytearray | Set | int | float | complex):
        raise UnsupportedSourceError(
            f"Got {dataset!r} of type {name}, which is no dataset: use rx.data.from_arrays(x).batch(n), a "
            "grain dataset, or an iterable of batches."
        )
    if callable(dataset) and not isinstance(dataset, Iterable):
        raise UnsupportedSourceError(
            f"Got {dataset!r}, which can be called and is no dataset: call it and pass what it returns, or "
            "use strategy.distribute_datasets_from_function."
        )
