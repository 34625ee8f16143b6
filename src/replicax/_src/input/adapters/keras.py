"""keras.utils.PyDataset."""

from __future__ import annotations

import collections
import itertools
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from replicax._src.input.elements import Elements, Pass
from replicax._src.input.specs import INFINITE, Cardinality

log = logging.getLogger("replicax")


def open_keras(dataset: Any) -> Elements | None:
    """Opens a ``keras.utils.PyDataset``; None if it is none.

    With ``workers > 1`` that many threads read batches ahead, in order, at most ``max_queue_size`` of them. Processes
    are never started, as they would have to be forked from one in which JAX has threads: with
    ``use_multiprocessing`` threads are used too, and that is logged.

    Its state is the number of the next batch. A dataset that shuffles itself in ``on_epoch_end`` goes on with the
    order that the new object has: give it the epoch, or a seed for each. ``on_epoch_end`` is called after an epoch of
    which at least one batch was read: not where a pass is continued after its last batch, as nothing is left of it.
    """
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(dataset, keras.utils.PyDataset):
        return None
    if dataset.use_multiprocessing and dataset.workers > 0:
        log.warning(
            "Input: %s has use_multiprocessing=True; its %d workers are threads of this process here. To read in "
            "processes, use a grain dataset or a torch DataLoader.",
            type(dataset).__name__,
            dataset.workers,
        )
    threads = _num_threads(dataset)
    read = f" (read by {threads} threads)" if threads else ""
    return Elements(
        f"the PyDataset {type(dataset).__name__}{read}",
        lambda: _Epoch(dataset),
        count=lambda: _count(dataset),
        look=lambda: (_batch(dataset, number) for number in range(bool(_count(dataset)))),  # in no epoch
        fingerprint=lambda: {"length": None if _count(dataset) == INFINITE else _count(dataset)},
    )


def _count(dataset: Any) -> Cardinality:
    num_batches = dataset.num_batches
    return INFINITE if num_batches is None else int(num_batches)


def _num_threads(dataset: Any) -> int:
    """How many threads read ahead: Keras starts none for one worker without processes."""
    workers = dataset.workers
    return workers if workers > 1 or (workers > 0 and dataset.use_multiprocessing) else 0


@final
class _Epoch(Pass):
    """Goes through one epoch; its position is the number of the next batch.

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
            self._batches = None  # a generator ends with an error; the next call asks for this batch again
            raise
        self._next += 1
        return batch

    def get_state(self) -> int:
        """Returns the number of the next batch."""
        return self._next

    def set_state(self, state: int) -> None:
        """Goes to a batch."""
        if not 0 <= state <= self._length:
            raise ValueError(f"batch {state} of {self._length}")
        self._next, self._batches = state, None


def _batches(dataset: Any, first: int) -> Iterator[Any]:
    """Yields the batches from a number on, in order. Threads read ahead; they end with it, or when it is dropped."""
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
    """A batch; a list of arrays is made a tuple, as Keras does."""
    batch = dataset[number]
    return tuple(batch) if isinstance(batch, list) else batch
