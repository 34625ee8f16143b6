"""Measures how costs grow with the work, and compares the exponents with those that are allowed.

``make bench-growth`` prints a table in Markdown: for each row of ``growth_rows.py`` the exponent that it may have, the
one that is fitted through the medians (and the lowest and highest of single rounds), and the first size at which it
bends. It takes at most 40 minutes: what is not measured by then is missing, and named at the end. ``--quick`` leaves out
the largest sizes, ``--only rows`` measures one group, ``--details`` prints the median at each size, and ``--write`` puts
the lines into the table of ``docs/explanation/how_cost_grows.md``. Each size is measured in a process of its own. The
command fails if a row is above its exponent, or a process fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from growth_fit import Growth
from growth_page import HEADER, with_lines
from growth_rows import GROUPS, Group, Row

_RESULT = "growth: "
_PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "how_cost_grows.md"
_LIMIT_S = 2_340.0  # of the whole command
_LEAST_S = 5.0  # a process is not started for less

Values = dict[str, dict[int, list[float]]]
"""The values of all rounds, by row and size."""


class Measuring:
    """Measures groups, each size in a process of its own, within a time limit for all.

    Attributes:
      problems: What was not measured, and why.
      has_failed: True if a process has ended with an error.
    """

    def __init__(self, limit_s: float):
        self._until = time.monotonic() + limit_s
        self.problems: list[str] = []
        self.has_failed = False

    def measured(self, group: Group, sizes: Sequence[int], num_rounds: int) -> Values:
        """Measures a group. The largest size of several is measured in the first round only."""
        values: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for number in range(num_rounds):
            for size in sizes[-1:] if group.is_cumulative else sizes:
                if number and size == sizes[-1] and group.is_largest_once:
                    continue
                print(
                    f"{group.name}: {size:,}, round {number + 1} of {num_rounds}", file=sys.stderr, flush=True
                )
                for name, by_size in self._in_process(group, size, sizes).items():
                    for at, some in by_size.items():
                        values[name][at] += some
        return {name: dict(by_size) for name, by_size in values.items()}

    def _in_process(self, group: Group, size: int, sizes: Sequence[int]) -> Values:
        """Returns what a process has measured until it ended, or its time was up."""
        limit_s = min(group.limit_s, self._until - time.monotonic())
        if limit_s < _LEAST_S:
            self._note(f"{group.name}: {size:,} is not measured, because the time of the command is up")
            return {}
        command = [sys.executable, __file__, "--measure", group.name, str(size)]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "KERAS_BACKEND": "jax",
            "REPLICAX_CACHE_DIR": "off",
        }
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as printed:
            # A session of its own, so that the processes that it starts end with it.
            process = subprocess.Popen(command, env=environment, stdout=printed, start_new_session=True)
            try:
                code = process.wait(limit_s)
                if code:
                    self.has_failed = True
                    self._note(f"{group.name}: {size:,} failed with exit code {code}")
            except subprocess.TimeoutExpired:
                self._note(
                    f"{group.name}: {size:,} has not ended within {limit_s:.0f} s; some values are missing"
                )
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed.seek(0)
            lines = [line.removeprefix(_RESULT) for line in printed if line.startswith(_RESULT)]
        print(f"{group.name}: {size:,} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        values: Values = {}
        for line in lines:
            for name, some in json.loads(line).items():
                by_size = some if group.is_cumulative else {size: some}
                of_sizes = {int(at): each for at, each in by_size.items() if int(at) in sizes}
                values.setdefault(name, {}).update(of_sizes)
        return values

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        print(problem, file=sys.stderr, flush=True)


def print_measured(group: Group, size: int) -> None:
    """Measures in this process, and prints the values of rows as soon as they are known."""
    measured = importlib.import_module(group.module).measure(size)
    for values in [measured] if isinstance(measured, Mapping) else measured:
        print(_RESULT + json.dumps(values), flush=True)


def lines_of(group: Group, values: Values) -> Iterator[tuple[Row, Growth]]:
    """Yields the growth of each row of a group."""
    for row in group.rows:
        if row.name in values:
            yield row, Growth.fitted(values[row.name], row.exponent, row.floor)


def table_line(group: Group, row: Row, growth: Growth) -> str:
    """Returns a line of the table in Markdown."""
    sizes = list(growth.medians)
    at = [f"{at_least(growth.medians[size], row.floor)} {row.unit}" for size in (sizes[0], sizes[-1])]
    fitted = f"{growth.exponent:.2f} ({growth.lowest:.2f}–{growth.highest:.2f})"
    return (
        f"| {group.name} {sizes[0]:,} → {sizes[-1]:,} | {row.name} | {at[0]} → {at[1]} | {row.exponent:g} "
        f"| {f'**{fitted}**' if growth.is_above else fitted} | {f'{growth.bends_at:,}' if growth.bends_at else '–'} |"
    )


def detail_line(row: Row, growth: Growth) -> str:
    """Returns the medians at all sizes."""
    return f"    {row.name}, {row.unit}: " + ", ".join(
        f"{size:,}: {at_least(value, row.floor)}" for size, value in growth.medians.items()
    )


def at_least(value: float, floor: float) -> str:
    """Returns a number; at the floor, that it is no larger."""
    return f"{'≤ ' if value <= floor else ''}{written(value)}"


def written(value: float) -> str:
    """Returns a number with two or three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> int:
    """Prints the table. Returns 1 if a row is above its exponent."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [group.name for group in GROUPS]
    parser.add_argument("--only", choices=names, action="append", help="one group of rows; may be repeated")
    parser.add_argument("--quick", action="store_true", help="without the largest sizes, one round")
    parser.add_argument("--details", action="store_true", help="print the median at each size too")
    parser.add_argument("--measure", nargs=2, metavar=("GROUP", "SIZE"), help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="also write the lines into the page of the docs")
    options = parser.parse_args()
    by_name: Mapping[str, Group] = {group.name: group for group in GROUPS}
    if options.measure:
        name, size = options.measure
        print_measured(by_name[name], int(size))
        return 0
    print(HEADER, flush=True)
    above: list[str] = []
    lines: dict[tuple[str, str], str] = {}
    measuring = Measuring(_LIMIT_S)
    for name in options.only or names:
        group = by_name[name]
        sizes = group.quick_sizes if options.quick else group.sizes
        values = measuring.measured(group, sizes, 1 if options.quick else group.num_rounds)
        for row, growth in lines_of(group, values):
            line = lines[group.name, row.name] = table_line(group, row, growth)
            print(line, flush=True)
            if options.details:
                print(detail_line(row, growth), file=sys.stderr, flush=True)
            if growth.is_above:
                above.append(f"{group.name}: {row.name}")
    if options.write:
        _PAGE.write_text(with_lines(_PAGE.read_text(), lines))
    for problem in measuring.problems:
        print(problem, file=sys.stderr)
    for name in above:
        print(f"above its exponent: {name}", file=sys.stderr)
    return bool(above) or measuring.has_failed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
