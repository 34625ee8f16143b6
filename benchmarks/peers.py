"""Compares the same model, batch and optimizer with Keras's own data parallelism and TensorFlow's
MirroredStrategy."""

from __future__ import annotations

import keras

import models
import replicax as rx
import rounds
from peer_process import PeerProcess

SIZES, ROWS = (64, 256, 256, 10), 128


def main(num_rounds: int, tensorflow_python: str | None) -> None:
    """Prints µs per step."""
    strategy = rx.MirroredStrategy()
    contestants = {
        "strategy.run": models.through_run(strategy, SIZES, ROWS),
        "keras.fit, DataParallel": keras_fit(),
    }
    worker = None
    if tensorflow_python:
        worker = PeerProcess(tensorflow_python, "tensorflow_step.py", {"sizes": SIZES, "rows": ROWS})
        contestants["TensorFlow MirroredStrategy"] = worker.run
    try:
        timings = rounds.compare(contestants, rounds=num_rounds)
    finally:
        if worker is not None:
            worker.close()
    rounds.report("The MLP step beside its peers, 2 virtual devices, fixed batch", timings, "strategy.run")
    if worker is None:
        print("  (TensorFlow: give --tensorflow PYTHON, a Python that has TensorFlow 2.21)")


def keras_fit():
    """``model.fit`` under ``keras.distribution.DataParallel``; its time includes Keras' loop."""
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    try:
        model = keras.Sequential(
            [
                keras.Input((SIZES[0],)),
                *(keras.layers.Dense(n, activation="relu") for n in SIZES[1:-1]),
                keras.layers.Dense(SIZES[-1]),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    finally:
        keras.distribution.set_distribution(None)
    features, labels = models.data(SIZES, ROWS)

    def run(steps: int) -> None:
        keras.distribution.set_distribution(distribution)
        try:
            model.fit(
                features.repeat(steps, axis=0),
                labels.repeat(steps, axis=0),
                batch_size=ROWS,
                shuffle=False,
                verbose=0,
            )
        finally:
            keras.distribution.set_distribution(None)

    return run
