"""Plants small faults in rules, one at a time, and runs the quick tests that should find each.

``python tools/planted_faults.py`` runs all faults that have no result yet, in trees of hard links in ``build/faults``:
those of the core (``planted_faults.toml``) and of the parameter servers (``planted_faults_servers.toml``). It prints
a line for each fault and ends with 1 if one is not found. A result holds until the fault, its file or its tests change;
``--again`` forgets all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import core_tree

ROOT = Path(__file__).parents[1]
LISTS = {
    "core": Path(__file__).with_suffix(".toml"),
    "servers": Path(__file__).with_name("planted_faults_servers.toml"),
}
FAULTS = ROOT / "build" / "faults"
RESULTS = FAULTS / "results.json"

# As in the Makefile.
QUICK = "not long and (quick or not rest)"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A fault of a list; ``planted_faults.toml`` says what its fields are."""

    name: str
    says: str
    file: str
    old: str
    new: str
    tests: str
    kind: str = ""
    reason: str = ""

    @property
    def is_equivalent(self) -> bool:
        """True if no test can find it."""
        return self.kind == "equivalent"

    def text(self, root: Path = ROOT) -> str:
        """Returns the file with the fault.

        Raises:
          ValueError: The old text does not occur exactly once.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the old text occurs {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)

    def key(self) -> str:
        """Returns a digest of the fault, its file and its tests."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode())
        tests = ROOT / self.tests.partition("::")[0]
        for path in [ROOT / self.file, *(sorted(tests.rglob("*.py")) if tests.is_dir() else [tests])]:
            digest.update(path.read_bytes())
        return digest.hexdigest()


def read_faults(name: str) -> list[Fault]:
    """Returns the faults of a list, in ``LISTS``."""
    return [Fault(**each) for each in tomllib.loads(LISTS[name].read_text())["fault"]]


# --- one fault ----------------------------------------------------------------------------------------


def lay_out(tree: Path) -> None:
    """Makes a tree of hard links to the files of this one. Compiled Python files of an earlier tree are kept."""
    known = set(core_tree.tracked())
    for path in [path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts]:
        path.unlink()
    for name in known:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(ROOT / name, tree / name, follow_symlinks=False)


@contextlib.contextmanager
def planted(fault: Fault, tree: Path, root: Path = ROOT) -> Iterator[None]:
    """Puts a fault into a tree of hard links, and takes it out."""
    path, text = tree / fault.file, fault.text(root)
    path.unlink()  # a write through the link would change the original
    path.write_text(text)
    try:
        yield
    finally:
        path.unlink()
        os.link(root / fault.file, path)


def run_pytest(tree: Path, tests: Sequence[str], timeout_s: float, *options: str) -> tuple[int | None, str]:
    """Runs the quick ones of some tests in a tree. Returns the exit status and the output; None after ``timeout_s``."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-m",
        QUICK,
    ]
    environ = {**os.environ, "PYTHONPATH": str(tree / "src"), "COLUMNS": "1000"}
    process = subprocess.Popen(
        [*command, *options, *tests], cwd=tree, env=environ, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failed_tests(output: str) -> list[str]:
    """Returns the tests that pytest's summary lists as failed, or the files that it could not collect."""
    return _FAILED.findall(output)


def look_for(fault: Fault, tree: Path, timeout_s: float) -> dict[str, Any]:
    """Returns the result of one fault.

    It has ``found_by``, a test or None; ``why`` there is none; and ``passes_without``, True once that test has passed
    without the fault.
    """
    began = time.monotonic()
    with planted(fault, tree):
        status, output = run_pytest(tree, [fault.tests], timeout_s, "-x")
    found = failed_tests(output)
    why = {0: "all tests pass", None: f"they take longer than {timeout_s:g} s"}.get(status, output[-2000:])
    is_found = status in (1, 2) and bool(found)
    return {
        "key": fault.key(),
        "found_by": found[0] if is_found else None,
        "passes_without": False,
        "why": None if is_found else why,
        "seconds": round(time.monotonic() - began),
    }


# --- all faults ---------------------------------------------------------------------------------------


def report(fault: Fault, result: dict[str, Any] | None) -> str:
    """Returns the line of a fault."""
    if fault.is_equivalent:
        return f"equivalent  {fault.name}: {fault.reason}"
    assert result is not None
    if result["found_by"]:
        return f"found       {fault.name}: {result['found_by']} ({result['seconds']} s)"
    return f"NOT FOUND   {fault.name}: {fault.says} {fault.tests}: {result['why']}"


def run_faults(faults: Sequence[Fault], results: dict[str, Any], num_jobs: int, timeout_s: float) -> None:
    """Runs faults, each in a tree of its own while it runs, and keeps each result at once."""
    trees: queue.Queue[Path] = queue.Queue()
    for number in range(min(num_jobs, len(faults))):
        lay_out(FAULTS / f"tree-{number}")
        trees.put(FAULTS / f"tree-{number}")

    def run(fault: Fault) -> dict[str, Any]:
        tree = trees.get()
        try:
            return look_for(fault, tree, timeout_s)
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(num_jobs) as pool:
        waiting = {pool.submit(run, fault): fault for fault in faults}
        for future in as_completed(waiting):
            fault = waiting[future]
            results[fault.name] = future.result()
            keep(results)
            print(report(fault, results[fault.name]), flush=True)


def check_passes(tests: Sequence[str], timeout_s: float) -> list[str]:
    """Returns those of the tests that fail in a tree without a fault, so that they find none."""
    lay_out(FAULTS / "tree-0")
    status, output = run_pytest(FAULTS / "tree-0", sorted(set(tests)), timeout_s)
    if status in (0, 1):
        return failed_tests(output)
    print(f"pytest ended with {status}: {output[-2000:]}")
    return list(tests)


def keep(results: dict[str, Any]) -> None:
    """Writes the results."""
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1))
    part.replace(RESULTS)


def main() -> int:
    """Runs the faults that have no result. Returns 1 if one is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="run this fault again; may be repeated"
    )
    parser.add_argument(
        "--list",
        action="append",
        choices=LISTS,
        help="run the faults of this list (all lists); may be repeated",
    )
    parser.add_argument("--again", action="store_true", help="forget all results")
    parser.add_argument("--jobs", type=int, default=2, help="the number of faults that run at once (2)")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for the tests of one fault (900)"
    )
    given = parser.parse_args()
    faults = [fault for name in given.list or LISTS for fault in read_faults(name)]
    if given.only:
        unknown = set(given.only) - {fault.name for fault in faults}
        if unknown:
            parser.error(f"no fault is named {', '.join(sorted(unknown))}")
        faults = [fault for fault in faults if fault.name in given.only]
    if given.again:
        shutil.rmtree(FAULTS, ignore_errors=True)
    FAULTS.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    to_run = []
    for fault in faults:
        known = results.get(fault.name, {})
        if fault.is_equivalent:
            print(report(fault, None))
        elif not given.only and known.get("found_by") and known["key"] == fault.key():
            print(report(fault, known))
        else:
            to_run.append(fault)
    if to_run:
        run_faults(to_run, results, given.jobs, given.timeout)
    meant = [fault for fault in faults if not fault.is_equivalent]
    found = [fault for fault in meant if results[fault.name]["found_by"]]
    unchecked = [results[fault.name] for fault in found if not results[fault.name]["passes_without"]]
    failing = check_passes([each["found_by"] for each in unchecked], given.timeout) if unchecked else []
    for result in unchecked:
        result["passes_without"] = result["found_by"] not in failing
    for test in failing:
        print(f"FAILS WITHOUT A FAULT   {test}")
    keep(results)
    print(f"{len(found)} of {len(meant)} faults are found; {len(faults) - len(meant)} are equivalent")
    return int(len(found) < len(meant) or bool(failing))


if __name__ == "__main__":
    sys.exit(main())
