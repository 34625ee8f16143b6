"""The listings of the pages run, and print what the pages say they print."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from checks import path_of_programs, xla_flags

ROOT = pathlib.Path(__file__).parents[2]
LISTING = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
TRACKERS = pathlib.Path(__file__).with_name("trackers")  # W&B and MLflow, without the network
SEPARATOR = "=== end of listing ==="

# Runs the listings of one page one after the other, as a person would in one session.
RUNNER = """
import os, sys
os.environ["KERAS_BACKEND"] = "jax"
import jax
*listings, separator = eval(sys.stdin.read())
names = {}
for listing in listings:
    try:
        exec(compile(listing, "<listing>", "exec"), names)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    jax.effects_barrier()
    print(separator, flush=True)
"""


def lines_of(text: str) -> list[str]:
    """The lines in an order of their own: replicas print in no particular order."""
    return sorted(line.strip() for line in text.strip().splitlines())


def how_to_pages(are_run_here):
    """Those with a listing. A page that has commands too is run by test_pages_of_files."""
    pages = {
        f"docs/how_to/{path.name}": path.read_text() for path in sorted((ROOT / "docs/how_to").glob("*.md"))
    }
    return [
        name
        for name, text in pages.items()
        if "```python\n" in text and ("```bash\n" not in text) == are_run_here
    ]


REFERENCE = [
    f"docs/reference/{name}.md"
    for name in ("checkpoints", "data", "keras_fit", "sharded_state", "summaries_and_profiles", "tpus")
]
PAGES = [
    "README.md",
    *(
        pytest.param(page, marks=pytest.mark.rest)
        for page in ["docs/sharp_bits.md", *how_to_pages(True), *REFERENCE]
    ),
]


@pytest.mark.parametrize("page", PAGES)
def test_listings_print_what_the_page_says(page, tmp_path):
    listings = LISTING.findall((ROOT / page).read_text())
    assert listings
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=repr([code for code, _ in listings] + [SEPARATOR]),
        env={
            "PYTHONPATH": path_of_programs(ROOT / "src") + os.pathsep + str(TRACKERS),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags(),
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(SEPARATOR)[:-1]
    assert len(printed) == len(listings)
    for (code, expected), got in zip(listings, printed, strict=True):
        # A long message is wrapped on the page.
        assert lines_of(got) == lines_of(expected) or got.split() == expected.split(), code
