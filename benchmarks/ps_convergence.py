"""Compares what a model on parameter servers has learned of the handwritten digits with the same model
trained synchronously.

``parameter_server.py`` runs it; alone: ``python benchmarks/ps_convergence.py --rounds 3``.
"""

from __future__ import annotations

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import statistics
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import ps_sizes
import replicax as rx
import workers

BAR, EPOCHS, BATCH_SIZE, NUM_TRAINED = 0.02, 15, 32, 1437


def accuracy(strategy: Any, seed: int) -> float:
    """Trains a new model, and returns its accuracy on the held-out digits."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(seed).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    model.fit(images[:NUM_TRAINED], labels[:NUM_TRAINED], BATCH_SIZE, EPOCHS, verbose=0)
    return model.evaluate(images[NUM_TRAINED:], labels[NUM_TRAINED:], verbose=0)[1]


def main(num_rounds: int) -> None:
    """Prints the accuracies of some seeds, and the bar."""
    rx.config.set_local_devices(ps_sizes.NUM_WORKERS)
    synchronous = rx.MirroredStrategy()
    found = {"synchronous": [accuracy(synchronous, seed) for seed in range(num_rounds)]}
    with (
        rx.testing.server_cluster(workers=ps_sizes.NUM_WORKERS, ps=1),
        rx.ParameterServerStrategy() as strategy,
    ):
        found["parameter servers"] = [accuracy(strategy, seed) for seed in range(num_rounds)]
    print(f"\nAccuracy on held out digits after {EPOCHS} epochs, {ps_sizes.NUM_WORKERS} workers")
    for name, each in found.items():
        print(f"  {name:34} {statistics.median(each):.4f}, {min(each):.4f}–{max(each):.4f}")
    below = statistics.median(found["synchronous"]) - statistics.median(found["parameter servers"])
    print(
        f"  parameter servers: {100 * below:+.1f} points below synchronous training by medians (bar: at most {100 * BAR:g}): "
        f"{workers.replication(below <= BAR)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="seeds (default 3)")
    main(parser.parse_args().rounds)
