"""Distributed datasets and their iterators. How a batch is placed on devices is a function they are given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

from replicax._src.errors import InvalidArgumentError, ReplicaxError
from replicax._src.input.order import INFINITE, Cardinality
from replicax._src.input.sources import Source

iteration_guard: Final[list[Callable[[], None]]] = []
"""Called before a distributed dataset is iterated and before each element; they raise to forbid it."""


class OutOfRangeError(ReplicaxError, LookupError):
    """``get_next`` was called after the last element."""


class EmptyOptionalError(InvalidArgumentError):
    """The value of an Optional that has none was asked for."""


class DistributedDataset:
    """A dataset whose elements are placed on the replicas of a strategy.

    Make one with ``Strategy.experimental_distribute_dataset`` or ``distribute_datasets_from_function``.
    Iterating it starts again from the first element each time. Call ``map``, ``batch`` and the like before
    it is distributed; it has no transformations.
    """

    def __init__(self, source: Source, place: Callable[[Any], Any]):
        """Private: made by strategies.

        Args:
          source: The steps, as they come from the user's dataset.
          place: From what the source yields for one step to what one step of the loop gets.
        """
        self._source = source
        self._place = place

    @property
    def num_replicas(self) -> int:
        """R, the number of replicas that the elements are for."""
        return self._source.num_replicas

    @property
    def cardinality(self) -> Cardinality | None:
        """The number of elements, ``math.inf`` if it never ends, None if it is not known beforehand."""
        return self._source.cardinality

    @functools.cached_property
    def element_spec(self) -> Any:
        """The nest of ``PerReplicaSpec`` that each element fits; looks at the first one if need be.

        Raises:
          EmptyDatasetError: There is no element to look at.
        """
        return self._source.element_spec()

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self)

    def __len__(self) -> int:
        if self.cardinality is None:
            raise TypeError(
                "This DistributedDataset has no len(): its source does not say how many batches it has."
            )
        if self.cardinality == INFINITE:
            raise TypeError("This DistributedDataset repeats for ever and has no len().")
        return int(self.cardinality)

    def __bool__(self) -> bool:
        return True  # a dataset is one whatever its len(), also where that raises

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Goes through the dataset once and returns the last state.

        Args:
          initial_state: The state before the first element; returned as it is if there is none.
          reduce_func: ``(state, element) -> state``, called in cross-replica context.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def steps(self) -> Iterator[Any]:
        """Yields the placed elements, without a guard: what iterators and prefetching read."""
        return map(self._place, self._source.iterate())


class DistributedIterator:
    """Goes through a DistributedDataset once. Call it in cross-replica context only."""

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset
        self.initialize()

    @property
    def element_spec(self) -> Any:
        """As ``DistributedDataset.element_spec``."""
        return self._dataset.element_spec

    def initialize(self) -> None:
        """Starts again from the first element."""
        _check_guards()
        self._steps = self._dataset.steps()

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        _check_guards()
        return next(self._steps)

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
          OutOfRangeError: There is none.
        """
        optional = self.get_next_as_optional()
        if not optional.has_value():
            raise OutOfRangeError(
                "get_next() was called after the last element. Loop with `for`, which ends by itself, or ask "
                "get_next_as_optional().has_value(), or start again with iter(dataset)."
            )
        return optional.get_value()

    def get_next_as_optional(self) -> Optional:
        """Returns the next element, or at the end an Optional without a value."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()


class Optional:
    """An element of a dataset, or its absence after the last one."""

    def __init__(self, *value: Any):
        """Holds the value, if one is given."""
        (self._value,) = value or (_NO_VALUE,)

    def has_value(self) -> bool:
        """Whether there was an element."""
        return self._value is not _NO_VALUE

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
          EmptyOptionalError: There was none.
        """
        if not self.has_value():
            raise EmptyOptionalError(
                "This Optional has no value: the dataset had ended. Ask has_value() first."
            )
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional()"


_NO_VALUE: Final = object()


def _check_guards() -> None:
    for guard in iteration_guard:
        guard()
