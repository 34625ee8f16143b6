"""Trains a Keras CNN on scikit-learn's handwritten digits with ``fit``, on several devices.

Only two lines know that there may be several: the one that makes the strategy, and
``with strategy.scope():``. The rest is Keras: callbacks, validation, ``evaluate``, ``predict``, saving.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicax as rx

STRATEGIES = {
    "default": rx.get_strategy,  # plain Keras
    "one_device": lambda: rx.OneDeviceStrategy(jax.local_devices()[0]),
    "mirrored": rx.MirroredStrategy,
    "central_storage": rx.CentralStorageStrategy,
}


def main() -> None:
    options = parse_options()
    rx.config.set_local_devices(options.devices)  # virtual CPU devices; has no effect on accelerators
    keras.utils.set_random_seed(0)
    images, labels = load_images()
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=360, random_state=0, stratify=labels
    )

    strategy = STRATEGIES[options.strategy]()
    print(f"{strategy.num_replicas_in_sync} replica(s) of {type(strategy).__name__}")
    with strategy.scope():
        model = make_model()
        model.compile(
            optimizer=keras.optimizers.Adam(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    with tempfile.TemporaryDirectory() as folder:
        best = pathlib.Path(folder) / "best.weights.h5"
        history = model.fit(
            train_images,
            train_labels,
            batch_size=options.batch_size,  # rows of a global batch; no number of rows is wrong
            epochs=options.epochs,
            validation_split=0.2,
            callbacks=[
                keras.callbacks.LearningRateScheduler(lambda epoch: 3e-3 * 0.8**epoch),
                keras.callbacks.ModelCheckpoint(
                    best, monitor="val_loss", save_best_only=True, save_weights_only=True
                ),
            ],
            verbose=2,
        )
        model.load_weights(best)

    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    predicted = model.predict(test_images, verbose=0).argmax(axis=-1)
    print(f"test accuracy {accuracy:.4f}, {np.sum(predicted != test_labels)} of {len(test_labels)} wrong")
    if options.curve:
        save_curve(history, options.curve)
        print(f"saved {options.curve}")


def load_images() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return (images / 16).reshape(-1, 8, 8, 1).astype(np.float32), labels


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(24, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Conv2D(48, 3, strides=2, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
        ]
    )


def save_curve(history: keras.callbacks.History, path: str) -> None:
    figure = Figure(
        figsize=(9, 3.5), layout="constrained"
    )  # made without pyplot, so no window is ever opened
    for axes, quantity in zip(figure.subplots(1, 2), ["loss", "accuracy"], strict=True):
        epochs = [epoch + 1 for epoch in history.epoch]
        axes.plot(epochs, history.history[quantity], label="training")
        axes.plot(epochs, history.history[f"val_{quantity}"], label="validation")
        axes.set(xlabel="epoch", ylabel=quantity)
        axes.legend()
    figure.savefig(path, dpi=150)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small CNN on handwritten digits with Keras's fit.")
    parser.add_argument("--strategy", choices=STRATEGIES, default="mirrored", help="default: mirrored")
    parser.add_argument("--devices", type=int, default=2, help="how many virtual CPU devices; default: 2")
    parser.add_argument("--epochs", type=int, default=10, help="default: 10")
    parser.add_argument("--batch-size", type=int, default=32, help="rows over all devices; default: 32")
    parser.add_argument("--curve", metavar="PATH", help="save the training curve there, as a PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
