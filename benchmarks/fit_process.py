"""One contestant of ``fit.py``: a Keras model and where it trains, in a separate process.

Devices, Keras's backend and its distribution are chosen once per process, so a contestant cannot share one.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np

import peer_process

CPU_POOL_THREADS = "16"  # what replicax gives XLA where several virtual devices share the CPU
DENSE = {"MLP 64-256-256-10": (64, 256, 256, 10), "10 k parameters, 64-128-10": (64, 128, 10)}
CNN, DIGITS = "CNN 16x16x3", "digits CNN"
LARGE, NORMALIZED = "16 MB of gradients", "two batch normalisations"
SHAPES = {name: sizes[:1] for name, sizes in DENSE.items()}
SHAPES |= {CNN: (16, 16, 3), DIGITS: (8, 8, 1), LARGE: (64,), NORMALIZED: (64,)}
CLASSES = 10


def build(contestant: str, model: str, rows: int, batch: int, steps_per_execution: int, task: str) -> Any:
    """Answers the commands of the benchmark.

    Args:
      contestant: A key of ``SCOPES``.
      model: A key of ``SHAPES``.
      rows: The number of rows of the data.
      batch: Rows of a step, over all devices.
      steps_per_execution: For ``compile``.
      task: A key of ``TASKS``.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow" if contestant.startswith("TensorFlow") else "jax"
    with SCOPES[contestant]():
        compiled = compiled_model(model, steps_per_execution)
    run = TASKS[task](compiled, *data(model, rows), batch)

    def checked_run(count: int) -> Any:
        result = run(count)
        if os.environ["KERAS_BACKEND"] == "jax" and task != "attempt":
            devices = compiled.trainable_variables[0].value.sharding.device_set
            assert len(devices) == (1 if contestant == "Keras, one device" else 2), devices
        return result

    return checked_run


# --- where it trains ------------------------------------------------------------------------------------


def replicax_mirrored() -> contextlib.AbstractContextManager[Any]:
    """Two virtual devices."""
    import keras  # noqa: F401  before the scope is entered, so that replicax finds it

    import replicax as rx

    rx.config.set_local_devices(2)
    return rx.MirroredStrategy().scope()


def keras_one_device() -> contextlib.AbstractContextManager[Any]:
    """Plain Keras, in its environment without replicax."""
    os.environ.pop("PJRT_NPROC", None)
    return contextlib.nullcontext()


def keras_data_parallel() -> contextlib.AbstractContextManager[Any]:
    """Two virtual devices, in the environment that replicax sets."""
    os.environ["PJRT_NPROC"] = CPU_POOL_THREADS
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    import keras

    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    assert distribution.num_model_replicas == 2
    keras.distribution.set_distribution(distribution)
    return contextlib.nullcontext()


def tensorflow_mirrored() -> contextlib.AbstractContextManager[Any]:
    """Two logical devices."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()


SCOPES = {
    "replicax": replicax_mirrored,
    "Keras, one device": keras_one_device,
    "Keras DataParallel": keras_data_parallel,
    "TensorFlow Mirrored": tensorflow_mirrored,
    "TensorFlow, one device": contextlib.nullcontext,
}


# --- what is trained ------------------------------------------------------------------------------------


def compiled_model(name: str, steps_per_execution: int) -> Any:
    """The model, with Adam."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(SHAPES[name]), *_hidden(name), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, steps_per_execution=steps_per_execution)
    return model


def _hidden(name: str) -> list[Any]:
    from keras import layers

    if name == CNN:
        return [
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
        ]
    if name == DIGITS:  # as in examples/digits.py
        return [
            layers.Conv2D(24, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(48, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(64, activation="relu"),
        ]
    if name == NORMALIZED:
        return [
            layers.Dense(256, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(256, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
    units = (1960, 1960) if name == LARGE else DENSE[name][1:-1]
    return [layers.Dense(n, activation="relu") for n in units]


def data(name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(rows, *SHAPES[name])).astype(np.float32)
    return features, rng.integers(0, CLASSES, rows).astype(np.int32)


# --- what is measured -----------------------------------------------------------------------------------


def steps(model: Any, features: np.ndarray, labels: np.ndarray, batch: int) -> Any:
    """The seconds of n steps without the costs of an epoch: those of a second epoch that continues with the
    first one's iterator.

    Keras makes an iterator when the data restart, which takes hundreds of milliseconds for TensorFlow's. The
    data therefore last for three such epochs, and the third is left out.
    """
    ends, clock = _epoch_clock()

    def run(num_steps: int) -> float:
        assert len(features) == 3 * num_steps * batch
        ends.clear()
        options = {"steps_per_epoch": num_steps, "epochs": 2, "verbose": 0}
        model.fit(features, labels, batch_size=batch, callbacks=[clock], **options)
        return ends[1] - ends[0]

    return run


def epochs(model: Any, features: np.ndarray, labels: np.ndarray, batch: int) -> Any:
    """The seconds of n epochs, after one that is not counted."""
    ends, clock = _epoch_clock()

    def run(num_epochs: int) -> float:
        ends.clear()
        model.fit(features, labels, batch_size=batch, epochs=1 + num_epochs, verbose=0, callbacks=[clock])
        return ends[-1] - ends[0]

    return run


def first_step(model: Any, features: np.ndarray, labels: np.ndarray, batch: int) -> Any:
    """The seconds of ``fit`` with one step, the first of the process."""

    def run(steps: int) -> float:
        start = time.perf_counter()
        model.fit(features, labels, batch_size=batch, steps_per_epoch=steps, verbose=0)
        return time.perf_counter() - start

    return run


def memory(model: Any, features: np.ndarray, labels: np.ndarray, batch: int) -> Any:
    """The resident bytes of the process after n more epochs."""

    def run(num_epochs: int) -> int:
        model.fit(features, labels, batch_size=batch, epochs=num_epochs, verbose=0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    return run


def attempt(model: Any, features: np.ndarray, labels: np.ndarray, batch: int) -> Any:
    """The error that n epochs raise, or None."""

    def run(num_epochs: int) -> str | None:
        try:
            model.fit(features, labels, batch_size=batch, epochs=num_epochs, verbose=0)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return None

    return run


def _epoch_clock() -> tuple[list[float], Any]:
    """Returns the list of times when epochs ended, and the callback that fills it. (With a callback for
    batches, Keras would wait for each step.)"""
    import keras

    ends: list[float] = []
    return ends, keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
    )


TASKS = {"steps": steps, "epochs": epochs, "first step": first_step, "memory": memory, "attempt": attempt}


if __name__ == "__main__":
    peer_process.answer(build)
