"""The same model, batch and optimizer beside Keras' own data parallelism and TensorFlow's MirroredStrategy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import keras

import models
import replicax as rx
import rounds

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
        worker = TensorFlowWorker(tensorflow_python)
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


class TensorFlowWorker:
    """A process of its own with TensorFlow, which runs steps when told to."""

    def __init__(self, python: str):
        script = Path(__file__).parent / "tensorflow_step.py"
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._ask({"sizes": SIZES, "rows": ROWS})

    def run(self, steps: int) -> None:
        """Runs steps and waits."""
        self._ask({"steps": steps})

    def _ask(self, message: dict) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        deadline = time.monotonic() + 300
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            if time.monotonic() > deadline:
                break
        raise SystemExit(
            f"The TensorFlow process ended or did not answer ({sys.executable} asked it for {message})."
        )

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
