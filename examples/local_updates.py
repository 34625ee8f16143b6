"""Trains a small Keras model on scikit-learn's handwritten digits in groups that never wait for each other.

``python examples/local_updates.py`` trains as one group, which exchanges nothing. ``replicax launch --groups 3 --syncers 1
examples/local_updates.py`` trains in three groups, each with a third of the rows. All end when one does.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicax as rx

EPOCHS = 20
ROWS_PER_STEP = 96  # in all groups


def main() -> None:
    groups = rx.experimental.LocalUpdates(
        every=10, fragments=2, outer_optimizer=keras.optimizers.SGD(1.0, momentum=0.5, nesterov=True)
    )
    x, test_x, y, test_y = load_rows()
    mine = slice(groups.index, None, groups.num_groups)  # each group trains on rows of its own
    keras.utils.set_random_seed(groups.index)  # the first group's weights are those of all, dropout differs
    with rx.MirroredStrategy().scope():
        model = make_model(num_steps=EPOCHS * len(x) // ROWS_PER_STEP)
    model.fit(
        x[mine],
        y[mine],
        batch_size=ROWS_PER_STEP // groups.num_groups,
        epochs=EPOCHS,
        validation_data=(test_x, test_y),  # with the outer parameters
        validation_batch_size=len(test_x),
        verbose=0,
        callbacks=[rx.keras.callbacks.LocalUpdatesCallback(groups), Report(groups)],
    )
    loss, accuracy = model.evaluate(test_x, test_y, batch_size=len(test_x), verbose=0)
    print(f"test loss {loss:.4f} accuracy {accuracy:.4f} after {groups.steps} steps", flush=True)


class Report(keras.callbacks.Callback):
    """Prints each epoch, and ends all groups with the first that ends."""

    def __init__(self, groups: rx.experimental.LocalUpdates):
        super().__init__()
        self.groups = groups

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        print(
            f"epoch {epoch + 1}  rounds {self.groups.version}  loss {logs['loss']:.4f}  test loss {logs['val_loss']:.4f}",
            flush=True,
        )
        if epoch + 1 == EPOCHS:
            self.groups.stop()


def make_model(num_steps: int) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rate: Any = keras.optimizers.schedules.CosineDecay(3e-3, num_steps)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def load_rows() -> list[np.ndarray]:
    """Rows for training and for testing, then their labels; the same split in all groups."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    return train_test_split(images, labels, test_size=357, random_state=0, stratify=labels)


if __name__ == "__main__":
    main()
