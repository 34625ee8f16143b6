"""Measures whether memory grows with the epochs of one ``fit``, and of one loop over a distributed dataset."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import task_costs

_EPOCHS = (10, 100, 1_000, 10_000)


def measure(num_epochs: int) -> Iterator[dict[str, dict[int, list[float]]]]:
    """Yields the values of rows of the table, by the number of epochs."""
    import replicax as rx

    rx.config.set_local_devices(2)

    import keras
    import numpy as np

    x = np.ones((4, 2), np.float32)
    strategy = rx.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        total = rx.Variable(np.zeros(2, np.float32), aggregation="SUM")
    in_fit, in_loop = Memory(), Memory()

    class Sampling(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            in_fit.sample(epoch + 1)

    model.fit(x, x[:, :1], batch_size=4, epochs=num_epochs, verbose=0, callbacks=[Sampling()])  # type: ignore[arg-type]
    yield {"fit: live objects": in_fit.objects, "fit: memory": in_fit.mib}
    batches = strategy.experimental_distribute_dataset(rx.data.from_arrays(x).shuffle(seed=1).batch(4))
    for epoch in range(num_epochs):
        for batch in batches:
            strategy.run(lambda rows: total.assign_add(rows.sum(0)), args=(batch,))
        in_loop.sample(epoch + 1)
    yield {"a loop: live objects": in_loop.objects, "a loop: memory": in_loop.mib}


class Memory:
    """What a process has more than after five epochs.

    Attributes:
      objects: The number of Python's objects, by epoch.
      mib: The resident memory in MiB, by epoch.
    """

    def __init__(self) -> None:
        self.objects: dict[int, list[float]] = {}
        self.mib: dict[int, list[float]] = {}
        self._before = 0, 0.0

    def sample(self, epoch: int) -> None:
        """Takes a sample after some of the epochs."""
        if epoch == 5:
            self._before = _now()
        elif epoch in _EPOCHS:
            objects, mib = _now()
            self.objects[epoch] = [objects - self._before[0]]
            self.mib[epoch] = [mib - self._before[1]]


def _now() -> tuple[int, float]:
    gc.collect()
    return len(gc.get_objects()), task_costs.resident_mib(os.getpid())
