"""On pages with complete files and commands that run them, the commands print the output on the page."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from checks import path_of_programs, xla_flags
from replicax import testing
from replicax._src.cluster.machine_layout import free_ports

ROOT = pathlib.Path(__file__).parents[2]
LISTING = re.compile(r"```(python|bash)\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
OF_JAX = re.compile(r"[WEIF]\d{4} |\[Gloo\] ")
LATE = re.compile(r"\w+ \d+ has been waiting \d+ s for all tasks to start ")  # on a busy machine
OF_TASK = re.compile(r"(?:chief|worker|ps|evaluator) \d+(?: +\||:) ")
LIMIT_S = 240
PORTS = ("23451", "23452")  # of the pages: others are taken here, that are free


@pytest.fixture
def shell(tmp_path):
    """``shell(command)``: the output of a command in a folder that keeps files and variables."""
    programs, folder = tmp_path / "bin", tmp_path / "here"
    programs.mkdir()
    folder.mkdir()
    for name, command in (("python3", ""), ("replicax", "-m replicax"), ("pytest", "-m pytest")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {
        "REPLICAX_PROGRESS": "0",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path_of_programs(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(),
        "HOME": str(tmp_path),
    }

    def run(command):
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        ).stdout

    run.folder = folder
    return run


def printed(output):
    """The output without JAX's own lines and those about a task that starts late, grouped by task; lines without a task
    come last.
    """

    def is_left_out(line):
        text = OF_TASK.sub("", line, count=1).strip()
        return OF_JAX.match(text) or LATE.match(text)

    lines = [line for line in output.splitlines() if not is_left_out(line)]

    def task(line):
        match = OF_TASK.match(line)
        return (match is None, match[0] if match else "")

    return "\n".join(sorted(lines, key=task))


def pattern(expected):
    """A pattern for the output on a page: long lines are wrapped there, and … stands for any text."""
    words = [".*?".join(map(re.escape, word.split("…"))) for word in expected.split()]
    return re.compile(r"\s*" + r"\s*".join(words) + r"\s*", re.DOTALL)


HOW_TO = [path for path in sorted((ROOT / "docs/how_to").glob("*.md")) if "```bash\n" in path.read_text()]
# Each starts clusters one after the other.
REFERENCE = [
    ROOT / "docs/reference" / f"{name}.md"
    for name in ("clusters", "testing", "parameter_server_clusters", "parameter_servers")
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        *(pytest.param(page, marks=pytest.mark.rest, id=f"how_to/{page.name}") for page in HOW_TO),
        *(pytest.param(page, marks=pytest.mark.long, id=f"reference/{page.name}") for page in REFERENCE),
    ],
)
def test_commands_print_what_the_page_says_in_processes(page, shell):
    text = page.read_text()
    for written, free in zip(PORTS, free_ports(len(PORTS))):
        text = text.replace(written, str(free))
    listings = LISTING.findall(text)
    assert {kind for kind, *_ in listings} == {"python", "bash"}
    for kind, code, expected in listings:
        if kind == "python":
            name = re.match(r"# (\S+\.py)\n", code)
            if name is None:  # a part of a program
                compile(code, page.name, "exec")
            else:
                (shell.folder / name[1]).write_text(code)
            continue
        got = printed(shell(code))
        assert pattern(expected).fullmatch(got), f"{code}\nprinted\n{got}"


def test_page_has_every_name_of_replicax_testing():
    page = (ROOT / "docs" / "reference" / "testing.md").read_text()
    offered = list(testing.__all__)
    for cls in (testing.LocalCluster, testing.LocalTask):
        offered += [name for name in vars(cls) if not name.startswith("_")]
    assert [name for name in offered if not re.search(rf"\b{name}\b", page)] == []
