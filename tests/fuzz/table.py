"""Prints the results of operations that mix rows on several devices, compared with one device in float64:
`python tests/fuzz/table.py --help`.

Each combination runs in a separate process, because XLA may end it. It prints only differences of more than 1e-4 of
the array's largest absolute value, with their cause. The exit code is 1 if there is any difference other than
rounding.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = 1800
ROUNDING, UNKNOWN = "rounding: one device in float32 differs as much", "not known"


def compare(way, names, num_devices, num_rows, is_exact):
    """The rows of the table for one combination: (name, difference, difference of one device in float32, cause)."""
    from fuzz import ways

    found = ways.differences(way, names, num_devices, num_rows, is_exact)
    apart = [name for name, value in found.items() if value > ways.LIMIT]
    alone = ways.rounding(way, apart, num_devices, num_rows, is_exact) if apart else {}
    return [(n, found[n], alone[n], ROUNDING if alone[n] >= found[n] / 2 else UNKNOWN) for n in apart]


def in_a_process(job):
    """The same in a new process. If that fails, or the process ends, each half of the names is tried, down to the one
    that causes it."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--job", json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if result.returncode == 0:
        return json.loads(result.stdout.splitlines()[-1])
    way, names, *others = job
    if len(names) == 1:
        lines = [line for line in result.stderr.splitlines() if "Error" in line or "Check failed" in line]
        return [(names[0], float("inf"), 0.0, " ".join(lines[-1:]) or f"exit code {result.returncode}")]
    middle = len(names) // 2
    return in_a_process([way, names[:middle], *others]) + in_a_process([way, names[middle:], *others])


def start():
    """Gives this process eight devices."""
    os.environ["KERAS_BACKEND"] = "jax"
    sys.path.insert(0, str(TESTS))
    from replicax import config

    config.set_local_devices(8)


def main():
    start()
    from fuzz.operations import OPERATIONS
    from fuzz.ways import DEVICES, PARTS, ROWS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument(
        "--operations", nargs="+", default=list(OPERATIONS), choices=list(OPERATIONS), metavar="NAME"
    )
    parser.add_argument("--normal", action="store_true", help="rows of normal numbers, which float32 rounds")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(compare(*json.loads(args.job))))
        return 0
    line = "{:26} {:>7} {:>5} {:8} {:>10} {:>10}  {}".format
    print(line("operation", "devices", "rows", "way", "difference", "one device", "cause"), flush=True)
    is_known = True
    for way, num_devices, num_rows in [
        (w, d, r) for _ in range(args.repeat) for d in args.devices for r in args.rows for w in args.ways
    ]:
        for name, apart, alone, cause in in_a_process(
            [way, args.operations, num_devices, num_rows, not args.normal]
        ):
            is_known &= cause == ROUNDING
            print(line(name, num_devices, num_rows, way, f"{apart:.1e}", f"{alone:.1e}", cause), flush=True)
    return 0 if is_known else 1


if __name__ == "__main__":
    sys.exit(main())
