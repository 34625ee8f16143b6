"""Trains a Keras model on scikit-learn's handwritten digits with ``fit``, its variables on parameter servers.

Without arguments it starts two workers and two parameter servers on this machine. In a cluster whose tasks
have a TF_CONFIG, the workers and parameter servers run ``replicax server``, and the chief runs this file.
"""

from __future__ import annotations

import argparse
import contextlib
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicax as rx


def main() -> None:
    options = parse_options()
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=360, random_state=0, stratify=labels
    )

    with servers(options), rx.ParameterServerStrategy() as strategy:
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((64,)),
                    keras.layers.Dense(128, activation="relu"),
                    keras.layers.Dense(10),
                ]
            )
            model.compile(
                optimizer=keras.optimizers.Adam(2e-3),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        model.fit(
            train_images,
            train_labels,
            batch_size=options.batch_size,  # each batch goes to the worker that is free
            epochs=options.epochs,
            validation_split=0.2,
            verbose=2,
        )
        _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
        predicted = model.predict(test_images, verbose=0).argmax(axis=-1)
        wrong = np.sum(predicted != test_labels)
        print(f"{int(model.optimizer.iterations.value)} steps")
        print(f"test accuracy {accuracy:.4f}, {wrong} of {len(test_labels)} wrong")


def servers(options: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """Workers and parameter servers on this machine, unless the environment has a cluster."""
    if "TF_CONFIG" in os.environ:
        return contextlib.nullcontext()
    return rx.testing.server_cluster(workers=options.workers, ps=options.ps)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    main()
