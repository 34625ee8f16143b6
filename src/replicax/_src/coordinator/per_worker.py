"""What each worker has its own of: a dataset's iterator, or a value. The coordinator has only these handles of them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Self, final

from replicax._src.errors import ContextError, UnsupportedError

take_element: ContextVar[Callable[[PerWorkerIterator], Any] | None] = ContextVar("take_element", default=None)
"""While a scheduled function is traced: gives the next element of an iterator, as an input of the program."""

worker_index: ContextVar[Any] = ContextVar("worker_index", default=None)
"""On a worker, while a dataset is made, its number; while a scheduled function is traced, what stands for that."""


@final
class PerWorkerIterator:
    """An iterator on each worker, over its own dataset: the argument of a scheduled function, which calls ``next`` on it.

    A worker that comes back after a failure begins its dataset anew. What the last element is followed by is
    ``OutOfRangeError``, at ``join``.

    Attributes:
      resource_name: Of what the workers have.
    """

    is_iterator = True

    def __init__(self, resource_name: str, spec: Callable[[], Any], keeps: Any = None):
        self.resource_name = resource_name
        self._spec = spec
        self._keeps = keeps

    @property
    def spec(self) -> Any:
        """Of one element. Waits for the first worker that has made its dataset."""
        return self._spec()

    element_spec = spec

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        take = take_element.get()
        if take is None:
            # The beginning is TensorFlow's.
            raise UnsupportedError(
                "Iterating over an `AsyncDistributedIterator` is not supported right now: its elements are on the workers. Pass "
                "it to a function that coordinator.schedule() runs, and call next(iterator) there."
            )
        return take(self)

    get_next = __next__


@final
class PerWorkerValues:
    """A value, or a dataset, of each worker: an argument of a scheduled function, where it is the worker's own.

    ``ClusterCoordinator.create_per_worker_dataset`` and ``create_per_worker_value`` return it.

    Attributes:
      resource_name: Of what the workers have.
    """

    is_iterator = False

    def __init__(
        self,
        resource_name: str,
        spec: Callable[[], Any],
        make_iterator: Callable[[], PerWorkerIterator] | None = None,
    ):
        self.resource_name = resource_name
        self._spec = spec
        self._make_iterator = make_iterator

    @property
    def spec(self) -> Any:
        """Of the value, or of one element. Waits for the first worker that has made it."""
        return self._spec()

    element_spec = spec

    def __iter__(self) -> PerWorkerIterator:
        if self._make_iterator is None:
            raise UnsupportedError(
                "A per-worker value cannot be iterated here: it is on the workers. Pass it to a function that "
                "coordinator.schedule() runs; only what create_per_worker_dataset() returns has an iterator."
            )
        return self._make_iterator()


PerWorkerValue = PerWorkerValues


def experimental_get_current_worker_index() -> Any:
    """Returns the number of the worker that makes a dataset, or runs a scheduled function.

    Call it in a function given to ``create_per_worker_dataset`` or ``create_per_worker_value``; it is an int there.

    Raises:
      ContextError: Elsewhere.
    """
    index = worker_index.get()
    if index is None:
        raise ContextError(
            "There is no current worker here. Call experimental_get_current_worker_index() in a function that workers run: one "
            "given to coordinator.create_per_worker_dataset() or create_per_worker_value()."
        )
    return index
