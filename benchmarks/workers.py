"""The contestants of ``multi_worker.py``: two workers each, in separate processes, which alternate."""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from peer_process import PeerProcess

# One program can be a tenth faster in one process than in the next, for the process's whole life.
GENERATIONS = 3


@dataclass(frozen=True)
class Contestant:
    """Says how to start the workers of a contestant.

    Attributes:
      python: A Python that has its library; None: it does not take part.
      script: The script's name.
      setting: The first message, without the parts that differ between workers.
      num_workers: The number of workers.
    """

    python: str | None
    script: str
    setting: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 2


@final
class Workers:
    """The processes of one contestant."""

    def __init__(self, contestant: Contestant):
        assert contestant.python is not None
        addresses = free_addresses(contestant.num_workers)
        with contextlib.ExitStack() as closing:
            self._processes = []
            for index in range(contestant.num_workers):
                setting = {**contestant.setting, "index": index, "addresses": addresses}
                process = PeerProcess(contestant.python, contestant.script, setting, waits=False)
                closing.callback(process.close)
                self._processes.append(process)
            for process in self._processes:
                process.hear()
            self._closing = closing.pop_all()

    def run(self, count: int, **more: Any) -> list[float]:
        """Does ``count`` operations. Returns the seconds of each on the first worker."""
        for process in self._processes:
            process.tell({"count": count, **more})
        of_first, *_ = [process.hear() for process in self._processes]
        return of_first

    def close(self) -> None:
        """Ends the processes. All are told before any is waited for, because some leave together."""
        for process in self._processes:
            process.end()
        self._closing.close()


def free_addresses(num_addresses: int) -> list[str]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(num_addresses)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{bound.getsockname()[1]}" for bound in sockets]


@dataclass(frozen=True)
class Timing:
    """Seconds of each operation of one contestant, by round."""

    rounds: list[list[float]]

    @property
    def all(self) -> list[float]:
        return [seconds for one_round in self.rounds for seconds in one_round]

    @property
    def p10(self) -> float:
        return p10(self.all)

    @property
    def median(self) -> float:
        return statistics.median(self.all)


def p10(seconds: list[float]) -> float:
    """The 10th percentile."""
    return sorted(seconds)[len(seconds) // 10]


def compare(
    contestants: Mapping[str, Contestant], turns: Mapping[Any, tuple[int, dict[str, Any]]], num_rounds: int
) -> dict[Any, dict[str, Timing]]:
    """Times contestants in alternating rounds, spread over several generations of processes.

    Args:
      contestants: By name; those without a Python are left out.
      turns: What is timed: a number of operations, and more that each worker is told.
      num_rounds: Of each turn.
    """
    contestants = {name: c for name, c in contestants.items() if c.python is not None}
    timings = {turn: {name: Timing([]) for name in contestants} for turn in turns}
    for generation in range(min(GENERATIONS, num_rounds)):
        share = len(range(generation, num_rounds, GENERATIONS))
        with contextlib.ExitStack() as closing:
            runs = {
                name: closing.enter_context(contextlib.closing(Workers(contestant))).run
                for name, contestant in contestants.items()
            }
            for turn, (count, more) in turns.items():
                for run in runs.values():
                    run(max(2, count // 4), **more)
                _take_turns(runs, timings[turn], share, lambda run, c=count, m=more: run(c, **m))
    return timings


def _take_turns(
    runs: Mapping[str, Any],
    timings: Mapping[str, Timing],
    num_rounds: int,
    do: Callable[[Any], list[float]],
) -> None:
    names = list(runs)
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            timings[name].rounds.append(do(runs[name]))


def report(title: str, timings: Mapping[str, Timing], baseline: str) -> None:
    """Prints p10 and median over all operations, relative to ``baseline`` too, and those of every round; in µs."""
    print(f"\n{title}")
    print(f"  {'':34} {'p10':>9} {'median':>9}   µs; × {baseline}: p10, median; by round: p10/median")
    base = timings[baseline]
    for name, timing in timings.items():
        by_round = " ".join(f"{p10(s) * 1e6:.0f}/{statistics.median(s) * 1e6:.0f}" for s in timing.rounds)
        print(
            f"  {name:34} {timing.p10 * 1e6:9.0f} {timing.median * 1e6:9.0f}   {timing.p10 / base.p10:.2f},"
            f" {timing.median / base.median:.2f}; {by_round}"
        )


def print_bar(timings: Mapping[str, Timing], name: str, other: str, at_most: float) -> None:
    """Prints the median time of an operation relative to another contestant's, beside what it may be."""
    if other in timings:
        ratio = timings[name].median / timings[other].median
        print(
            f"  {name}: {ratio:.2f} × the median time of {other}, {timings[name].p10 / timings[other].p10:.2f} by p10"
            f" (bar: median at most {at_most:.2f}): {replication(ratio <= at_most)}"
        )


def replication(is_met: bool) -> str:
    """For people."""
    return "met" if is_met else "MISSED"
