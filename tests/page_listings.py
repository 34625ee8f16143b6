"""The ``python`` listings of a page, and how they run: one session, in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTING = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
SEPARATOR = "=== end of listing ==="
LIMIT_S = 240

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


# Before a listing that prints measurements: its output has the form on the page, with other numbers.
VARIES = "<!-- numbers vary -->"


def without_numbers(text: str) -> str:
    return re.sub(r"\b(?:\d[\d,.]*|True|False)", "#", text)


def lines_of(text: str) -> list[str]:
    """The lines in sorted order, because replicas print in no particular order."""
    return sorted(line.strip() for line in text.strip().splitlines())


def check_listings(text: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Runs the listings of a page in a folder. Each must print the ``text`` after it; a long message may be wrapped."""
    found = list(LISTING.finditer(text))
    listings = [match.groups(default="") for match in found]
    vary = [text[: match.start()].rstrip().endswith(VARIES) for match in found]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=repr([code for code, _ in listings] + [SEPARATOR]),
        env={"HOME": str(folder), "JAX_PLATFORMS": "cpu", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(SEPARATOR)[:-1]
    assert len(printed) == len(listings)
    for (code, expected), got, varies in zip(listings, printed, vary, strict=True):
        if varies:
            expected, got = without_numbers(expected), without_numbers(got)
        assert lines_of(got) == lines_of(expected) or got.split() == expected.split(), (
            f"{code}\nprinted\n{got}"
        )
