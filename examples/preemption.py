"""A training that survives the loss of its machines: at SIGTERM, all workers save after the same step.

    replicax launch --workers 2 --devices-per-worker 1 --checkpoint-dir /tmp/survives examples/preemption.py

`replicax launch` starts it again, and it resumes. With --preempt-at 25,40 a worker sends itself the signal
twice, as a cloud would. The final weights are bit-identical to those of an undisturbed run.
"""

import argparse
import os
import signal
import zlib

import jax.numpy as jnp
import numpy as np

import replicax as rx

NUM_STEPS, BATCH_SIZE = 60, 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--preempt-at", default="", help="the steps before which worker 1 tells itself to end"
    )
    told_at = [int(step) for step in filter(None, parser.parse_args().preempt_at.split(","))]

    strategy = rx.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    rng = np.random.default_rng(0)
    features = rng.standard_normal((BATCH_SIZE * NUM_STEPS, 8)).astype(np.float32)
    labels = features @ rng.standard_normal(8).astype(np.float32)
    dataset = rx.data.from_arrays((features, labels)).batch(BATCH_SIZE)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        weights = rx.Variable(jnp.zeros(8))

    # The checkpoint has the weights and the position in the data.
    checkpoint = rx.Checkpoint(weights=weights, iterator=iterator)
    manager = rx.CheckpointManager(checkpoint, os.environ["REPLICAX_CHECKPOINT_DIR"], max_to_keep=2)
    # The handler restores the newest checkpoint, if there is one.
    handler = rx.experimental.PreemptionCheckpointHandler(resolver, manager)
    print(f"begins at step {handler.total_run_calls}")

    def update(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((x @ weights - y) ** 2)
        gradient = tape.gradient(loss, weights)
        gradient = rx.get_replica_context().all_reduce("SUM", gradient)
        weights.assign_sub(0.05 * gradient)
        return loss

    def train_step(batch):
        return strategy.reduce("SUM", strategy.run(update, args=(batch,)), axis=None)

    first = handler.total_run_calls
    for step in range(first, NUM_STEPS):
        if resolver.task_id == 1 and step in told_at and step > first:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = handler.run(train_step, next(iterator))
    handler.close()
    print(f"loss {float(loss):.3g}, weights {zlib.crc32(np.asarray(weights.numpy()).tobytes()):08x}")


if __name__ == "__main__":
    main()
