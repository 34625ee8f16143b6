"""The listings of every page run, from the top of the page, and print the output on the page.

A page is read as a person would read it: its ``python`` listings are one session, and the ``text`` after a listing is
its output. Pages with ``bash`` listings too are programs in files and commands, which test_pages_of_files.py runs; the
build of the site runs the listings of tutorials.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from checks import path_of_programs, xla_flags
from page_listings import LIMIT_S, LISTING, check_listings

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = re.compile(r"^```bash$", re.MULTILINE)
TRACKERS = pathlib.Path(__file__).with_name("trackers")  # W&B and MLflow, without the network

# Listings that show parts of a program: each is compiled, but not run.
PARTS = {
    "docs/architecture.md",
    "docs/explanation/simulation.md",  # tests/simulation/test_page.py runs it
    # Programs for schedulers: tests/engines runs their like.
    "docs/how_to/slurm.md",
    "docs/how_to/submitit.md",
    "docs/how_to/ray.md",
    "docs/how_to/ray_parameter_servers.md",
    # tests/peers runs these, with the packages.
    "docs/how_to/keras_tuner.md",
    "docs/how_to/optuna.md",
    "docs/reference/clusters.md",
    "docs/reference/parameter_servers.md",
    "docs/reference/plans.md",
    "docs/migrating_from_tensorflow.md",
}


def pages_with_listings() -> dict[str, str]:
    """README.md and each page of docs that has a ``python`` listing, and its text."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    paths = [
        path for path in paths if path.parent.name != "tutorials"
    ]  # the build of the site runs their cells
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    return {page: text for page, text in texts.items() if LISTING.search(text)}


WITH_LISTINGS = pages_with_listings()
RUN_HERE = [page for page, text in WITH_LISTINGS.items() if page not in PARTS and not COMMAND.search(text)]


@pytest.mark.parametrize(
    "page", [page if page == "README.md" else pytest.param(page, marks=pytest.mark.rest) for page in RUN_HERE]
)
def test_listings_print_what_the_page_says(page, tmp_path):
    environment = {
        "PYTHONPATH": path_of_programs(ROOT / "src") + os.pathsep + str(TRACKERS),
        "XLA_FLAGS": xla_flags(),
    }
    check_listings(WITH_LISTINGS[page], tmp_path, environment)


def test_programs_by_hand_print_what_those_on_replicax_print():
    """The page for JAX users has each program twice; both start with the first listing of the page."""
    _, *printed = [expected for _, expected in LISTING.findall((ROOT / "docs/jax_users.md").read_text())]
    assert all(printed)
    assert printed[::2] == printed[1::2]


@pytest.mark.parametrize("page", WITH_LISTINGS)
def test_listings_compile(page):
    for code, _ in LISTING.findall(WITH_LISTINGS[page]):
        compile(code, page, "exec")


# Types of other libraries are not checked: Keras derives them from its defaults, and optax has nested pytrees.
OTHERS = ("flax", "keras", "mlflow", "optax", "wandb")
ANY = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"
CHECKED = [
    page
    for page in RUN_HERE
    if page in ("README.md", "docs/jax_users.md") or "/start/" in page or "/how_to/" in page
]


@pytest.mark.rest
def test_type_checker_finds_no_mistake(tmp_path):
    """Each listing is checked after those before it on its page."""
    starts = {}
    for page in CHECKED:
        listings = [code for code, _ in LISTING.findall(WITH_LISTINGS[page])]
        for number, code in enumerate(listings):
            before = "".join(listings[:number])
            script = tmp_path / f"{page.replace('/', '_')[:-3]}_{number}.py"
            script.write_text(before + code)
            starts[str(script)] = page, before.count("\n")
    for name in OTHERS:
        (tmp_path / "typings" / name).mkdir(parents=True)
        (tmp_path / "typings" / name / "__init__.pyi").write_text(ANY)
    settings = {"typeCheckingMode": "basic", "reportRedeclaration": False, "include": ["*.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(starts)
    found = []
    for each in report["generalDiagnostics"]:
        page, start = starts[each["file"]]
        line = each["range"]["start"]["line"] - start
        if each["severity"] == "error" and line >= 0:
            found.append(f"{page}, line {line + 1} of a listing: {each['message']}")
    assert found == []
