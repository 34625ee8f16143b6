"""Training on parameter servers that survives failures: the counts at the end are exact, no matter what is
killed.

    replicax launch --workers 2 --ps 2 --max-restarts 3 --checkpoint-dir /tmp/survives examples/parameter_server_survives.py

A worker that dies is restarted, and its function runs elsewhere: each function counts once. When the
coordinator or a parameter server dies, `replicax launch` restarts all tasks, and the program resumes from its
last checkpoint.
"""

import argparse
import os

import jax.numpy as jnp
import numpy as np

import replicax as rx

PER_ROUND = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    num_rounds = parser.parse_args().rounds

    strategy = rx.ParameterServerStrategy()
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = rx.Variable(jnp.zeros(8), name="weights")
        steps = rx.Variable(0, name="steps")  # each function adds 1
        rounds = rx.Variable(0, name="rounds")

    # The saved variables are on the servers. All of it is of one moment: nothing runs between `join` and the
    # next `schedule`.
    checkpoint = rx.Checkpoint(weights=weights, steps=steps, rounds=rounds)
    manager = rx.CheckpointManager(checkpoint, os.environ["REPLICAX_CHECKPOINT_DIR"], max_to_keep=2)
    manager.restore_or_initialize()
    print(f"begins with round {int(rounds) + 1}, after {int(steps)} steps")

    def dataset_fn():
        random = np.random.default_rng()
        while True:
            x = random.standard_normal((32, 8)).astype(np.float32)
            yield x, x.sum(axis=1)

    @rx.function
    def step(iterator):
        x, y = next(iterator)
        with rx.GradientTape() as tape:
            loss = jnp.mean((x @ weights - y) ** 2)
        weights.assign_sub(0.05 * tape.gradient(loss, weights))
        steps.assign_add(1)
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    while int(rounds) < num_rounds:
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(PER_ROUND)]
        coordinator.join()
        rounds.assign_add(1)
        manager.save()
        print(f"round {int(rounds)}, loss {float(losses[-1].fetch()):.3g}")
    manager.close()
    print(f"{int(steps)} steps in {int(rounds)} rounds")
    coordinator.close()


if __name__ == "__main__":
    main()
