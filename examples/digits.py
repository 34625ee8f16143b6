"""Trains a small Keras CNN on scikit-learn's 1,797 handwritten digits, on several devices.

The loop is the custom training loop of tf.distribute; only the strategy knows how many devices there are. Run
``python examples/digits.py --help`` for the options.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
if os.environ["KERAS_BACKEND"] != "jax":
    sys.exit(
        f"KERAS_BACKEND is {os.environ['KERAS_BACKEND']!r}; replicax needs 'jax'. Unset it, or set it to jax."
    )

import jax
import keras
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicax as rx

NUM_TEST_ROWS = 360
VIRTUAL_CPU_DEVICES = 2


def main() -> None:
    options = parse_options()
    keras.utils.set_random_seed(options.seed)
    strategy = make_strategy(options)
    train_rows, test_rows = load_images()
    train_data = rx.data.from_arrays(train_rows).shuffle(seed=options.seed).batch(options.batch_size)
    test_data = rx.data.from_arrays(test_rows).batch(options.batch_size)

    trainer = Trainer(strategy, num_steps=options.epochs * len(train_data))
    steps_per_s = train(trainer, train_data, test_data, options.epochs)
    if strategy.extended.should_save_summary:
        print_summary(strategy, steps_per_s, float(trainer.test_accuracy.result()))


class Trainer:
    """The model, and its two distributed steps."""

    def __init__(self, strategy: rx.Strategy, num_steps: int):
        self.strategy = strategy
        with strategy.scope():
            self.model = make_model()
            self.optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, num_steps))
            self.train_loss = keras.metrics.Mean()
            self.train_accuracy = keras.metrics.SparseCategoricalAccuracy()
            self.test_loss = keras.metrics.Mean()
            self.test_accuracy = keras.metrics.SparseCategoricalAccuracy()
        # One loss per row: compute_average_loss takes its mean over the global batch.
        self.loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(self, inputs: Any) -> Any:
        """One replica's work on its rows of a batch."""
        images, labels = inputs
        with rx.GradientTape() as tape:
            logits = self.model(images, training=True)
            losses = self.loss_object(labels, logits)
            loss = rx.nn.compute_average_loss(losses)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        self.train_loss.update_state(losses)
        self.train_accuracy.update_state(labels, logits)
        return loss

    def test_step(self, inputs: Any) -> None:
        """Counts every row once: the metrics are sums over rows, and over replicas when they are read."""
        images, labels = inputs
        logits = self.model(images, training=False)
        self.test_loss.update_state(self.loss_object(labels, logits))
        self.test_accuracy.update_state(labels, logits)

    @rx.function
    def distributed_train_step(self, inputs: Any) -> Any:
        per_replica = self.strategy.run(self.train_step, args=(inputs,))
        return self.strategy.reduce(rx.ReduceOp.SUM, per_replica, axis=None)

    @rx.function
    def distributed_test_step(self, inputs: Any) -> None:
        self.strategy.run(self.test_step, args=(inputs,))

    def reset_metrics(self) -> None:
        for metric in (self.train_loss, self.train_accuracy, self.test_loss, self.test_accuracy):
            metric.reset_state()


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
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def load_images() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images in [0, 1] and labels, for training and for testing; always the same split."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels.astype(np.int32), test_size=NUM_TEST_ROWS, random_state=0, stratify=labels
    )
    return (train_images, train_labels), (test_images, test_labels)


def train(trainer: Trainer, train_data: Any, test_data: Any, epochs: int) -> float:
    """Trains and tests for some epochs, one line each; returns steps/s, without the epoch that compiles."""
    distribute = trainer.strategy.experimental_distribute_dataset
    train_batches, test_batches = distribute(train_data), distribute(test_data)
    num_steps, seconds = 0, 0.0
    with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
        for epoch in range(1, epochs + 1):
            trainer.reset_metrics()
            bar = progress.add_task(f"epoch {epoch}", total=len(train_data))
            start = time.perf_counter()
            for inputs in train_batches:
                loss = trainer.distributed_train_step(inputs)
                progress.advance(bar)
            loss.block_until_ready()
            if epoch > 1 or epochs == 1:
                num_steps += len(train_data)
                seconds += time.perf_counter() - start
            for inputs in test_batches:
                trainer.distributed_test_step(inputs)
            progress.remove_task(bar)
            if trainer.strategy.extended.should_save_summary:  # of several workers, one
                progress.console.print(epoch_line(epoch, epochs, trainer), highlight=False, soft_wrap=True)
    return num_steps / seconds


def epoch_line(epoch: int, epochs: int, trainer: Trainer) -> str:
    return (
        f"epoch {epoch:{len(str(epochs))}}/{epochs}   "
        f"train loss {float(trainer.train_loss.result()):.4f} "
        f"accuracy {float(trainer.train_accuracy.result()):.4f}   "
        f"test loss {float(trainer.test_loss.result()):.4f} "
        f"accuracy {float(trainer.test_accuracy.result()):.4f}"
    )


def print_summary(strategy: rx.Strategy, steps_per_s: float, test_accuracy: float) -> None:
    table = Table(show_header=False)
    devices = [f"{device.platform}:{device.id}" for device in strategy.extended.worker_devices]
    table.add_row("strategy", type(strategy).__name__)
    table.add_row("replicas", str(strategy.num_replicas_in_sync))
    table.add_row("devices", ", ".join(devices))
    table.add_row("steps/s", f"{steps_per_s:.1f}")
    table.add_row("test accuracy", f"{test_accuracy:.4f}")
    Console().print(table)


# --- options ------------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small CNN on handwritten digits on several devices."
    )
    parser.add_argument(
        "--strategy",
        choices=["auto", "one_device", "mirrored", "central_storage"],
        default="auto",
        help="auto (the default): one_device on one device, mirrored on several, MultiWorkerMirroredStrategy where "
        "TF_CONFIG or a launcher describes several workers",
    )
    parser.add_argument(
        "--devices",
        type=whole_number(1),
        help=f"how many devices; default: all accelerators, or {VIRTUAL_CPU_DEVICES} virtual CPU devices",
    )
    parser.add_argument("--epochs", type=whole_number(1), default=12, help="default: 12")
    parser.add_argument(
        "--batch-size", type=whole_number(1), default=32, help="rows over all devices; default: 32"
    )
    parser.add_argument(
        "--seed", type=whole_number(0, 2**32 - 1), default=0, help="of weights, dropout and order; default: 0"
    )
    options = parser.parse_args()
    if options.strategy == "one_device":
        if (options.devices or 1) > 1:
            parser.error(f"--strategy one_device runs on 1 device, and --devices is {options.devices}")
        options.devices = 1
    options.has_workers = options.strategy == "auto" and num_workers(parser) > 1
    return options


def whole_number(smallest: int, largest: int | None = None) -> Any:
    """An argparse type: an int from ``smallest`` to ``largest``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
        if largest is not None and value > largest:
            raise argparse.ArgumentTypeError(f"must be at most {largest}, got {value}")
        return value

    return parse


def num_workers(parser: argparse.ArgumentParser) -> int:
    """The number of workers of the cluster in TF_CONFIG, or in a launcher's variables; 1 without a cluster."""
    try:
        membership = rx.cluster_resolver.choose_resolver().membership
    except rx.errors.ClusterError as error:
        parser.error(str(error))
    if "ps" in membership.spec.jobs:
        parser.error(
            "The cluster has parameter servers, which calls for ParameterServerStrategy. It is not in this version of "
            "replicax. Unset TF_CONFIG, or choose --strategy mirrored to train on the devices of this machine alone."
        )
    return membership.num_workers


def make_strategy(options: argparse.Namespace) -> rx.Strategy:
    if options.has_workers:
        if options.devices:
            rx.config.set_local_devices(options.devices)
        return rx.MultiWorkerMirroredStrategy()  # before anything uses JAX
    rx.config.set_local_devices(
        options.devices or VIRTUAL_CPU_DEVICES
    )  # no effect where there are accelerators
    devices = jax.local_devices()
    num_devices = options.devices or len(devices)
    if num_devices > len(devices):
        sys.exit(
            f"--devices is {num_devices}, and this machine has {len(devices)}: {', '.join(map(str, devices))}"
        )
    devices = devices[:num_devices]
    if options.strategy == "central_storage":
        return rx.CentralStorageStrategy(devices)
    if options.strategy == "mirrored" or num_devices > 1:
        return rx.MirroredStrategy(devices)
    return rx.OneDeviceStrategy(devices[0])


if __name__ == "__main__":
    main()
