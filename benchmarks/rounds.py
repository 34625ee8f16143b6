"""Interleaved rounds: contestants alternate, so that a machine whose speed drifts affects them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds per step of one contestant, over all rounds."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def worst(self) -> float:
        return max(self.seconds)


def compare(
    contestants: Mapping[str, Callable[[int], float | None]],
    *,
    rounds: int = 15,
    steps: int = 60,
    warm_up: int = 20,
) -> dict[str, Timing]:
    """Times contestants in alternation.

    Args:
      contestants: Each runs the given number of steps and waits for the last. It may return the seconds that
        they took, if only a part of its work is to be counted.
      warm_up: The number of steps before the first round; 0 for none.

    Returns:
      Seconds per step of each, by round.
    """
    for run in contestants.values() if warm_up else ():
        run(warm_up)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            measured = contestants[name](steps)
            elapsed = time.perf_counter() - start
            seconds[name].append((elapsed if measured is None else measured) / steps)
    return {name: Timing(values) for name, values in seconds.items()}


def report(
    title: str,
    timings: Mapping[str, Timing],
    baseline: str,
    *,
    unit: str = "µs per step",
    per_second: float = 1e6,
) -> None:
    """Prints medians with ranges, and each contestant relative to ``baseline``, by pairs of rounds."""
    print(f"\n{title}")
    print(
        f"  {'':34} {'median':>9} {'best':>9} {'worst':>9}   {unit}; × {baseline}: median of pairs, best/best"
    )
    base = timings[baseline]
    for name, timing in timings.items():
        pairs = [a / b for a, b in zip(timing.seconds, base.seconds, strict=True)]
        print(
            f"  {name:34} {timing.median * per_second:9.0f} {timing.best * per_second:9.0f}"
            f" {timing.worst * per_second:9.0f}"
            f"   {statistics.median(pairs):.3f} [{min(pairs):.3f}–{max(pairs):.3f}], {timing.best / base.best:.3f}"
        )
