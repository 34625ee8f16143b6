"""Elements: a dataset of any kind, read as pytrees of NumPy and JAX arrays.

``description.py`` has what is known before a dataset is opened. All resumable iterators have grain's protocol:
``get_state`` and ``set_state``.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax

from replicax._src.input.arrays import UnsupportedElementError, as_array, converted
from replicax._src.input.element_specs import Cardinality, spec_of
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError


class UnsupportedSourceError(ReplicaxError, TypeError):
    """A value given as a dataset is not a dataset."""


class OneShotSourceError(ReplicaxError, RuntimeError):
    """A generator or other iterator was iterated a second time."""


class DatasetLengthError(InvalidArgumentError):
    """A dataset yields another number of elements than its ``len()``."""


class EmptyDatasetError(InvalidArgumentError):
    """The structure of a dataset without elements was requested."""


class NotResumableError(ReplicaxError, RuntimeError):
    """A dataset cannot resume from a position, or the position is of another dataset."""


class Pass(abc.ABC):
    """One pass through the elements of a dataset, with a position. grain's iterators have the same methods."""

    def __iter__(self) -> Pass:
        return self

    @abc.abstractmethod
    def __next__(self) -> Any:
        """Returns the next element."""

    @abc.abstractmethod
    def get_state(self) -> Any:
        """Returns the position after the last returned element as a JSON value.

        Raises:
          NotResumableError: The dataset cannot resume from a position.
        """

    @abc.abstractmethod
    def set_state(self, state: Any) -> None:
        """Moves to the position of a pass through an equal dataset, also of another process.

        Raises:
          NotResumableError: The dataset cannot resume, or the state is of another dataset.
          Exception: In an adapter's pass, any error means that the state is invalid for it.
        """


@final
@dataclass(frozen=True, eq=False)
class Elements:
    """The elements of one open dataset, as pytrees of NumPy and JAX arrays.

    Attributes:
      description: The display text, such as ``"a grain.MapDataset"``.
      start: Returns an iterator from the first element on: a Pass or grain's own; any iterator if ``not_resumable`` is
        set.
      count: Returns the number of elements, INFINITE, or None if it is not known in advance.
      is_count_promised: True if iterators may yield another number of elements, which is an error.
      declared_spec: Returns the pytree of ArraySpecs that the dataset itself declares, or None.
      peek: Returns an iterator for reading the first element only; None means ``start``.
      fingerprint: Returns JSON that tells the dataset from others.
      not_resumable: The reason why it cannot resume from a position, and an alternative.
      are_arrays: True if the elements are already pytrees of arrays.
      batch_size: The number of rows of an element, if known. The last element may have fewer.
      row_bytes: The size of one row if all rows are in memory, so that a read costs no more than a copy.
      is_immutable: True if the arrays of a yielded element never change. Otherwise they are copied.
      merge: Returns one position of its iterator from those of another number of workers; see ``files/share.merged``.
    """

    description: str
    start: Callable[[], Iterator[Any]]
    count: Callable[[], Cardinality | None] = lambda: None
    is_count_promised: bool = False
    declared_spec: Callable[[], Any] = lambda: None
    peek: Callable[[], Iterator[Any]] | None = None
    fingerprint: Callable[[], Mapping[str, Any]] = dict
    not_resumable: str | None = None
    are_arrays: bool = False
    batch_size: int | None = None
    row_bytes: int | None = None
    is_immutable: bool = False
    merge: Callable[[Sequence[Mapping[str, Any]]], Any] | None = None

    @property
    def cardinality(self) -> Cardinality | None:
        """The number of elements, INFINITE, or None if it is not known in advance."""
        return self.count()

    def iterate(self) -> Pass:
        """Starts a pass from the first element.

        Raises:
          OneShotSourceError: The dataset cannot be iterated again.
        """
        return _ElementsPass(self)

    def first(self) -> Any:
        """Returns the first element. ``iterate`` still yields it.

        Raises:
          EmptyDatasetError: The dataset has no elements.
        """
        element = next((self.peek or self.start)(), END)
        if element is END:
            raise EmptyDatasetError("The dataset has no elements, so their structure is unknown.")
        return as_arrays(element)


@final
class _ElementsPass(Pass):
    """A pass through the elements of any dataset. Its state is that of the iterator, together with the fingerprint."""

    def __init__(self, elements: Elements):
        self._are_arrays, self._not_resumable = elements.are_arrays, elements.not_resumable
        self._fingerprint = {} if elements.not_resumable else elements.fingerprint()
        self._promised = elements.count() if elements.is_count_promised else None
        self._num_elements = 0
        self._start, self._merge = elements.start, elements.merge
        self._iterator: Any = elements.start()

    def __next__(self) -> Any:
        try:
            element = next(self._iterator)
        except StopIteration:
            if self._promised not in (None, math.inf) and self._num_elements < self._promised:
                raise _wrong_length(self._promised, f"ended after {self._num_elements}") from None
            raise
        if self._num_elements == self._promised:
            raise _wrong_length(self._promised, "has more than these")
        self._num_elements += 1
        return element if self._are_arrays else as_arrays(element)

    def get_state(self) -> Any:
        if self._not_resumable:
            raise NotResumableError(self._not_resumable)
        return {
            "position": self._num_elements,
            "iterator": self._iterator.get_state(),
            **self._fingerprint,
        }

    def set_state(self, state: Any) -> None:
        if self._not_resumable:
            raise NotResumableError(self._not_resumable)
        if isinstance(state, dict) and OF_WORKERS in state:
            state = self._merged(state[OF_WORKERS])
        _check_same_dataset(state, self._fingerprint)
        before = self._iterator.get_state() if self._num_elements else None  # get_state starts some iterators
        try:
            if not 0 <= state["position"] <= (math.inf if self._promised is None else self._promised):
                raise ValueError(f"position {state['position']}")
            if before is not None and type(state["iterator"]) is not type(before):
                raise TypeError(f"{state['iterator']!r:.200}")
            self._iterator.set_state(state["iterator"])
        except ReplicaxError:
            raise
        except Exception as error:
            if before is None:
                self._iterator = self._start()
            else:
                self._iterator.set_state(before)
            raise NotResumableError(
                f"The dataset rejects the state ({type(error).__name__}: {error}). Pass the result of get_state from a "
                "dataset that is made in the same way."
            ) from error
        self._num_elements = state["position"]

    def _merged(self, workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns one state, from the workers' ``now``, and ``batch`` and ``rows`` of a batch that is in use."""
        if self._merge is None:
            raise saved_by_other_workers(len(workers))
        for worker in workers:
            _check_same_dataset(worker["now"], self._fingerprint)
        iterators = [
            {name: value if name == "rows" else value["iterator"] for name, value in worker.items()}
            for worker in workers
        ]
        return {**workers[0]["now"], "iterator": self._merge(iterators)}


OF_WORKERS: Final = "of_workers"
"""The key of the states of all workers, in the state for another number of workers."""


def saved_by_other_workers(num_workers: int) -> NotResumableError:
    """Returns the error for the states of another number of workers."""
    return NotResumableError(
        f"{num_workers} workers have saved a position each of a dataset of which each read a part, and now there is "
        "another number of workers. The rx.data.from_... functions for files resume on any number, and so does a dataset "
        "with the same position in all workers (rx.data.from_arrays, AutoShardPolicy.DATA)."
    )


def _check_same_dataset(state: Any, expected: Mapping[str, Any]) -> None:
    """Raises NotResumableError unless a state has a ``position`` and the expected facts of the dataset."""
    if not isinstance(state, dict) or not isinstance(state.get("position"), int):
        raise NotResumableError(f"The state does not come from get_state of such a dataset: {state!r:.200}.")
    for name, value in expected.items():
        if state.get(name) != value:
            raise NotResumableError(
                f"The state is of another dataset: its {name} is {state.get(name)!r:.200}, but that of this dataset is "
                f"{value!r:.200}. Make the dataset as it was when the position was saved."
            )


def _wrong_length(length: Cardinality | None, what: str) -> DatasetLengthError:
    return DatasetLengthError(
        f"len() of the dataset says {length} elements, and it {what}. Let __len__ count what __iter__ yields "
        "(batches, not rows), or leave it out; after a filter on a grain.MapDataset, call to_iter_dataset()."
    )


def element_spec(elements: Elements) -> Any:
    """Returns the declared pytree of ArraySpecs, or else that of the first element."""
    declared = elements.declared_spec()
    return spec_of(elements.first()) if declared is None else declared


# --- iterators ----------------------------------------------------------------------------------------


@final
class NumberedIterator(Pass):
    """A pass through numbered elements. Its position is the number of the next element.

    Args:
      at: Returns the element with the given number, from 0.
      length: The number of elements.
    """

    def __init__(self, at: Callable[[int], Any], length: int):
        self._at, self._length, self._next = at, length, 0

    def __next__(self) -> Any:
        if self._next >= self._length:
            raise StopIteration
        element = self._at(self._next)
        self._next += 1
        return element

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        if not 0 <= state <= self._length:
            raise ValueError(f"element {state} of {self._length}")
        self._next = state


@final
class OneShotIterator:
    """The elements of an iterator, which can be iterated only once."""

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self._looked_at: list[Any] = []
        self._is_spent = False

    def start(self) -> Iterator[Any]:
        """Yields the elements, including an element that ``peek`` has read."""
        if self._is_spent:
            raise OneShotSourceError(
                "This dataset is an iterator (a generator, or an object with __next__), and it has been iterated, so "
                "it cannot start again. For several epochs pass an object whose __iter__ starts again: a list of "
                "batches, rx.data.from_arrays(...).batch(n), a grain dataset."
            )
        self._is_spent = True
        return self._elements()

    def peek(self) -> Iterator[Any]:
        """Yields the first element."""
        if not self._looked_at:
            if self._is_spent:
                raise OneShotSourceError(
                    "This dataset is an iterator that has been iterated, so its first element is gone; read "
                    "element_spec before you iterate."
                )
            self._looked_at.extend(itertools.islice(self._iterator, 1))
        return iter(self._looked_at)

    def _elements(self) -> Iterator[Any]:
        yield from self._looked_at
        yield from self._iterator


# --- elements -----------------------------------------------------------------------------------------

END: Final = object()
"""What ``next(iterator, END)`` returns after the last element; an element can be None."""


def as_arrays(element: Any) -> Any:
    """Returns an element with all its leaves as arrays.

    Registers a dataclass in the element with JAX as a pytree of its fields.

    Raises:
      UnsupportedElementError: A leaf is not a dense array.
    """
    sparse = sys.modules.get("jax.experimental.sparse")
    if sparse is not None:  # JAX splits its sparse matrices into parts, which are not batches
        jax.tree.map(_refuse_sparse, element, is_leaf=lambda x: isinstance(x, sparse.JAXSparse))
    return converted(element, _as_array_or_pytree)


def _refuse_sparse(leaf: Any) -> None:
    if type(leaf).__module__.startswith("jax.experimental.sparse"):
        raise UnsupportedElementError(
            f"Got a sparse {type(leaf).__name__} of shape {tuple(leaf.shape)}; batches are dense. Convert each "
            "batch with .todense(), or pass the row numbers and values as arrays of one padded size."
        )


def _as_array_or_pytree(leaf: Any) -> Any:
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        jax.tree_util.register_dataclass(type(leaf))
        return as_arrays(leaf)
    return as_array(leaf)
