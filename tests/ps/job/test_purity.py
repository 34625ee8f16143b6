"""A job is a pure machine: its files import nothing that waits, reads a clock, or is shared by threads."""

import ast
from pathlib import Path

import pytest

import replicax
from replicax._ps import job

FORBIDDEN = {
    "socket", "threading", "time", "queue", "concurrent", "asyncio", "selectors", "multiprocessing", "datetime",
    "subprocess", "select", "signal", "random", "os", "_thread", "contextvars",
}  # fmt: skip

FILES = sorted(Path(job.__file__).parent.glob("*.py"))
SOURCES = Path(replicax.__file__).parent.parent


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_behind(file):
    """The files of parameter servers that a file needs, and itself."""
    found, left = set(), [file]
    while left:
        one = left.pop()
        if one in found:
            continue
        found.add(one)
        for name in imported(one):
            if name.startswith("replicax._ps."):
                parts = name.split(".")
                paths = [SOURCES.joinpath(*parts[:n]).with_suffix(".py") for n in range(3, len(parts) + 1)]
                left += [path for path in paths if path.exists()]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_job_imports_no_socket_thread_clock_lock_or_future(file):
    wrong = [
        f"{each.name} imports {name}"
        for each in files_behind(file)
        for name in imported(each)
        if name.partition(".")[0] in FORBIDDEN
    ]
    assert not wrong


def test_the_files_behind_a_job_are_found():
    names = {file.name for file in files_behind(SOURCES / "replicax" / "_ps" / "job" / "machine.py")}
    assert {"machine.py", "closures.py", "rounds.py", "worker_rules.py", "limits.py"} <= names
