"""A script for ``replicax launch --evaluator``: workers train, and the evaluator evaluates the chief's checkpoints.

Its argument is a folder. Each task prints its view as lines of JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import replicax as rx

NUM_EPOCHS = 3
PATIENCE_S = 120
FEATURES = np.random.default_rng(0).normal(size=(21, 3)).astype("f")
LABELS = FEATURES @ np.array([1.0, -2.0, 0.5], "f")


def say(**values):
    print(json.dumps(values), flush=True)


def weights_file(epoch):
    return Path(sys.argv[1]) / f"epoch{epoch}.npy"


def loss_of(batch):
    features, labels = batch
    return rx.nn.compute_average_loss((features @ weights - labels) ** 2)


def train_step(batch):
    with rx.GradientTape() as tape:
        loss = loss_of(batch)
    gradient = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
    weights.assign_sub(0.05 * gradient)
    return loss


def train():
    for epoch in range(NUM_EPOCHS):
        for batch in dataset:
            strategy.run(train_step, args=(batch,))
        if strategy.extended.should_checkpoint:
            new = Path(sys.argv[1]) / "new.npy"
            np.save(new, weights.numpy())
            os.replace(new, weights_file(epoch))
    say(trained=weights.numpy().tolist())


def evaluate():
    deadline = time.monotonic() + PATIENCE_S
    for epoch in range(NUM_EPOCHS):
        while not weights_file(epoch).exists():
            if time.monotonic() > deadline:
                sys.exit(f"the chief has not written {weights_file(epoch)}")
            time.sleep(0.02)
        weights.assign(np.load(weights_file(epoch)))
        totals, num_rows = 0.0, 0
        for batch in dataset:
            loss = strategy.reduce("SUM", strategy.run(loss_of, args=(batch,)), axis=None)
            size = len(strategy.gather(batch[1], axis=0))
            totals, num_rows = totals + float(loss) * size, num_rows + size
        say(epoch=epoch, loss=totals / num_rows, rows=num_rows)


strategy = rx.MultiWorkerMirroredStrategy()
task_type = strategy.cluster_resolver.task_type
say(
    replicas=strategy.num_replicas_in_sync,
    devices=len(strategy.extended.worker_devices),
    checkpoint=strategy.extended.should_checkpoint,
)
with strategy.scope():
    weights = rx.Variable(jnp.zeros(3))
dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays((FEATURES, LABELS)).batch(8))
evaluate() if task_type == "evaluator" else train()
