"""What a checkpoint costs a loop: the pause, seen in the call and in the steps after it, beside one copy of the state to the host;
and the time until it is on the disk, beside raw writes of as many bytes, in rounds that take turns.

    python benchmarks/checkpoint.py --gigabytes 2 --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import replicax as rx

rx.config.set_local_devices(2)

import jax
import numpy as np

STEPS_AFTER = 4


class Training:
    """Large variables and a step that overwrites all of them."""

    def __init__(self, gigabytes: float):
        num_variables = max(1, round(gigabytes * 4))
        rows = round(gigabytes * 2**30 / num_variables / 4 / 1024)
        self.strategy = rx.MirroredStrategy(["cpu:0"])
        with self.strategy.scope():
            self.variables = [
                rx.Variable(np.random.rand(rows, 1024).astype("f4")) for _ in range(num_variables)
            ]

        def step() -> None:
            for variable in self.variables:
                variable.assign(variable * 0.999 + 0.001)

        self._step = lambda: self.strategy.run(step)

    @property
    def num_bytes(self) -> int:
        return sum(4 * variable.size for variable in self.variables)

    def step(self) -> float:
        began = time.perf_counter()
        self._step()
        jax.block_until_ready([variable.value for variable in self.variables])
        return time.perf_counter() - began


def main() -> None:
    """Prints the figures of each round, and their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None)
    arguments = parser.parse_args()
    training = Training(arguments.gigabytes)
    for _ in range(3):
        training.step()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        rounds(training, directory, arguments.rounds)


def rounds(training: Training, directory: str, number: int) -> None:
    """Takes turns: steps alone, a copy, a raw write, a save and the steps after it."""
    checkpoint = rx.Checkpoint(variables=training.variables)
    manager = rx.CheckpointManager(checkpoint, directory, max_to_keep=1)
    buffers: list[np.ndarray] = []
    print(f"\n{training.num_bytes / 2**30:.2f} GiB in {len(training.variables)} variables; seconds")
    print("  round   copy   copy again   pause   pause / copy   on disk   raw write + fsync")
    ratios, disks = [], []
    for index in range(number):
        base = statistics.median(training.step() for _ in range(STEPS_AFTER))
        fresh = copy_into_fresh_memory(training)
        again = copy_again(training, buffers)
        raw = raw_write(buffers, os.path.join(directory, "raw"))
        training.step()
        began = time.perf_counter()
        manager.save()
        called = time.perf_counter() - began
        pause = called + sum(max(0.0, training.step() - base) for _ in range(STEPS_AFTER))
        manager.wait()
        on_disk = manager.statistics()["write_s"]
        copy = fresh if index == 0 else again  # into memory that had been used before, as the save's
        ratios.append(pause / copy)
        disks.append(on_disk / raw)
        print(
            f"  {index + 1:5}  {fresh:5.2f}   {again:10.2f}   {pause:5.2f}   {pause / copy:12.2f}   {on_disk:7.2f}   {raw:17.2f}"
        )
    print(
        f"  median pause / copy {statistics.median(ratios):.2f}, on disk / raw {statistics.median(disks):.2f}"
    )
    manager.close()


def copy_into_fresh_memory(training: Training) -> float:
    """One copy of the state to the host, as ``np.array`` makes it."""
    began = time.perf_counter()
    copies = [np.array(variable.value) for variable in training.variables]
    took = time.perf_counter() - began
    del copies
    return took


def copy_again(training: Training, buffers: list[np.ndarray]) -> float:
    """One copy into memory that has been used before."""
    if not buffers:
        buffers.extend(np.ones(variable.shape, "f4") for variable in training.variables)
    began = time.perf_counter()
    for buffer, variable in zip(buffers, training.variables, strict=True):
        np.copyto(buffer, np.asarray(variable.value))
    return time.perf_counter() - began


def raw_write(buffers: list[np.ndarray], path: str) -> float:
    """One file of as many bytes, synced."""
    began = time.perf_counter()
    with open(path, "wb") as file:
        for buffer in buffers:
            file.write(memoryview(buffer).cast("B"))
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    os.remove(path)
    return took


if __name__ == "__main__":
    main()
