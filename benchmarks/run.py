"""Runs all benchmarks, each contestant beside the others in one run: ``make bench``.

These are not tests: figures depend on the machine, and only ratios of neighbouring lines are meaningful.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(Path(__file__).parent))

import replicax as rx

rx.config.set_local_devices(2)

import jax
import keras

import columns
import compiling
import continuous_checkpoints
import feeding
import fit
import memory
import models
import multi_worker
import nnx_step
import overhead
import parameter_server
import peers
import rounds
import survivors
import uneven

MLP = (64, 256, 256, 10)
SMALL = (64, 128, 10)  # 9,610 parameters


def step_time(arguments: argparse.Namespace) -> None:
    """Compares ``strategy.run`` with the hand-written step."""
    strategy = rx.MirroredStrategy()
    for title, sizes in (("MLP 64-256-256-10", MLP), ("10 k parameters, 64-128-10", SMALL)):
        contestants = {
            "by hand": models.by_hand(strategy, sizes, 128),
            "strategy.run": models.through_run(strategy, sizes, 128),
        }
        timings = rounds.compare(contestants, rounds=arguments.rounds)
        rounds.report(f"One step, batch 128, Adam, 2 virtual devices: {title}", timings, "by hand")


SECTIONS = {
    "step": step_time,
    "overhead": lambda arguments: overhead.main(arguments.rounds),
    "nnx": lambda arguments: nnx_step.main(arguments.rounds),
    "uneven": lambda arguments: uneven.main(arguments.rounds),
    "feeding": lambda arguments: feeding.main(arguments.rounds, arguments.tensorflow, arguments.torch),
    "columns": lambda arguments: columns.main(arguments.rounds),
    "fit": lambda arguments: fit.main(arguments.rounds, arguments.tensorflow),
    "compiling": lambda arguments: compiling.main(min(arguments.rounds, 5)),
    "memory": lambda arguments: memory.main(),
    "multi_worker": lambda arguments: multi_worker.main(
        arguments.rounds, arguments.tensorflow, arguments.torch
    ),
    "survivors": lambda arguments: survivors.main(arguments.rounds),
    "parameter_server": lambda arguments: parameter_server.main(arguments.rounds, arguments.tensorflow),
    "continuous": lambda arguments: continuous_checkpoints.main(min(arguments.rounds, 5)),
    "peers": lambda arguments: peers.main(arguments.rounds, arguments.tensorflow),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default 15)")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="a Python that has TensorFlow 2.21")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch 2.13")
    arguments = parser.parse_args()
    print(
        f"jax {jax.__version__}, keras {keras.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, devices {[str(d) for d in jax.devices()]}"
    )
    for name, section in SECTIONS.items():
        if arguments.only in (None, name):
            section(arguments)


if __name__ == "__main__":
    main()
