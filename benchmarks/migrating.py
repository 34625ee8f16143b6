"""Counts how much of TensorFlow's pages runs after ``replicax migrate`` only:
``python benchmarks/migrating.py PAGES``.

PAGES is a directory of TensorFlow's notebooks, which are not part of this repository:
``site/en/guide/distributed_training.ipynb`` and others of https://github.com/tensorflow/docs. The command
migrates each page, and its cells run in order in one process (``migrating_cells.py``), with small synthetic
data, on two virtual devices. ``--tensorflow PYTHON`` runs the originals too, and compares what both print.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

PAGE_LIMIT_S = 400
LEFT_OUT = re.compile(
    r"estimator|SessionRunHook|Session\(|dtensor"
)  # no TensorFlow that is installed today runs these
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d*(?:e[-+]?\d+)?(?![\w.])")
TIMES = re.compile(r"Time taken.*|^.*(?:Available devices|Learning rate|tasks to start).*$|^I0000.*$", re.M)

# Sizes and hardware on a page, and their replacements, for both programs.
EVERYWHERE = [("/gpu:", "/cpu:"), ("/TPU:0", "/CPU:0"), ("/tmp/", "tmp/")]
SIZES: dict[str, list[tuple[str, str]]] = {
    "custom_training": [("EPOCHS = 10", "EPOCHS = 2"), ("range(10)", "range(3)")],
    "keras": [("EPOCHS = 12", "EPOCHS = 3")],
    "input": [("num_epochs = 10", "num_epochs = 2")],
    "multi_worker_with_ctl": [
        ("num_steps_per_epoch = 70", "num_steps_per_epoch = 2"),
        ("num_steps_per_epoch=70", "num_steps_per_epoch=2"),
    ],
    "multi_worker_with_keras": [("steps_per_epoch=70", "steps_per_epoch=3"), ("save_freq=30", "save_freq=2")],
    "tpu": [
        ("60000", "1000"),
        ("10000 //", "400 //"),
        ("Conv2D(256", "Conv2D(4"),
        ("batch_size = 200", "batch_size = 128"),
        ("steps_per_execution = 50", "steps_per_execution = 2"),
    ],
    "fault_tolerance": [
        ("steps_per_epoch=100", "steps_per_epoch=10"),
        ("interrupting_step=140", "interrupting_step=14"),
        ("save_freq=30", "save_freq=3"),
    ],
    "early_stopping": [
        ("epochs=100", "epochs=4"),
        ("epochs = 100", "epochs = 4"),
        ("LimitTrainingTime(30)", "LimitTrainingTime(3000)"),
    ],
}
# Hardware that TensorFlow needs, and that virtual devices replace on replicax.
ORIGINAL: dict[str, list[tuple[str, str]]] = {
    "tpu": [("tf.distribute.TPUStrategy(resolver)", "tf.distribute.MirroredStrategy()")],
    "tpu_estimator": [("tf.distribute.TPUStrategy(cluster_resolver)", "tf.distribute.MirroredStrategy()")],
}


@dataclass
class Page:
    """The outcome of the cells of a page that name TensorFlow."""

    name: str
    counted: list[int] = field(default_factory=list)  # cells
    failed: dict[int, str] = field(default_factory=dict)  # cell -> the error
    others_failed: dict[int, str] = field(default_factory=dict)  # cells that name nothing of TensorFlow
    failed_original: dict[int, str] = field(default_factory=dict)
    num_compared: int = 0
    largest_difference: float = 0.0
    different: list[int] = field(default_factory=list)


def names_tensorflow(source: str, bound: set[str]) -> bool:
    """True if a cell uses a name of TensorFlow; adds the names that it binds to TensorFlow's modules."""
    if source.startswith("%%bash"):
        return False
    if source.startswith("%%"):
        bound = set()  # a file of its own
    code = re.sub(r"^(\s*)[!%]{1,2}\w.*$", r"\1pass", source, flags=re.M)
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {
                (alias.asname or alias.name).split(".")[0]
                for alias in node.names
                if is_tensorflow(alias.name)
            }
        elif isinstance(node, ast.ImportFrom) and is_tensorflow(node.module or ""):
            bound |= {alias.asname or alias.name for alias in node.names}
    return any(isinstance(node, ast.Name) and node.id in bound for node in ast.walk(tree))


def is_tensorflow(module: str) -> bool:
    return module.split(".")[0] == "tensorflow"


def cells_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def counted_cells(notebook: Path) -> list[int]:
    """The cells that name TensorFlow, without those of Estimator, sessions and DTensor."""
    bound: set[str] = set()
    return [
        index
        for index, source in enumerate(cells_of(notebook))
        if names_tensorflow(source, bound) and not LEFT_OUT.search(source)
    ]


def prepare(notebook: Path, target: Path, replacements: list[tuple[str, str]]) -> None:
    """A copy with small sizes and free ports."""
    content = json.loads(notebook.read_text())
    ports = {port: str(free_port()) for port in re.findall(r"localhost:(\d+)", notebook.read_text())}
    for cell in content["cells"]:
        source = "".join(cell["source"])
        for old, new in replacements:
            source = source.replace(old, new)
        for old, new in ports.items():
            source = source.replace(f"localhost:{old}", f"localhost:{new}")
        cell["source"] = source.splitlines(keepends=True)
    target.write_text(json.dumps(content))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(python: str, notebook: Path, directory: Path, environment: dict[str, str]) -> dict[int, dict]:
    """Runs a notebook in a separate process, and returns its records by cell."""
    (directory / "tmp").mkdir(parents=True)
    record, scripts = directory / "record.json", directory / "scripts.json"
    command = [python, str(Path(__file__).with_name("migrating_cells.py")), str(notebook), str(record)]
    with (directory / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "CUDA_VISIBLE_DEVICES": "",
                "MIGRATING_SCRIPTS": str(scripts),
                **environment,
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PAGE_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = {entry["cell"]: entry for entry in read(record)}
    cells = cells_of(notebook)
    for entry in read(scripts):
        for cell, source in enumerate(cells):
            if source.split("\n")[0].split() == ["%%writefile", entry["script"]] and cell in found:
                found[cell]["error"] = entry["error"]
    return found


def read(record: Path) -> list[dict]:
    """The entries of a file, one per line."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def failures(records: dict[int, dict], cells: list[int]) -> dict[int, str]:
    """The error of each cell that did not run."""
    return {
        cell: records[cell]["error"].splitlines()[0] if cell in records else "not reached"
        for cell in cells
        if cell not in records or records[cell]["error"]
    }


def compare(page: Page, ours: dict[int, dict], theirs: dict[int, dict]) -> None:
    """Compares the numbers that each cell printed in both programs."""
    for cell in sorted(ours.keys() & theirs.keys()):
        if ours[cell]["error"] or theirs[cell]["error"]:
            continue
        mine, other = (
            [float(number) for number in NUMBER.findall(TIMES.sub("", records[cell]["output"]))]
            for records in (ours, theirs)
        )
        if len(mine) != len(other):
            page.different.append(cell)
            continue
        differences = [abs(a - b) / max(1e-3, abs(a), abs(b)) for a, b in zip(mine, other)]
        if any(difference > 1e-2 or math.isnan(difference) for difference in differences):
            page.different.append(cell)
        elif differences:
            page.num_compared += len(differences)
            page.largest_difference = max(page.largest_difference, *differences)


def measure(notebook: Path, work: Path, tensorflow: str | None) -> Page:
    """Migrates a page and runs it."""
    name = notebook.stem
    page = Page(name, counted_cells(notebook))
    directory = work / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    prepare(notebook, directory / notebook.name, EVERYWHERE + SIZES.get(name, []))
    migrate = [sys.executable, "-m", "replicax", "migrate", "--output", str(directory / "migrated")]
    migrate += ["--report", str(directory / "report.md"), str(directory / notebook.name)]
    migrated = subprocess.run(migrate, capture_output=True, text=True, timeout=300)
    (directory / "migrate.txt").write_text(migrated.stdout + migrated.stderr)
    ours = run(
        sys.executable,
        next((directory / "migrated").rglob("*.ipynb")),
        directory / "replicax",
        {"JAX_NUM_CPU_DEVICES": "2", "REPLICAX_PROGRESS": "0"},
    )
    page.failed = failures(ours, page.counted)
    cells = cells_of(notebook)
    others = [i for i in range(len(cells)) if i not in page.counted and not LEFT_OUT.search(cells[i])]
    page.others_failed = failures(ours, others)
    if tensorflow:
        prepare(
            notebook, directory / "original.ipynb", EVERYWHERE + SIZES.get(name, []) + ORIGINAL.get(name, [])
        )
        theirs = run(
            tensorflow,
            directory / "original.ipynb",
            directory / "tensorflow",
            {"TF_USE_LEGACY_KERAS": "1", "MIGRATING_DEVICES": "2"},
        )
        page.failed_original = failures(theirs, page.counted)
        compare(page, ours, theirs)
    return page


def report(pages: list[Page], compares: bool) -> None:
    """Prints the counts."""
    for page in pages:
        runs = len(page.counted) - len(page.failed)
        print(f"{page.name:32} {runs:3} of {len(page.counted):3} cells run", end="")
        if compares:
            print(f"; {page.num_compared} numbers equal up to {page.largest_difference:.1e}", end="")
            print(f"; cells that differ: {page.different}" if page.different else "", end="")
        print()
        for cell, error in page.failed.items():
            also = " (nor in TensorFlow)" if cell in page.failed_original else ""
            print(f"    cell {cell}{also}: {error[:200]}")
        for cell, error in page.others_failed.items():
            print(f"    cell {cell}, which names nothing of TensorFlow: {error[:200]}")
        for cell in page.failed_original.keys() - page.failed.keys():
            print(f"    cell {cell} runs here and not in TensorFlow: {page.failed_original[cell][:120]}")
    counted, failed = (sum(len(getattr(page, name)) for page in pages) for name in ("counted", "failed"))
    if counted:
        print(f"{counted - failed} of {counted} cells run: {(counted - failed) / counted:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", type=Path, help="a directory of TensorFlow's notebooks")
    parser.add_argument("--only", help="pages, separated by commas")
    parser.add_argument(
        "--work", type=Path, default=Path("migrating"), help="where the programs run (default: migrating)"
    )
    parser.add_argument(
        "--tensorflow", metavar="PYTHON", help="a Python that has TensorFlow 2.21 and tf_keras"
    )
    arguments = parser.parse_args()
    notebooks = sorted(arguments.pages.glob("*.ipynb"))
    if arguments.only:
        notebooks = [notebook for notebook in notebooks if notebook.stem in arguments.only.split(",")]
    pages = []
    for notebook in notebooks:
        pages.append(measure(notebook, arguments.work.resolve(), arguments.tensorflow))
        report(pages[-1:], bool(arguments.tensorflow))
    print()
    report(pages, bool(arguments.tensorflow))


if __name__ == "__main__":
    main()
