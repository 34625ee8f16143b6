"""Handles of per-worker objects: a dataset, its iterators, a value. The coordinator holds only handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, final

import jax

from replicax._ps.programs.iterator_inputs import (
    ElementSpec,
    EndOfElements,
    PerWorkerInput,
    current_elements,
)
from replicax._ps.worker.resources import WORKER_INDEX, current_worker_index
from replicax._src.program_kit.data import Optional
from replicax._src.program_kit.errors import UnsupportedError

SpecOf = Callable[[], ElementSpec]


def experimental_get_current_worker_index() -> Any:
    """Returns the index of the worker that runs the calling function.

    In scheduled functions it is an array (int32) whose value is known when the function runs. In functions that
    make per-worker datasets and values, and in the code of such a dataset, it is a number. It does not communicate.

    Raises:
      ContextError: It is called elsewhere.
    """
    elements = current_elements()
    return current_worker_index() if elements is None else elements.take(_worker_index)


@final
class PerWorkerIterator(PerWorkerInput):
    """An iterator on each worker over its own dataset. Pass it to scheduled functions, which call ``next`` on it.

    A worker that reconnects after a failure starts its dataset from the beginning. After the last element
    ``next(iterator)`` raises StopIteration in the function. If the function does not catch it, ``join`` raises
    ``OutOfRangeError``. ``next(iterator, default)`` returns the default instead.
    """

    def __repr__(self) -> str:
        return f"<PerWorkerIterator of {self.resource!r} on each worker>"

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of an element, as a pytree of ``jax.ShapeDtypeStruct``."""
        return _pytree_of(self._spec())

    @property
    def is_iterator(self) -> bool:
        return True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        elements = current_elements()
        if elements is None:
            # TensorFlow's message begins like this.
            raise UnsupportedError(
                "Iterating over an `AsyncDistributedIterator` is not supported right now: its elements are on the "
                "workers. Pass it to a function that coordinator.schedule() runs, and call next(iterator) there."
            )
        return elements.take(self)

    def get_next(self) -> Any:
        """Returns the next element, in a scheduled function.

        Raises:
          OutOfRangeError: The dataset has no more elements.
        """
        try:
            return next(self)
        except EndOfElements as end:
            raise end.out_of_range() from None

    def get_next_as_optional(self) -> Optional:
        """Returns the next element, in a scheduled function. At the end it returns an Optional without a value.

        ``has_value()`` is a Python bool, so ``if`` may test it. At the end the function is traced once more.
        """
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()


@final
class PerWorkerDataset:
    """A dataset of each worker. Pass ``iter`` of it to scheduled functions."""

    def __init__(self, spec: SpecOf, make_iterator: Callable[[], PerWorkerIterator]):
        self._spec, self._make_iterator = spec, make_iterator

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of an element, as a pytree of ``jax.ShapeDtypeStruct``.

        It waits for the first worker that has made its dataset.
        """
        return _pytree_of(self._spec())

    def __iter__(self) -> PerWorkerIterator:
        return self._make_iterator()


@final
class PerWorkerValues(PerWorkerInput):
    """A value of each worker. Pass it to scheduled functions, in which it is the worker's own value."""

    def __repr__(self) -> str:
        return f"<PerWorkerValues: {self.resource!r} of each worker>"

    @property
    def is_iterator(self) -> bool:
        return False


def _pytree_of(spec: ElementSpec) -> Any:
    return jax.tree.unflatten(spec.tree, spec.leaves)


_worker_index = PerWorkerValues(
    WORKER_INDEX, lambda: ElementSpec(jax.tree.structure(0), (jax.ShapeDtypeStruct((), jax.numpy.int32),))
)


PerWorkerValue = PerWorkerValues  # the name in tf.distribute.coordinator
