"""`make test` runs each quick test once: in the core's tree, with a part, or with the whole house."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREE = runpy.run_path(str(ROOT / "tools" / "core_tree.py"))
BESIDE = (*TREE["TESTS"], "whole")
TARGETS = {"core": "test-core", "plan": "test-plan-quick"}  # the others are named test-NAME


def commands(target):
    """What make would run."""
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, env=clean, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    return [line for line in done.stdout.splitlines() if " -m pytest " in line]


def names_of_targets(lines):
    return [
        name for line in lines for found in re.findall(r"--tests ([\w ]+)", line) for name in found.split()
    ]


def test_each_file_of_tests_is_run_by_one_target():
    in_core = set(TREE["files"]())
    for name in TREE["tracked"]():
        if re.fullmatch(r"tests/(.+/)?test_\w+\.py", name):
            paths = {target: tuple(f"{path}/" for path in TREE["tests_of"](target)) for target in BESIDE}
            running = [target for target in BESIDE if f"{name}/".startswith(paths[target])]
            assert len(running) + (name in in_core) == 1, (
                f"{name} is run by {running}, core: {name in in_core}"
            )
            assert TREE["target_of"](name) == (running or ["core"])[0]


def test_make_test_runs_each_target_once():
    core, beside = commands("test")
    assert "cd build/core" in core
    assert not names_of_targets([core])
    assert sorted(names_of_targets([beside])) == sorted(BESIDE)


@pytest.mark.parametrize("name", ["core", *BESIDE])
def test_each_target_is_run_alone_too(name):
    (line,) = commands(TARGETS.get(name, f"test-{name}"))
    assert names_of_targets([line]) == ([] if name == "core" else [name])
    assert '-m "not long and (quick or not rest)"' in line


def test_the_core_has_the_sources_of_no_part():
    for row in TREE["PARTS"].values():
        kept = [name for name in TREE["files"]() if name.startswith(f"src/replicax/{row['folder']}/")]
        assert not kept, row["name"]


def test_the_tree_follows_the_files_and_keeps_what_python_compiled_and_hypothesis_read(tmp_path):
    tree = runpy.run_path(str(ROOT / "tools" / "core_tree.py"))
    lay_out = tree["lay_out"]
    root = tmp_path / "house"
    lay_out.__globals__.update(ROOT=root, CORE=root / "build" / "core")
    for name in ("src/a.py", "src/gone/b.py", "tests/launch/test_c.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text("build/\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    lay_out()
    core = root / "build" / "core"
    (core / "src" / "__pycache__").mkdir()
    (core / "src" / "__pycache__" / "a.pyc").touch()
    (core / ".hypothesis").mkdir()
    (core / ".hypothesis" / "constants").touch()
    (core / "src" / "gone" / "__pycache__").mkdir()
    (root / "src" / "gone" / "b.py").unlink()
    (root / "src" / "a.py").unlink()
    (root / "src" / "a.py").write_text("new")
    (core / "src" / "left.py").touch()
    lay_out()
    assert (core / "src" / "a.py").read_text() == "new"
    found = {path.relative_to(core).as_posix() for path in core.rglob("*") if path.is_file()}
    assert found == {".gitignore", ".hypothesis/constants", "src/a.py", "src/__pycache__/a.pyc"}
    assert not (core / "src" / "gone").exists(), "Python would import an empty folder"
