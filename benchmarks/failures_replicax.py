"""One worker of replicax in ``failures.py``, under ``replicax launch``: ``survivors``, ``save_on_failure`` or ``restarts``."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

import failures_training as training
import replicax as rx

NEVER = 10**9


def main(mode):
    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=mode == "survivors")
    progress = training.Progress(strategy.cluster_resolver.task_id)
    images, labels = training.digits(training.folder())
    dataset = rx.data.from_arrays((images, labels.astype(np.int32))).repeat().batch(training.ROWS)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        step = rx.Variable(0)
        weights = [rx.Variable(value) for value in training.initial_weights(os.environ[training.MODEL])]
    number = 0
    manager = rx.CheckpointManager(
        rx.Checkpoint(step=step, weights=weights, iterator=iterator),
        os.environ["REPLICAX_CHECKPOINT_DIR"],
        max_to_keep=2,
        step_counter=lambda: number,
        checkpoint_interval=NEVER if mode == "save_on_failure" else training.save_every(),
        save_on_failure=mode == "save_on_failure",
    )
    manager.restore_or_initialize()
    number = int(step)

    def update(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            for kernel, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
                x = jax.nn.relu(x @ kernel.value + bias.value)
            logits = x @ weights[-2].value + weights[-1].value
            losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)[:, 0]
            loss = rx.nn.compute_average_loss(losses)
        gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(training.LEARNING_RATE * gradient)
        step.assign_add(1)

    while True:
        strategy.run(update, args=(next(iterator),))
        number += 1
        if number % training.save_every() == 0 and rx.is_chief():
            progress.write_weights(number, [np.asarray(weight.value) for weight in weights])
        manager.save()
        progress.report(number, number * training.ROWS)


if __name__ == "__main__":
    main(sys.argv[1])
