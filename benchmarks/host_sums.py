"""Compares all-reduces of host arrays in shared memory and over connections with JAX's gloo: each size, 2 and 4 processes.

The contestants alternate in one run. On a busy machine the minima say more than the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import workers
from workers import Contestant

KIB, MIB = 2**10, 2**20
# Sizes in bytes, and the number of all-reduces of each size in a round.
SIZES = {4: 200, 64 * KIB: 100, 16 * MIB: 8, 64 * MIB: 4}
SHARED, CONNECTIONS, GLOO = "shared memory", "connections", "JAX, gloo"


def main(num_rounds: int, processes: list[int], names: list[str]) -> None:
    """Prints a table for each number of processes."""
    for num_workers in processes:
        ours = {
            name: Contestant(
                sys.executable, "worker_host_sums.py", {"shares_memory": name == SHARED}, num_workers
            )
            for name in (SHARED, CONNECTIONS)
        }
        gloo = {"contestant": "by hand", "task": "all_reduce"}
        contestants = {**ours, GLOO: Contestant(sys.executable, "worker_replicax.py", gloo, num_workers)}
        contestants = {name: contestant for name, contestant in contestants.items() if name in names}
        turns = {size: (count, {"size": size}) for size, count in SIZES.items()}
        print(f"\nAll-reduce of float32 over {num_workers} processes, ms: min, median [medians of rounds]")
        for size, timings in workers.compare(contestants, turns, num_rounds).items():
            for name, timing in timings.items():
                medians = [1e3 * statistics.median(seconds) for seconds in timing.rounds]
                print(
                    f"  {_in_words(size):>8}  {name:14} {1e3 * min(timing.all):9.3f} {1e3 * timing.median:9.3f} "
                    f"[{min(medians):.3f}, {max(medians):.3f}]",
                    flush=True,
                )


def _in_words(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="alternating rounds (default 9)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", default=[SHARED, CONNECTIONS, GLOO], metavar="CONTESTANT")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.processes, arguments.only)
