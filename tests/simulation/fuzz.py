"""Runs many seeds of the simulated world, on all cores: ``make fuzz-simulation``, with ``SEEDS=n``, ``SEED=n`` for one seed,
and ``SCENARIO=Name`` for one scenario. Prints the seed of a run that fails, the fewest faults, and what happened last.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation import runs, scenarios

PER_CHUNK = 200


def chunk(arguments):
    name, first, last = arguments
    failed, outcomes = runs.first_failure(scenarios.ALL[name], range(first, last))
    return outcomes, failed and failed.seed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=[*scenarios.ALL], action="append", help="by default all")
    parser.add_argument("--seeds", type=int, default=100_000, help="the number of seeds of each scenario")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this seed alone, with all that happens")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    names = arguments.scenario or [*scenarios.ALL]
    if arguments.seed is not None:
        failing = [name for name in names if show(scenarios.ALL[name], arguments.seed)]
        return bool(failing)
    chunks = [
        (name, first, min(first + PER_CHUNK, arguments.first + arguments.seeds))
        for name in names
        for first in range(arguments.first, arguments.first + arguments.seeds, PER_CHUNK)
    ]
    started, outcomes = time.monotonic(), Counter()
    with multiprocessing.Pool(arguments.processes) as pool:
        for (name, *_), (some, failing) in zip(chunks, pool.imap(chunk, chunks), strict=True):
            if failing is not None:
                pool.terminate()
                print(runs.report(scenarios.ALL[name], runs.run(scenarios.ALL[name], failing)))
                return True
            outcomes.update({f"{name}: {outcome}": number for outcome, number in some.items()})
    for outcome, number in outcomes.most_common():
        print(f"{number:8}  {outcome}")
    print(f"All {sum(outcomes.values())} runs are as they should be ({time.monotonic() - started:.0f} s).")
    return False


def show(scenario_class, seed):
    """Prints all that happens in one run. Returns True if it fails."""
    done = runs.run(scenario_class, seed, is_traced=True)
    print(done.trace)
    print("\n".join(["Faults:", *(f"  {fault}" for fault in done.faults)]))
    print(f"Outcome: {done.outcome}")
    if done.error is not None:
        print(runs.report(scenario_class, done))
    return done.error is not None


if __name__ == "__main__":
    sys.exit(main())
