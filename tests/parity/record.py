"""Runs every case with TensorFlow and writes the results to ``recorded.json``.

Run it with a Python that has TensorFlow 2.21 and Keras; the project itself never needs it:
``python tests/parity/record.py``. ``--only TEXT`` prints the cases whose id begins with TEXT instead.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from parity_cases import CASES
from parity_cases.observing import observe

RECORDED = Path(__file__).with_name("recorded.json")


def record_group(ids: list[str], results: Any) -> None:
    """Runs cases in separate processes: one strategy each.

    Collectives of two strategies of different sizes, or a failed collective, break all later ones in a
    TensorFlow process.
    """
    from parity_cases import tensorflow_side

    tensorflow_side.start_devices()
    observed, failed = {}, {}
    for name in ids:
        side = tensorflow_side.TensorFlowSide(CASES[name].on)
        try:  # a case for which an error is the observation catches it itself
            observed[name] = observe(CASES[name].run(side), side.distributed_values)
        except Exception:
            failed[name] = traceback.format_exc()
    results.put((observed, failed))


def groups(ids: Iterable[str]) -> list[list[str]]:
    together: defaultdict[str, list[str]] = defaultdict(list)
    for name in ids:
        case = CASES[name]
        together[name if case.alone else case.on].append(name)
    return list(together.values())


def record(ids: Iterable[str]) -> dict[str, Any]:
    # Forking after TensorFlow's import and before its runtime starts saves the import each time.
    import tensorflow  # noqa: F401

    context = multiprocessing.get_context("fork")
    observed: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for group in groups(ids):
        results = context.Queue()
        process = context.Process(target=record_group, args=(group, results))
        process.start()
        for all_of, these in zip((observed, failed), results.get(timeout=600), strict=True):
            all_of |= these
        process.join()
    if failed:
        raise RuntimeError("\n".join([*failed.values(), "These cases failed:", *failed]))
    return observed


def write(observed: dict[str, Any]) -> None:
    """One line per case, sorted, so that a changed number is a changed line."""
    import tensorflow

    lines = [
        f"    {json.dumps(name)}: " + json.dumps({"spec": CASES[name].spec, "gave": observed[name]})
        for name in sorted(observed)
    ]
    versions = {"tensorflow": tensorflow.__version__, "keras": importlib.metadata.version("keras")}
    head = "".join(f'  "{key}": "{value}",\n' for key, value in versions.items())
    RECORDED.write_text("{\n" + head + '  "cases": {\n' + ",\n".join(lines) + "\n  }\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="print the cases whose id begins with this")
    only = parser.parse_args().only
    os.environ["KERAS_BACKEND"] = "tensorflow"
    ids = [name for name in CASES if only is None or name.startswith(only)]
    observed = record(ids)
    if only is None:
        write(observed)
        print(f"{len(observed)} cases -> {RECORDED}", file=sys.stderr)
        return
    for name in ids:
        print(name, json.dumps(observed[name]))


if __name__ == "__main__":
    main()
