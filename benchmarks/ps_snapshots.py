"""Compares the bytes and CPU time of a snapshot of a table after some of its rows have changed with those of
a full snapshot.

``parameter_server.py`` runs it; alone: ``python benchmarks/ps_snapshots.py --rounds 3``.
"""

from __future__ import annotations

import argparse
import contextlib
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

import ps_sizes
import replicax as rx
import task_costs

STEPS = (0, 1, 10, 100)
BAR = 0.1  # of the CPU time of a whole one, after one step


def main(num_rounds: int) -> None:
    """Prints the medians of the rounds; each round writes one full snapshot."""
    rows, columns = ps_sizes.TABLE
    folder = tempfile.TemporaryDirectory()
    arguments = ["--snapshot-dir", folder.name, "--snapshot-interval", "3600"]
    with (
        folder,
        rx.testing.server_cluster(workers=1, ps=1, server_arguments=arguments) as cluster,
        rx.ParameterServerStrategy(cluster.resolver) as strategy,
        rx.coordinator.ClusterCoordinator(strategy) as coordinator,
    ):
        run, rewrite = _table(strategy, coordinator, rows, columns)
        take = _taking(strategy, cluster.tasks["ps", 0].pid)
        run(1)
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(num_rounds):
            rewrite()
            found.setdefault("whole", []).append(take())
            for count in STEPS:
                run(count)
                found.setdefault(f"{count} steps later", []).append(take())
    _report(found, f"{rows} × {columns}, Adagrad, steps of {ps_sizes.NUM_IDS} ids")


def _table(
    strategy: Any, coordinator: Any, rows: int, columns: int
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Returns a function that runs steps, and one that changes all rows."""
    with strategy.scope():
        table = keras.layers.Embedding(rows, columns)
        table.build()
        optimizer = keras.optimizers.Adagrad(0.1)
        optimizer.build(table.trainable_variables)

    def step(ids: Any) -> None:
        with rx.GradientTape() as tape:
            loss = jnp.mean(jnp.square(table(ids)))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, table.trainable_variables), table.trainable_variables)
        )

    chance = np.random.default_rng(0)

    def run(count: int) -> None:
        for _ in range(count):
            ids = chance.integers(0, rows, ps_sizes.NUM_IDS, np.int32)
            coordinator.schedule(step, args=(ids,))
        coordinator.join()

    def rewrite() -> None:
        for variable in (table.embeddings, *optimizer.variables):
            if variable.shape == table.embeddings.shape:
                coordinator.schedule(lambda v=variable: v.assign(v.value * jnp.float32(1.0)))
        coordinator.join()

    return run, rewrite


def _taking(strategy: Any, pid: int) -> Callable[[], tuple[float, float]]:
    """Returns a function that makes the ps write a snapshot, and gives its bytes and CPU seconds."""
    session, epochs = strategy.session, iter(range(1, 1_000_000))

    def take() -> tuple[float, float]:
        header = {"incarnation": session.incarnation, "epoch": next(epochs)}
        before = task_costs.cpu_s({"ps": pid})
        with contextlib.closing(session.connect("ps", 0)) as client:
            told = client.ask("snapshot", header, 600.0)
        return told["bytes"], task_costs.since(before, task_costs.cpu_s({"ps": pid}))["ps"]

    return take


def _report(found: dict[str, list[tuple[float, float]]], title: str) -> None:
    print(f"\nSnapshots of a table {title}: bytes and CPU time of the ps, medians")
    medians = {what: [statistics.median(each) for each in zip(*of)] for what, of in found.items()}
    whole_bytes, whole_cpu = medians["whole"]
    for what, (num_bytes, cpu) in medians.items():
        spread = [1e3 * cpu for _, cpu in found[what]]
        print(
            f"  {what:16} {num_bytes / 1e6:8.2f} MB ({num_bytes / whole_bytes:6.1%})   CPU {1e3 * cpu:5.0f} ms"
            f" ({cpu / whole_cpu:6.1%}), rounds {min(spread):.0f}–{max(spread):.0f}"
        )
    ratio = medians["1 steps later"][1] / whole_cpu
    print(
        f"  after one step {ratio:.2f} × the CPU time (bar: {BAR:g}): {'met' if ratio <= BAR else 'MISSED'}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args().rounds)
