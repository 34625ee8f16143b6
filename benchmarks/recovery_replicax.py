"""One worker of replicax in ``recovery.py``, under ``replicax launch``: ``recovery_replicax.py loop``, ``fit``, or ``bare_fit``."""

import functools
import json
import os
import sys

import recovery_marks

mark = functools.partial(
    recovery_marks.mark,
    rank=json.loads(os.environ["TF_CONFIG"])["task"]["index"],
    attempt=int(os.environ["REPLICAX_RESTART_COUNT"]),
)
mark("python")
if sys.argv[1] == "bare_fit":
    sys.modules.update(dict.fromkeys(recovery_marks.NOT_NEEDED))  # as if they were not installed
if sys.argv[1] != "loop":
    import keras
import jax.numpy as jnp
import numpy as np

import replicax as rx

mark("imports")
FOLDER = os.environ[recovery_marks.FOLDER]
rng = np.random.default_rng(0)
FEATURES = rng.standard_normal((100 * recovery_marks.ROWS, recovery_marks.SIZES[0])).astype("float32")
LABELS = FEATURES[:, : recovery_marks.SIZES[-1]]


def loop(strategy):
    """Gradients, momentum, a loss."""
    dataset = rx.data.from_arrays((FEATURES, LABELS)).repeat().batch(recovery_marks.ROWS)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        step = rx.Variable(0)
        weights = [
            rx.Variable((rng.standard_normal(shape) / np.sqrt(shape[0])).astype("float32"))
            for shape in zip(recovery_marks.SIZES, recovery_marks.SIZES[1:], strict=False)
        ]
        velocities = [rx.Variable(jnp.zeros(weight.shape)) for weight in weights]
    checkpoint = rx.Checkpoint(step=step, weights=weights, velocities=velocities, iterator=iterator)
    manager = rx.CheckpointManager(checkpoint, FOLDER, max_to_keep=2)
    manager.restore_or_initialize()
    mark("restore")

    def update(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            hidden = x
            for weight in weights[:-1]:
                hidden = jnp.maximum(hidden @ weight.value, 0)
            loss = rx.nn.compute_average_loss(jnp.mean((hidden @ weights[-1].value - y) ** 2, axis=-1))
        gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
            velocity.assign(0.9 * velocity - 0.01 * gradient)
            weight.assign_add(velocity.value)
        step.assign_add(1)
        return loss

    for number in range(10**9):
        float(strategy.reduce("SUM", strategy.run(update, args=(next(iterator),)), axis=None))
        after(number)
        if number % recovery_marks.SAVE_EVERY == 0:
            manager.save()


def fit(strategy):
    """Keras's ``fit``, with the callback."""

    class Marks(keras.callbacks.Callback):
        number = 0

        def on_epoch_begin(self, epoch, logs=None):
            if not self.number:
                mark("restore")

        def on_train_batch_end(self, batch, logs=None):
            after(self.number)
            self.number += 1

    with strategy.scope():
        model = keras.Sequential(
            [
                *(keras.layers.Dense(size, "relu", use_bias=False) for size in recovery_marks.SIZES[1:-1]),
                keras.layers.Dense(recovery_marks.SIZES[-1], use_bias=False),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    saving = rx.keras.callbacks.CheckpointCallback(FOLDER, save_freq=recovery_marks.SAVE_EVERY, max_to_keep=2)
    model.fit(
        FEATURES,
        LABELS,
        batch_size=recovery_marks.ROWS,
        epochs=10**6,
        verbose=0,
        callbacks=[Marks(), saving],
    )


def after(number):
    if number in (0, recovery_marks.READY_AT):
        mark("first step" if not number else recovery_marks.READY)


if __name__ == "__main__":
    strategy = rx.MultiWorkerMirroredStrategy()
    mark("join")
    {"loop": loop, "fit": fit, "bare_fit": fit}[sys.argv[1]](strategy)
