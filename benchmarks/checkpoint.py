"""Measures what a checkpoint costs a loop: the pause, in the call and in the steps after it, and the time
until the checkpoint is on disk. The pause is compared with one copy of the state to the host, into fresh
memory and into used memory; the time on disk is compared with raw writes of the same size. Rounds alternate.

    python benchmarks/checkpoint.py --gigabytes 2 --rounds 5
"""

from __future__ import annotations

import argparse
import dataclasses
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
    """Large variables, and a step that overwrites all of them."""

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
    """Prints the figures of each round and their medians."""
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
    """Alternates: steps alone, both copies, a raw write, a save and the steps after it."""
    checkpoint = rx.Checkpoint(variables=training.variables)
    manager = rx.CheckpointManager(checkpoint, directory, max_to_keep=1)
    buffers = [np.ones(variable.shape, "f4") for variable in training.variables]
    print(f"\n{training.num_bytes / 2**30:.2f} GiB in {len(training.variables)} variables; seconds")
    print("  round    step   copy, fresh   copy, used    call   pause   on disk   raw write + fsync")
    seen = [one_round(training, manager, buffers, os.path.join(directory, "raw")) for _ in range(number)]
    for index, one in enumerate(seen):
        print(
            f"  {index + 1:5}   {one.step:5.2f}   {one.fresh:11.2f}   {one.used:10.2f}   {one.call:5.2f}   {one.pause:5.2f}"
            f"   {one.on_disk:7.2f}   {one.raw:17.2f}"
        )
    first, later = seen[0], seen[1:]
    print("\n  The pause is the call and what the steps after it take longer than a step alone.")
    print(f"  the first save, pause / one copy into fresh memory      {first.pause / first.fresh:5.2f}")
    if later:
        for name, of in (("fresh", lambda one: one.fresh), ("used ", lambda one: one.used)):
            ratio = statistics.median(one.pause / of(one) for one in later)
            print(f"  the later ones, pause / one copy into {name} memory      {ratio:5.2f}   (median)")
        after = statistics.median(one.pause - one.call for one in later)
        print(f"  of the later ones, seconds in the steps after the call  {after:5.2f}   (median)")
    print(
        f"  on disk / raw write                                     {statistics.median(one.on_disk / one.raw for one in seen):5.2f}   (median)"
    )
    manager.close()


@dataclasses.dataclass(frozen=True)
class Round:
    """Seconds of one round.

    Attributes:
      step: Of a step while nothing is saved.
      fresh, used: Of one copy of the state, into memory that is new, or was written to before.
      call: Of ``save``.
      pause: Of ``save``, and of what the steps after it take longer.
      on_disk, raw: Until it was written, and of as many bytes by themselves.
    """

    step: float
    fresh: float
    used: float
    call: float
    pause: float
    on_disk: float
    raw: float


def one_round(
    training: Training, manager: rx.CheckpointManager, buffers: list[np.ndarray], raw_path: str
) -> Round:
    """The first save takes fresh memory; later saves reuse it."""
    step = statistics.median(training.step() for _ in range(STEPS_AFTER))
    fresh, used = copy_into_fresh_memory(training), copy_again(training, buffers)
    raw = raw_write(buffers, raw_path)
    training.step()
    began = time.perf_counter()
    manager.save()
    call = time.perf_counter() - began
    pause = call + sum(training.step() - step for _ in range(STEPS_AFTER))
    manager.wait()
    return Round(step, fresh, used, call, pause, manager.statistics()["write_s"], raw)


def copy_into_fresh_memory(training: Training) -> float:
    """One copy of the state to the host, as ``np.array`` makes it."""
    began = time.perf_counter()
    copies = [np.array(variable.value) for variable in training.variables]
    took = time.perf_counter() - began
    del copies
    return took


def copy_again(training: Training, buffers: list[np.ndarray]) -> float:
    """One copy into used memory."""
    began = time.perf_counter()
    for buffer, variable in zip(buffers, training.variables, strict=True):
        np.copyto(buffer, np.asarray(variable.value))
    return time.perf_counter() - began


def raw_write(buffers: list[np.ndarray], path: str) -> float:
    """Writes one file of the same size and syncs it."""
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
