"""Runs scenarios in the simulated world: from a seed, again from it, and with the fewest faults that still fail.

A *scenario* is a class. ``Scenario(seed)`` draws what the run is like, all from the seed, and has

- ``network``: options of ``World``;
- ``faults()``: the faults of this seed;
- ``build(world)``: starts the processes;
- ``inject(world, fault)``: lets a fault happen, of its own kinds or of ``World.inject``;
- ``is_over(world)``: true when the run has ended;
- ``limit_s``: how long a run may take after its last fault has ended;
- ``check(world)``: the checks at the end. It raises ``AssertionError``, as the processes do at any time;
- ``outcome(world)``: a word for how the run ended, to count.
"""

import gc
import traceback
from collections import Counter
from dataclasses import dataclass

from simulation.shrinking import fewest
from simulation.world import World


@dataclass
class Run:
    """What became of a run. ``error`` is None if all was well."""

    seed: int
    faults: list
    outcome: str
    error: str | None
    world: World

    @property
    def trace(self):
        return "\n".join(self.world.log or ())


def run(scenario_class, seed, faults=None, *, is_traced=False):
    """Runs a scenario once.

    Args:
      scenario_class: The scenario.
      seed: The seed.
      faults: The faults; by default those of the seed.
      is_traced: True to keep what happens.
    """
    scenario = scenario_class(seed)
    world = World(seed, is_traced=is_traced, **scenario.network)
    faults = scenario.faults() if faults is None else faults
    error, outcome = None, "failed"
    is_collected = gc.isenabled()
    gc.disable()  # nothing of a run is garbage before it ends
    try:
        scenario.build(world)
        for fault in faults:
            world.plan(fault, scenario.inject)
        assert world.run(scenario.limit_s, lambda: scenario.is_over(world)), "the run does not end"
        scenario.check(world)
        outcome = scenario.outcome(world)
    except Exception as failure:  # an error of a machine is a failure of the run, whatever its type
        error = "".join(traceback.format_exception(failure, limit=-4))
    finally:
        if is_collected:
            gc.enable()
    return Run(seed, list(faults), outcome, error, world)


def shortened(scenario_class, failed):
    """Returns the run again, with the fewest faults with which it fails."""
    faults = fewest(failed.faults, lambda part: run(scenario_class, failed.seed, part).error is not None)
    return run(scenario_class, failed.seed, faults, is_traced=True)


def report(scenario_class, failed, num_lines=60):
    """Returns a text about a run that failed: its seed, the fewest faults, and what happened last."""
    short = shortened(scenario_class, failed)
    faults = "\n".join(f"  {fault}" for fault in short.faults) or "  none"
    last = "\n".join((short.world.log or [])[-num_lines:])
    return (
        f"{scenario_class.__name__}, seed {failed.seed}, fails:\n{short.error or failed.error}\n"
        f"{len(short.faults)} of {len(failed.faults)} faults are enough:\n{faults}\n\nWhat happened last:\n{last}\n\n"
        f"Repeat it: make fuzz-simulation SCENARIO={scenario_class.__name__} SEED={failed.seed}"
    )


def first_failure(scenario_class, seeds):
    """Runs many seeds. Returns the first run that failed, or None, and the number of runs with each outcome."""
    outcomes = Counter()
    for seed in seeds:
        done = run(scenario_class, seed)
        if done.error is not None:
            return done, outcomes
        outcomes[done.outcome] += 1
    return None, outcomes
