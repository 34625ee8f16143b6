"""The epoch and the metrics of a ``fit`` for the status: ``replicax top`` and the page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import keras

from replicax._src.cluster.counters import counters
from replicax._src.cluster.loop_progress import EPOCH, LoopProgress


@final
class _Notes(keras.callbacks.Callback):
    """Notes the epochs. The step function notes the batches, so that Keras has nothing to call after each."""

    def on_train_begin(self, logs: Any = None) -> None:
        params = self.params or {}
        counters.fit, counters.epoch_logs = LoopProgress(EPOCH, params.get("epochs")), {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if counters.fit is not None:
            counters.fit.begin_turn(epoch, (self.params or {}).get("steps"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        counters.epoch_logs = logs or {}


@contextlib.contextmanager
def in_fit(callbacks: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the callbacks for the ``fit`` that runs inside the block."""
    try:
        yield [_Notes(), *callbacks]
    finally:
        counters.fit = None
