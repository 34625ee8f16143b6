"""Measures checkpoints of state that is divided over processes: what each process copies, writes and reads, and how
long training waits. Orbax, used by hand on the same arrays, stands beside it where it is installed.

    python benchmarks/checkpoint_processes.py --megabytes 2048 --processes 1 2 4
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import replicax as rx

DIRECTORY, MEGABYTES, ROUNDS = "CHECKPOINT_DIRECTORY", "CHECKPOINT_MEGABYTES", "CHECKPOINT_ROUNDS"
NUM_VARIABLES = 8


# --- a worker ---------------------------------------------------------------------------------------------


def memory(name: str) -> float:
    """Returns a line of ``/proc/self/status``, in MB."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def forget_peak() -> None:
    """Gives unused memory back, and makes the peak begin at what is used now."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def io(name: str) -> float:
    """Returns a counter of ``/proc/self/io``, in MB."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:")) / 1e6


class Training:
    """Divided variables, and a step that overwrites all of them."""

    def __init__(self) -> None:
        self.strategy = rx.MultiWorkerMirroredStrategy(shard_state="all")
        rows = int(float(os.environ[MEGABYTES]) * 1e6 / NUM_VARIABLES / 4 / 1024) // 8 * 8
        import numpy as np

        self.variables = []
        for _ in range(NUM_VARIABLES):
            with self.strategy.scope():
                values = np.random.default_rng(0).random(
                    (rows, 1024), np.float32
                )  # orbax compresses constants
                self.variables.append(rx.Variable(values))
            self._step_of(self.variables[-1:])()  # divides it, before the next one is made
        self.step = self._timed(self._step_of(self.variables))

    def _step_of(self, variables: list[Any]) -> Callable[[], Any]:
        def step() -> Any:
            for variable in variables:
                variable.assign(variable.value * 0.999 + 0.001)
            # As in training, no process begins a save long before the others.
            context = rx.get_replica_context()
            return context.all_reduce("SUM", context.replica_id_in_sync_group)

        return lambda: self.strategy.run(step)

    def _timed(self, step: Callable[[], Any]) -> Callable[[], float]:
        import jax

        def timed() -> float:
            began = time.perf_counter()
            jax.block_until_ready([step(), self.arrays])
            return time.perf_counter() - began

        return timed

    @property
    def arrays(self) -> list[Any]:
        return [variable._value for variable in self.variables]

    @property
    def own_mb(self) -> float:
        """The size of what this process's devices hold."""
        return sum(shard.data.nbytes for array in self.arrays for shard in array.addressable_shards) / 1e6


class Replicax:
    def __init__(self, training: Training, directory: str):
        self._manager = rx.CheckpointManager(
            rx.Checkpoint(variables=training.variables), directory, max_to_keep=1
        )
        self.save, self.wait = self._manager.save, self._manager.wait


class Orbax:
    def __init__(self, training: Training, directory: str):
        import orbax.checkpoint as ocp

        self._training, self._directory, self._number = training, directory, 0
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self.wait = self._checkpointer.wait_until_finished

    def save(self) -> None:
        self._number += 1
        state = {f"v{i}": array for i, array in enumerate(self._training.arrays)}
        self._checkpointer.save(os.path.join(self._directory, str(self._number)), state)


def saves(training: Training, contestant: Any) -> dict[str, float]:
    """Saves once without training beside it, for memory and bytes; then several times with steps, for times."""
    own = training.own_mb
    forget_peak()
    before, written = memory("VmRSS"), io("write_bytes")
    contestant.save()
    contestant.wait()
    found = {
        "own": own,
        "extra": (memory("VmHWM") - before) / own,
        "written": (io("write_bytes") - written) / own,
    }
    calls, pauses, on_disk = [], [], []
    for _ in range(int(os.environ[ROUNDS])):
        alone = statistics.median(training.step() for _ in range(4))
        began = time.perf_counter()
        contestant.save()
        calls.append(time.perf_counter() - began)
        pauses.append(calls[-1] + sum(training.step() - alone for _ in range(3)))
        contestant.wait()
        on_disk.append(time.perf_counter() - began)
    gigabytes = own / 1e3
    for name, values in (("call", calls), ("pause", pauses), ("on disk", on_disk)):
        found[name] = statistics.median(values) / gigabytes
        found[f"{name} least"], found[f"{name} most"] = min(values) / gigabytes, max(values) / gigabytes
    return found


def work(kind: str) -> None:
    """Runs in each process: saves, or restores what others have saved."""
    from replicax.testing import report

    directory = os.environ[DIRECTORY]
    training = Training()
    training.step()
    if kind == "restore":
        manager = rx.CheckpointManager(rx.Checkpoint(variables=training.variables), directory)
        forget_peak()
        before, read = memory("VmRSS"), io("rchar")
        began = time.perf_counter()
        manager.restore_or_initialize()
        report(
            seconds=time.perf_counter() - began,
            read=(io("rchar") - read) / training.own_mb,
            extra=(memory("VmHWM") - before) / training.own_mb,
        )
        return
    contestant = {"replicax": Replicax, "orbax": Orbax}[kind](
        training, os.path.join(directory, kind) if kind == "orbax" else directory
    )
    report(**saves(training, contestant))


# --- the parent -------------------------------------------------------------------------------------------


def run(kind: str, num_processes: int, directory: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the reports of all processes."""
    environment = {
        DIRECTORY: directory,
        MEGABYTES: str(arguments.megabytes),
        ROUNDS: str(arguments.rounds),
    }
    with rx.testing.LocalCluster(
        num_workers=num_processes, environment=environment, timeout_s=1200
    ) as cluster:
        cluster.start(os.path.abspath(__file__), args=["--work", kind])
        results = cluster.wait()
    return [result.reports[0] for result in results.values()]


def main() -> None:
    """Prints a line for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=2048)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return
    kinds = ["replicax"]
    try:
        import orbax.checkpoint  # noqa: F401

        kinds.append("orbax")
    except ImportError:
        print("orbax is not installed, so it does not stand beside.")
    print(
        f"{arguments.megabytes:.0f} MB of divided state; of the processes the worst; seconds per GB of own part"
    )
    print(
        "  processes              extra / own part   written / own part      call   pause (least-most)   on disk"
    )
    for num_processes in arguments.processes:
        for kind in kinds:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                show_saves(num_processes, kind, run(kind, num_processes, directory, arguments))
                if kind == "replicax":
                    for others in {max(1, num_processes // 2), 2 * num_processes}:
                        if others <= 4 and others != num_processes:
                            show_restore(others, run("restore", others, directory, arguments))


def show_saves(num_processes: int, kind: str, reports: list[dict[str, Any]]) -> None:
    worst = {name: max(one[name] for one in reports) for name in reports[0]}
    print(
        f"  {num_processes:9}   {kind:8}   {worst['extra']:16.2f}   {worst['written']:18.3f}   {worst['call']:7.2f}   "
        f"{worst['pause']:5.2f} ({worst['pause least']:.2f}-{worst['pause most']:.2f})   {worst['on disk']:12.2f}",
        flush=True,
    )


def show_restore(num_processes: int, reports: list[dict[str, Any]]) -> None:
    worst = {name: max(one[name] for one in reports) for name in reports[0]}
    print(
        f"            restored by {num_processes}: read / needed {worst['read']:.3f}, extra / own part "
        f"{worst['extra']:.2f}, {worst['seconds']:.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
