"""Measures the first training step of a started process, with and without the compiled programs of an earlier start.

    python benchmarks/first_step.py --rounds 5

CPU seconds say more than seconds if the machine is busy. The model has as many different layers as ``--layers``, so that
XLA has much to compile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Prints medians and spread of rounds in alternating order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(json.dumps(first_step(options.layers)))
        return
    measured: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        start(options.layers, folder)  # compiles
        size = sum(path.stat().st_size for path in Path(folder).rglob("*-cache"))
        for number in range(options.rounds):
            ways = ("without", "with") if number % 2 else ("with", "without")
            for way in ways:
                measured[way].append(start(options.layers, folder if way == "with" else "off"))
    print(f"First step, {options.layers} layers, {size / 1e6:.1f} MB of compiled programs")
    for way, each in measured.items():
        told = ", ".join(f"{name} {_spread([one[name] for one in each])}" for name in each[0])
        print(f"  {way + ' kept programs':24}{told}")


def start(layers: int, cache: str) -> dict[str, float]:
    """Starts a process and returns what its first step took."""
    command = [sys.executable, __file__, "--task", "--layers", str(layers)]
    environment = {**os.environ, "REPLICAX_CACHE_DIR": cache, "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def first_step(layers: int) -> dict[str, float]:
    """Runs one step and returns its seconds and CPU seconds, from tracing to the loss on the host."""
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    strategy = rx.MirroredStrategy()
    rng = np.random.default_rng(0)
    widths = [32 + number for number in range(layers)]
    with strategy.scope():
        weights = [
            rx.Variable(rng.normal(size=shape).astype(np.float32) / 8)
            for shape in zip([8, *widths], [*widths, 1], strict=True)
        ]

    def step(x, y):
        with rx.GradientTape() as tape:
            for weight in weights:
                x = jnp.tanh(x @ weight.value)
            loss = rx.nn.compute_average_loss((x - y)[:, 0] ** 2)
        gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    batches = rx.data.from_arrays((np.ones((32, 8), np.float32), np.ones((32, 1), np.float32))).batch(32)
    batch = next(iter(strategy.experimental_distribute_dataset(batches)))
    began, cpu = time.perf_counter(), time.process_time()
    float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None))
    return {"seconds": time.perf_counter() - began, "CPU seconds": time.process_time() - cpu}


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}–{max(values):.2f}]"


if __name__ == "__main__":
    main()
