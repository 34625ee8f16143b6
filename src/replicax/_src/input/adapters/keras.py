"""keras.utils.PyDataset."""

from __future__ import annotations

import collections
import itertools
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from replicax._src.input.description import Description
from replicax._src.input.element_specs import INFINITE, Cardinality
from replicax._src.input.elements import Elements, Pass

log = logging.getLogger("replicax")


def describe_keras(dataset: Any) -> Description | None:
    """Describes a ``keras.utils.PyDataset``; returns None for any other value.

    With ``workers > 1`` that many threads prefetch at most ``max_queue_size`` batches, in order. It never starts
    processes, because they would have to be forked from a process in which JAX has threads. With
    ``use_multiprocessing`` it also uses threads, and logs this.

    Its state is the number of the next batch. A dataset that shuffles in ``on_epoch_end`` resumes with the order of the
    new object, so derive its order from the epoch or a seed. ``on_epoch_end`` is called after an epoch in which at
    least one batch was read. It is not called if a pass resumes after its last batch.
    """
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(dataset, keras.utils.PyDataset):
        return None
    if dataset.use_multiprocessing and dataset.workers > 0:
        log.warning(
            "Input: %s has use_multiprocessing=True; its %d workers run as threads of this process. To read in "
            "processes, use a grain dataset or a torch DataLoader.",
            type(dataset).__name__,
            dataset.workers,
        )
    threads = _num_threads(dataset)
    read = f" (read by {threads} threads)" if threads else ""
    text = f"the PyDataset {type(dataset).__name__}{read}"
    return Description(text, lambda: _elements(dataset, text))


def _elements(dataset: Any, text: str) -> Elements:
    return Elements(
        text,
        lambda: _Epoch(dataset),
        count=lambda: _count(dataset),
        peek=lambda: (
            _batch(dataset, number) for number in range(bool(_count(dataset)))
        ),  # outside of any epoch
        fingerprint=lambda: {"length": None if _count(dataset) == INFINITE else _count(dataset)},
    )


def _count(dataset: Any) -> Cardinality:
    num_batches = dataset.num_batches
    return INFINITE if num_batches is None else int(num_batches)


def _num_threads(dataset: Any) -> int:
    """Returns the number of prefetching threads. Keras starts none for one worker without processes."""
    workers = dataset.workers
    return workers if workers > 1 or (workers > 0 and dataset.use_multiprocessing) else 0


@final
class _Epoch(Pass):
    """A pass through one epoch. Its position is the number of the next batch.

    ``on_epoch_begin`` is called before its first batch, ``on_epoch_end`` after its last.
    """

    def __init__(self, dataset: Any):
        self._dataset, self._length = dataset, _count(dataset)
        self._next = 0
        self._batches: Iterator[Any] | None = None
        self._is_begun = False

    def __next__(self) -> Any:
        if self._next >= self._length:
            if self._is_begun:
                self._is_begun = False
                self._dataset.on_epoch_end()
            raise StopIteration
        if not self._is_begun:
            self._is_begun = True
            self._dataset.on_epoch_begin()
        if self._batches is None:
            self._batches = _batches(self._dataset, self._next)
        try:
            batch = next(self._batches)
        except BaseException:
            self._batches = None  # an error ends the generator; the next call reads this batch again
            raise
        self._next += 1
        return batch

    def get_state(self) -> int:
        """Returns the number of the next batch."""
        return self._next

    def set_state(self, state: int) -> None:
        """Moves to a batch."""
        if not 0 <= state <= self._length:
            raise ValueError(f"batch {state} of {self._length}")
        self._next, self._batches = state, None


def _batches(dataset: Any, first: int) -> Iterator[Any]:
    """Yields the batches from a number on, in order. Its prefetching threads end with it, or when it is dropped."""
    length = _count(dataset)
    numbers = itertools.takewhile(lambda number: number < length, itertools.count(first))
    num_threads = _num_threads(dataset)
    if not num_threads:
        yield from (_batch(dataset, number) for number in numbers)
        return
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="replicax-pydataset")
    try:
        read = (pool.submit(_batch, dataset, number) for number in numbers)
        ahead = collections.deque(itertools.islice(read, max(1, dataset.max_queue_size)))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(itertools.islice(read, 1))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _batch(dataset: Any, number: int) -> Any:
    """Returns a batch. A list of arrays becomes a tuple, as in Keras."""
    batch = dataset[number]
    return tuple(batch) if isinstance(batch, list) else batch
