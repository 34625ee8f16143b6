"""One contestant of ``columns.py``: ``fit`` of a dict of many columns, in a separate process."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "jax"

import numpy as np

import fit_process
import peer_process

NUM_COLUMNS, NUM_STEPS, BATCH = 200, 64, 128
ROWS = 3 * NUM_STEPS * BATCH
CONTESTANTS = {
    "replicax, arrays": ("replicax", "arrays"),
    "replicax, from_arrays": ("replicax", "from_arrays"),
    "Keras DataParallel": ("Keras DataParallel", "arrays"),
    "Keras, one device": ("Keras, one device", "arrays"),
}


def columns() -> dict[str, np.ndarray]:
    """A dict of columns ``[ROWS, 1]``."""
    rng = np.random.default_rng(0)
    return {f"column_{i:03}": rng.normal(size=(ROWS, 1)).astype(np.float32) for i in range(NUM_COLUMNS)}


def build(contestant: str, data: str) -> Any:
    """Answers the commands of the benchmark.

    Args:
      contestant: A key of ``fit_process.SCOPES``.
      data: "arrays" passes the dict to ``fit``, "from_arrays" a dataset of replicax.
    """
    import keras

    with fit_process.SCOPES[contestant]():
        keras.utils.set_random_seed(0)
        inputs = {name: keras.Input((1,), name=name) for name in columns()}
        hidden = keras.layers.Concatenate()(list(inputs.values()))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse")
    x, y = columns(), np.zeros((ROWS, 1), np.float32)
    ends: list[tuple[float, float]] = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append((time.perf_counter(), time.process_time()))
    )
    options: dict[str, Any] = {"epochs": 2, "verbose": 0, "callbacks": [clock]}

    def run(count: int) -> tuple[float, ...]:
        """Returns the seconds and those of processor time of an epoch that continues with the first one's iterator."""
        ends.clear()
        if data == "arrays":
            model.fit(x, y, batch_size=BATCH, steps_per_epoch=count, **options)
        else:
            import replicax as rx

            model.fit(
                rx.data.from_arrays((x, y)).shuffle(seed=0).batch(BATCH), steps_per_epoch=count, **options
            )
        return tuple(end - start for start, end in zip(*ends, strict=True))

    return run


if __name__ == "__main__":
    peer_process.answer(build)
