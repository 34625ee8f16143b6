"""What each worker has its own of: a dataset's iterator, or a value. The coordinator has only these handles of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, final

from replicax._src.errors import UnsupportedError
from replicax._src.placement.remote.closure import ElementSpec, PerWorkerInput, current_elements


@final
class PerWorkerIterator(PerWorkerInput):
    """An iterator on each worker, over its own dataset: the argument of a scheduled function, which calls ``next`` on it.

    A worker that comes back after a failure begins its dataset anew. What the last element is followed by is
    ``OutOfRangeError``, at ``join``.

    """

    def __init__(self, resource_name: str, spec: Callable[[], ElementSpec]):
        self._resource = resource_name
        self._spec = spec

    @property
    def resource(self) -> str:
        """What the workers call it."""
        return self._resource

    @property
    def is_iterator(self) -> bool:
        return True

    @property
    def spec(self) -> ElementSpec:
        """What an element is. Waits for the first worker that has made its dataset."""
        return self._spec()

    @property
    def element_spec(self) -> Any:
        """The same, as a nest of ``jax.ShapeDtypeStruct``."""
        return self._spec().nest

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        elements = current_elements()
        if elements is None:
            # The beginning is TensorFlow's.
            raise UnsupportedError(
                "Iterating over an `AsyncDistributedIterator` is not supported right now: its elements are on the workers. Pass "
                "it to a function that coordinator.schedule() runs, and call next(iterator) there."
            )
        return elements.take(self)

    get_next = __next__


@final
class PerWorkerValues(PerWorkerInput):
    """A value, or a dataset, of each worker: an argument of a scheduled function, where it is the worker's own.

    ``ClusterCoordinator.create_per_worker_dataset`` and ``create_per_worker_value`` return it.

    """

    def __init__(
        self,
        resource_name: str,
        spec: Callable[[], ElementSpec],
        make_iterator: Callable[[], PerWorkerIterator] | None = None,
    ):
        self._resource = resource_name
        self._spec = spec
        self._make_iterator = make_iterator

    @property
    def resource(self) -> str:
        """What the workers call it."""
        return self._resource

    @property
    def is_iterator(self) -> bool:
        return False

    @property
    def is_dataset(self) -> bool:
        """What is to be iterated, and is no argument as it is."""
        return self._make_iterator is not None

    @property
    def spec(self) -> ElementSpec:
        """What the value, or an element, is. Waits for the first worker that has made it."""
        return self._spec()

    @property
    def element_spec(self) -> Any:
        """The same, as a nest of ``jax.ShapeDtypeStruct``."""
        return self._spec().nest

    def __iter__(self) -> PerWorkerIterator:
        if self._make_iterator is None:
            raise UnsupportedError(
                "A per-worker value cannot be iterated here: it is on the workers. Pass it to a function that "
                "coordinator.schedule() runs; only what create_per_worker_dataset() returns has an iterator."
            )
        return self._make_iterator()
