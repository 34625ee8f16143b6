"""Measures how costs grow with the work, and compares the exponents with those that are allowed.

``make bench-growth`` prints a table in Markdown: for each row of ``growth_rows.py`` the exponent that it may have, the
one that is fitted through the medians (and the lowest and highest of single rounds), and the first size at which it
bends. It takes up to 15 minutes; ``--quick`` leaves out the largest sizes, ``--only rows`` measures one group, and
``--details`` prints the median at each size. Each size is measured in a process of its own. The command fails if a row
is above its exponent.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from growth_fit import Growth
from growth_rows import GROUPS, Group, Row

_RESULT = "growth: "

Values = dict[str, dict[int, list[float]]]
"""The values of all rounds, by row and size."""


def measured(group: Group, sizes: Sequence[int], num_rounds: int) -> Values:
    """Measures a group in processes of its own."""
    values: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(num_rounds):
        for size in sizes[-1:] if group.is_cumulative else sizes:
            print(f"{group.name}: {size:,}, round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
            try:
                measured_now = _in_process(group, size, sizes)
            except subprocess.TimeoutExpired:
                print(
                    f"{group.name}: {size:,} took more than {group.limit_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            for name, by_size in measured_now.items():
                for at, some in by_size.items():
                    values[name][int(at)] += some
    return {name: dict(by_size) for name, by_size in values.items()}


def _in_process(group: Group, size: int, sizes: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    command = [sys.executable, __file__, "--measure", group.name, str(size)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "REPLICAX_CACHE_DIR": "off"}
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=group.limit_s, check=True
    )
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith(_RESULT))
    result = json.loads(line.removeprefix(_RESULT))
    if group.is_cumulative:
        return {name: {at: by[at] for at in by if int(at) in sizes} for name, by in result.items()}
    return {name: {str(size): some} for name, some in result.items()}


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
    options = parser.parse_args()
    by_name: Mapping[str, Group] = {group.name: group for group in GROUPS}
    if options.measure:
        name, size = options.measure
        print(_RESULT + json.dumps(importlib.import_module(by_name[name].module).measure(int(size))))
        return 0
    print("| what grows | what is measured | from → to | may | fitted | bends at |")
    print("|---|---|--:|--:|--:|--:|", flush=True)
    above: list[str] = []
    for name in options.only or names:
        group = by_name[name]
        sizes = group.quick_sizes if options.quick else group.sizes
        values = measured(group, sizes, 1 if options.quick else group.num_rounds)
        for row, growth in lines_of(group, values):
            print(table_line(group, row, growth), flush=True)
            if options.details:
                print(detail_line(row, growth), file=sys.stderr, flush=True)
            if growth.is_above:
                above.append(f"{group.name}: {row.name}")
    for name in above:
        print(f"above its exponent: {name}", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
