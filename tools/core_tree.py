"""Says which target runs which tests, and lays out ``build/core``, the tree without the parts, in which `make test-core`
runs the tests of the core.

``python tools/core_tree.py`` makes the tree anew from the files that git tracks, by hard links. A test that needs a part
fails there, because the part's folder is missing: that is the proof that the core stands alone.
``python tools/core_tree.py --tests TARGET ...`` prints the folders and files of tests that belong to ``launch``,
``whole`` and so on: each test belongs to one target, ``core`` if no table here names it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
CORE = ROOT / "build" / "core"

PARTS = tomllib.loads((ROOT / "tools" / "parts.toml").read_text())
# The tests of each part, and the sources of those that the core does not import.
TESTS = {part: tuple(row["tests"]) for part, row in PARTS.items()}
SOURCES = tuple(f"src/replicax/{row['folder']}" for row in PARTS.values())

# Tests of the whole house (`make test-whole`), with their helpers, and why they are not of the core alone.
WHOLE = {
    "tests/asked_store.py": "a helper of tests/ps",
    "tests/changing_state.py": "a helper of tests/faults",
    "tests/docs": "listings of pages use every part",
    "tests/examples": "programs that `replicax launch` starts",
    "tests/engines": "jobs that the launcher gives to engines",
    "tests/faults": "whole jobs, which the launcher or rx.testing starts",
    "tests/exported.py": "a helper of tests/ps",
    "tests/faulty_network.py": "a helper of tests/faults",
    "tests/gpu": "jobs that the launcher starts",
    "tests/group_network.py": "a helper of tests/ps",
    "tests/in_browser": "they need a browser",
    "tests/in_memory_servers.py": "a helper of tests/ps",
    "tests/loaded_models.py": "a helper of tests/multi_worker and tests/peers",
    "tests/memory_cluster.py": "a helper of tests/ps",
    "tests/mistakes": "programs of users, which use every part",
    "tests/multi_worker": "whole jobs, which the launcher or rx.testing starts",
    "tests/peers": "they need other packages",
    "tests/scripted_job.py": "a helper of tests/launch",
    "tests/servers.py": "a helper of tests/ps",
    "tests/store_connections.py": "a helper of tests/ps",
    "tests/table_updates.py": "a helper of tests/ps",
    "tests/tools": "tools read the sources of the whole house",
    "tests/test_doctests.py": "it runs the examples in docstrings of every module",
    "tests/test_errors_read_well.py": "it reads the error classes of the whole house",
    "tests/test_layering.py": "it reads the sources of the whole house",
    "tests/test_package.py": "it builds the wheel of the whole house",
    "tests/test_public_names.py": "it loads every public name",
    "tests/test_strict_json.py": "it reads the sources of the whole house",
}

# Folders that a run makes in the tree: in .hypothesis are the constants of each source, otherwise parsed again.
KEPT = {"__pycache__", ".hypothesis"}


def files() -> list[str]:
    """Returns the files of the core's tree, as git names them."""
    return [
        name
        for name in tracked()
        if target_of(name) == "core" and not name.startswith(tuple(f"{path}/" for path in SOURCES))
    ]


def tracked() -> list[str]:
    """Returns the files that git tracks, and new ones that it does not ignore."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    return [name for name in names if name and (ROOT / name).exists()]


def target_of(name: str) -> str:
    """Returns the target that runs a file of tests: ``core``, ``whole`` or a part.

    >>> target_of("tests/launch/test_top.py"), target_of("tests/test_layering.py"), target_of("tests/wire/test_listener.py")
    ('launch', 'whole', 'core')
    """
    places = {path: part for part, paths in TESTS.items() for path in paths} | dict.fromkeys(WHOLE, "whole")
    return next((target for path, target in places.items() if f"{name}/".startswith(f"{path}/")), "core")


def tests_of(target: str) -> list[str]:
    """Returns the folders and files of tests that pytest gets for a target other than ``core``."""
    return [
        path
        for path in (WHOLE if target == "whole" else TESTS[target])
        if (ROOT / path).is_dir() or pathlib.Path(path).name.startswith("test_")
    ]


def lay_out() -> None:
    """Makes the tree equal to the files. Those that did not change keep what Python compiled and hypothesis read of them."""
    wanted = {CORE / name: ROOT / name for name in files()}
    folders = {folder for path in wanted for folder in path.parents}
    for folder, below, names in os.walk(CORE):
        here = pathlib.Path(folder)
        for name in below[:]:
            if here / name not in folders:
                below.remove(name)
                if name not in KEPT:
                    shutil.rmtree(here / name)
        for name in names:
            if here / name not in wanted:
                (here / name).unlink()
    for path, original in wanted.items():
        if path.is_symlink() or (path.exists() and not path.samefile(original)):
            path.unlink()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(original, path, follow_symlinks=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tests", nargs="+", choices=(*TESTS, "whole"), help="prints the paths for pytest")
    targets = parser.parse_args().tests
    if targets:
        print(*(path for target in targets for path in tests_of(target)))
    else:
        lay_out()
