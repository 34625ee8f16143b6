"""keras.utils.PyDataset."""

from __future__ import annotations

import collections
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

from replicax._src.input.elements import Elements, NumberedIterator, Traits
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
        Traits(f"the PyDataset {type(dataset).__name__}{read}"),
        lambda: _epoch(dataset),
        count=lambda: _count(dataset),
        look=lambda: (
            _batch(dataset, index) for index in range(bool(_count(dataset)))
        ),  # it belongs to no epoch
        fingerprint=lambda: {"length": None if _count(dataset) == INFINITE else _count(dataset)},
    )


def _count(dataset: Any) -> Cardinality:
    num_batches = dataset.num_batches
    return INFINITE if num_batches is None else int(num_batches)


def _epoch(dataset: Any) -> NumberedIterator:
    """Starts an epoch: ``on_epoch_begin`` is called before its first batch, ``on_epoch_end`` after its last."""
    length = _count(dataset)
    epoch = _Epoch(dataset, length)
    return NumberedIterator(epoch.at, length, epoch.end)


def _num_threads(dataset: Any) -> int:
    """How many threads read ahead: Keras starts none for one worker without processes."""
    workers = dataset.workers
    return workers if workers > 1 or (workers > 0 and dataset.use_multiprocessing) else 0


def _batch(dataset: Any, index: int) -> Any:
    """A batch; a list of arrays is made a tuple, as Keras does."""
    batch = dataset[index]
    return tuple(batch) if isinstance(batch, list) else batch


@final
class _Epoch:
    """Reads the batches of one epoch."""

    def __init__(self, dataset: Any, length: Cardinality):
        self._dataset, self._length = dataset, length
        self._at: Callable[[int], Any] | None = None
        self._next = 0

    def at(self, index: int) -> Any:
        """Returns a batch; they are asked for in order, from any first one on."""
        if self._at is None:
            self._dataset.on_epoch_begin()
        if self._at is None or index != self._next:
            self._at = self._reader(index)
        batch = self._at(index)
        self._next = index + 1
        return batch

    def end(self) -> None:
        """Ends the epoch, if it was begun."""
        if self._at is not None:
            self._at = None
            self._dataset.on_epoch_end()

    def _reader(self, first: int) -> Callable[[int], Any]:
        dataset = self._dataset
        num_threads = _num_threads(dataset)
        if not num_threads:
            return lambda index: _batch(dataset, index)
        return _ReadAhead(dataset, first, self._length, num_threads, max(1, dataset.max_queue_size)).at


@final
class _ReadAhead:
    """Batches that threads read before they are asked for, in order. The threads end when it is dropped."""

    def __init__(self, dataset: Any, first: int, length: Cardinality, num_threads: int, depth: int):
        self._dataset, self._next, self._length, self._depth = dataset, first, length, depth
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="replicax-pydataset")
        self._batches: collections.deque[Future[Any]] = collections.deque()

    def at(self, index: int) -> Any:
        """Returns the next batch; ``index`` is its number. Blocks until it has been read."""
        while len(self._batches) < self._depth and self._next < self._length:
            self._batches.append(self._pool.submit(_batch, self._dataset, self._next))
            self._next += 1
        batch = self._batches.popleft().result()
        if index + 1 == self._length:
            self._pool.shutdown(wait=False)
        return batch
