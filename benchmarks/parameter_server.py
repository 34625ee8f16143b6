"""Compares two workers, a parameter server and a coordinator on one machine, each a process, with
TensorFlow's.

``make bench`` runs it with the others; alone, in 10 minutes, with nothing else running on the machine:

    python benchmarks/parameter_server.py --rounds 7 --tensorflow PYTHON

``--beside PYTHON`` adds another version of replicax: a Python that has it. The processes share the cores of
the machine. The CPU time that an operation took in each process is printed beside its time. If other programs
run too, compare the CPU time. The bars use the medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

sys.path.insert(0, str(Path(__file__).parent))

import ps_sizes
import rounds
import workers
from peer_process import PeerProcess

OURS, WITH_KERAS, TENSORFLOW, SOCKET = "replicax", "replicax, Keras", "TensorFlow", "raw socket"
REPLICATED = "replicax, replication=2"
OTHER, WITH_TLS, OTHER_WITH_TLS = "other replicax", "replicax, TLS", "other replicax, TLS"
NUM_CLOSURES, NUM_FETCHES, NUM_STEPS, NUM_TRANSFERS = 2000, 100, 200, 5
LARGE_BYTES = 4 * ps_sizes.LARGE
MEMORY = {"tables": 4, "rows": 1_000_000, "columns": 32}  # 512 MB
MEMORY_BAR, NUM_SLOTS = 1.2, 2
MIB = 2**20
Pythons = Mapping[str, str]
"""By the name of a contestant, the Python that has it."""


@final
@dataclass(eq=False)
class Contestant:
    """The coordinator of one cluster, in a separate process.

    Attributes:
      cpu: By process, seconds of CPU time for one operation, by round; the round that warms up is the first.
      ways: By what is timed where that is several things, seconds for one operation, by round.
    """

    process: PeerProcess
    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ways: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self, count: int) -> float:
        """Does ``count`` operations. Returns the seconds that they took."""
        found = self.process.run(count)
        seconds = found.get("seconds", found)
        for name, cpu_s in found.get("cpu", {}).items():
            self.cpu[name].append(cpu_s)
        if not isinstance(seconds, dict):
            return seconds
        for way, of_way in seconds.items():
            self.ways[way].append(of_way / count)
        return sum(seconds.values())


def closures(num_rounds: int, pythons: Pythons) -> None:
    """The bars: 4 times as many functions as TensorFlow, and a fourth of its time to a result."""
    title = f"Empty closures, {NUM_CLOSURES} scheduled, then joined"
    timings = _compare(title, {"task": "closures"}, num_rounds, NUM_CLOSURES, pythons)
    _print_bar("closures/s", timings, OURS, 4)
    _print_bar("closures/s", timings, OURS, 1, OTHER)
    title = "Empty closures one by one, from schedule to the result"
    timings = _compare(title, {"task": "fetch"}, num_rounds, NUM_FETCHES, pythons)
    _print_bar("schedule-to-fetch", timings, OURS, 4)
    _print_bar("schedule-to-fetch", timings, OURS, 1, OTHER)


def mlp(num_rounds: int, pythons: Pythons) -> None:
    """The bar: twice as many steps as TensorFlow."""
    sizes = "-".join(map(str, ps_sizes.MLP))
    title = f"Steps of an MLP {sizes}, batch {ps_sizes.ROWS}, SGD; TensorFlow with raw variables"
    more = {WITH_KERAS: {"task": "mlp_keras"}}
    timings = _compare(title, {"task": "mlp"}, num_rounds, NUM_STEPS, pythons, more)
    _print_bar("steps/s", timings, OURS, 2)
    _print_bar("steps/s", timings, OURS, 1, OTHER)
    _print_bar("steps/s", timings, WITH_KERAS, 2)


def transfer(num_rounds: int, pythons: Pythons) -> None:
    """The bars: 0.4 of a socket's rate, and TensorFlow's rate."""
    with contextlib.ExitStack() as closing:
        task = {"task": "transfer"}
        contestants = _started(task, pythons, closing, {WITH_TLS: task | {"tls": True}})
        if OTHER in pythons:
            other = PeerProcess(pythons[OTHER], "ps_replicax.py", task | {"tls": True})
            closing.callback(other.close)
            contestants[OTHER_WITH_TLS] = Contestant(other)
        socket = PeerProcess(sys.executable, "raw_socket.py", {"num_bytes": LARGE_BYTES})
        closing.callback(socket.close)
        contestants[SOCKET] = Contestant(socket)
        runs = {name: each.run for name, each in contestants.items()}
        rounds.compare(runs, rounds=num_rounds, steps=NUM_TRANSFERS, warm_up=2)
    for way in contestants[OURS].ways:
        timings = {
            name: rounds.Timing(each.ways[way.split()[-1] if name == SOCKET else way][1:])
            for name, each in contestants.items()
        }
        title = f"{LARGE_BYTES // MIB} MB, {way}, µs; {_rates(timings)}"
        rounds.report(title, timings, OURS, unit="µs")
        _print_bar("bytes/s", timings, OURS, 0.4, SOCKET)
        _print_bar("bytes/s", timings, OURS, 1)
        _print_bar("bytes/s", timings, OURS, 1, OTHER)
        _print_bar("bytes/s", timings, WITH_TLS, 1, OTHER_WITH_TLS)


def _rates(timings: Mapping[str, rounds.Timing]) -> str:
    return ", ".join(f"{name} {LARGE_BYTES / t.median / 1e9:.2f} GB/s" for name, t in timings.items())


def embedding(num_rounds: int, pythons: Pythons) -> None:
    """The bars: 1.8 times as many rows as TensorFlow with SGD, and twice as many with Adagrad."""
    rows, columns = ps_sizes.TABLE
    for optimizer, bar in (("SGD", 1.8), ("Adagrad", 2.0)):
        title = f"{ps_sizes.NUM_IDS} ids of a table {rows} × {columns}, pulled and updated, {optimizer}"
        task = {"task": "embedding", "optimizer": optimizer}
        timings = _compare(title, task, num_rounds, NUM_STEPS, pythons)
        rates = {name: ps_sizes.NUM_IDS / timing.median / 1e6 for name, timing in timings.items()}
        print("  " + ", ".join(f"{name}: {rate:.2f} M rows/s" for name, rate in rates.items()))
        _print_bar("rows/s", timings, OURS, bar)
        _print_bar("rows/s", timings, OURS, 1, OTHER)


def replication(num_rounds: int, pythons: Pythons) -> None:
    """Measures the cost of a second copy: the same two servers with one copy and with two. There is no bar."""
    del pythons
    num_bytes = sum(4 * a * b + 4 * b for a, b in itertools.pairwise(ps_sizes.MLP))
    title = f"An MLP's gradients, {num_bytes // 1000} KB, pushed to Adam on two servers, and the new values pulled"
    more = {REPLICATED: {"task": "push", "replication": 2}}
    timings = _compare(title, {"task": "push", "replication": 1}, num_rounds, NUM_STEPS, {}, more)
    pairs = [b / a for a, b in zip(timings[OURS].seconds, timings[REPLICATED].seconds, strict=True)]
    print(
        f"  replication=2: {timings[REPLICATED].median / timings[OURS].median:.2f} × the time by medians, rounds "
        f"{min(pairs):.2f}–{max(pairs):.2f}"
    )


def memory(num_rounds: int, pythons: Pythons) -> None:
    """Memory of the ps beyond that without variables. The bar: at all times at most 1.2 times the bytes of
    values and bindings."""
    del num_rounds  # it is the same each time
    value_mib = 4 * MEMORY["tables"] * MEMORY["rows"] * MEMORY["columns"] / MIB
    held = value_mib * (1 + NUM_SLOTS)
    print(f"\nMemory of the ps, × the {held:.0f} MiB of {value_mib:.0f} MiB of tables and Adam's bindings")
    with contextlib.ExitStack() as closing:
        for name, each in _started({"task": "memory", **MEMORY}, pythons, closing).items():
            found = each.process.run(20)
            empty = found["empty"]["settled"]
            over = {
                phase: {what: (mib - empty) / held for what, mib in of_phase.items()}
                for phase, of_phase in found.items()
            }
            print(f"  {name}: {empty:.0f} MiB empty")
            for phase, of_phase in over.items():
                print(f"    {phase:10} peak {of_phase['peak']:.2f}, settled {of_phase['settled']:.2f}")
            worst = max(of_phase["peak"] for of_phase in over.values())
            if name == OURS:
                is_met = worst <= MEMORY_BAR
                print(f"  {name}: {worst:.2f} at most (bar: {MEMORY_BAR:g}): {workers.replication(is_met)}")


# --- contestants --------------------------------------------------------------------------------------


def _started(
    task: Mapping[str, Any],
    pythons: Pythons,
    closing: contextlib.ExitStack,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Contestant]:
    settings = {
        OURS: (sys.executable, "ps_replicax.py", task),
        **{name: (sys.executable, "ps_replicax.py", each) for name, each in (more or {}).items()},
    }
    if OTHER in pythons:
        settings[OTHER] = (pythons[OTHER], "ps_replicax.py", task)
    if TENSORFLOW in pythons:
        settings[TENSORFLOW] = (pythons[TENSORFLOW], "ps_tensorflow.py", task)
    contestants = {}
    for name, (python, script, setting) in settings.items():
        process = PeerProcess(python, script, dict(setting))
        closing.callback(process.close)
        contestants[name] = Contestant(process)
    return contestants


def _compare(
    title: str,
    task: Mapping[str, Any],
    num_rounds: int,
    count: int,
    pythons: Pythons,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, rounds.Timing]:
    """Times the contestants, each with its cluster, in alternating rounds, and reports."""
    with contextlib.ExitStack() as closing:
        contestants = _started(task, pythons, closing, more)
        runs: dict[str, Callable[[int], float]] = {name: each.run for name, each in contestants.items()}
        timings = rounds.compare(runs, rounds=num_rounds, steps=count, warm_up=count)
    rounds.report(title, timings, OURS, unit="µs each")
    for name, contestant in contestants.items():
        cpu = {process: statistics.median(each[1:]) * 1e6 for process, each in contestant.cpu.items()}
        each = ", ".join(f"{process} {microseconds:.0f}" for process, microseconds in cpu.items())
        rate = 1 / timings[name].median
        print(f"  {name:34} {rate:9.0f} /s; CPU time, µs each: {sum(cpu.values()):.0f}: {each}")
    return timings


def _print_bar(
    what: str, timings: Mapping[str, rounds.Timing], name: str, bar: float, other: str = TENSORFLOW
) -> None:
    """Prints how many times as fast one contestant is as another, by the median of the rounds."""
    if other not in timings:
        return
    pairs = [b / a for a, b in zip(timings[name].seconds, timings[other].seconds, strict=True)]
    ratio = timings[other].median / timings[name].median
    print(
        f"  {name}: {ratio:.2f} × the {what} of {other} by medians, rounds {min(pairs):.2f}–{max(pairs):.2f}"
        f" (bar: at least {bar:g}): {workers.replication(ratio >= bar)}"
    )


def convergence(num_rounds: int, pythons: Pythons) -> None:
    """Compares asynchronous with synchronous training by what the model has learned."""
    del pythons
    script = Path(__file__).with_name("ps_convergence.py")
    subprocess.run([sys.executable, str(script), "--rounds", str(num_rounds)], check=True, timeout=900)


def snapshots(num_rounds: int, pythons: Pythons) -> None:
    """Measures a snapshot after few rows have changed. The bar: a tenth of the CPU time of a full one."""
    del pythons
    script = Path(__file__).with_name("ps_snapshots.py")
    subprocess.run([sys.executable, str(script), "--rounds", str(num_rounds)], check=True, timeout=900)


PARTS = {
    "closures": closures,
    "mlp": mlp,
    "transfer": transfer,
    "embedding": embedding,
    "replication": replication,
    "memory": memory,
    "snapshots": snapshots,
    "convergence": convergence,
}


def main(num_rounds: int, tensorflow_python: str | None, other_python: str | None = None) -> None:
    """Prints all parts."""
    pythons = pythons_of(tensorflow_python, other_python)
    for part in PARTS.values():
        part(num_rounds, pythons)
    if tensorflow_python is None:
        print("  (TensorFlow: give --tensorflow PYTHON, a Python that has TensorFlow 2.21)")


def pythons_of(tensorflow_python: str | None, other_python: str | None) -> Pythons:
    """Those that were given, by what they have."""
    given = {TENSORFLOW: tensorflow_python, OTHER: other_python}
    return {name: python for name, python in given.items() if python is not None}


def _command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds (default 7)")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="a Python that has TensorFlow 2.21")
    parser.add_argument("--beside", metavar="PYTHON", help="a Python that has another version of replicax")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {arguments.rounds} rounds")
    pythons = pythons_of(arguments.tensorflow, arguments.beside)
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            part(arguments.rounds, pythons)


if __name__ == "__main__":
    _command_line()
